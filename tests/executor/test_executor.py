"""Executors: the arrays they send and the replies they accept."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llm_serving.core.step import NO_SCORES, AllowedTokens, DraftRequest, Scores, StepOutput, all_tokens_allowed
from llm_serving.engine.engine import Engine
from llm_serving.errors import StepMismatchError, WorkerDiedError
from llm_serving.executor.executor import LocalExecutor, RemoteExecutor, StepFailedError
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.observability.metrics import Metrics
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel
from llm_serving.transport.codec import ALLOWED_TYPES, STEP_TYPES, allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    MasterMessage,
    Progress,
    Propose,
    Proposed,
    RunStep,
    SetAllowedTokens,
    Shutdown,
    StepDone,
    StepEnding,
    StepFailed,
)
from llm_serving.transport.shared_memory import SharedBuffers, num_bytes
from msgspec.structs import replace
from support.factories import create_request, create_scheduler
from support.step_factories import sampling_input, step_input, top_tokens
from support.word_tokenizer import WordTokenizer


class Agent:
    """The WorkAgent's end of an executor, without a process: the test reads the messages and writes the replies."""

    def __init__(self, step_timeout_s=None):
        master, self.socket = socket.socketpair()
        self._master_channel = Channel(master, AgentMessage)
        self.channel = Channel(self.socket, MasterMessage)
        self._buffers = SharedBuffers.create(2, 65536)
        self._mapping = SharedBuffers(self._buffers.fd, 2, self._buffers.buffer_bytes)
        self.now = 0.0
        """Time in seconds, advanced only by the test."""
        self.executor = RemoteExecutor(self._master_channel, self._buffers, step_timeout_s, lambda: self.now)

    def receive(self):
        """Return the next step as read from shared memory, and its buffer."""
        message = self.channel.receive(10.0)
        assert isinstance(message, RunStep)
        self._newest = message
        arrays = self._mapping.read(message.buffer, message.shapes, STEP_TYPES)
        return step_from_arrays(message.step, arrays, message.allowed_follow), message.buffer

    def receive_allowed(self):
        """Return the allowed tokens of the newest step."""
        message, step = self.channel.receive(10.0), self._newest
        assert isinstance(message, SetAllowedTokens)
        before = num_bytes(step.shapes, STEP_TYPES)
        arrays = self._mapping.read(step.buffer, message.shapes, ALLOWED_TYPES, behind=before)
        return allowed_from_arrays(step.step, arrays)

    def reply(self, step, *token_ids):
        self.channel.send(encode_output(output(step, *token_ids)))

    def close(self):
        self.channel.close()
        self._master_channel.close()
        self._mapping.close()
        self._buffers.close()


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.close()


def a_step(number, *token_ids):
    return step_input([(token_ids or (5,), 0, [1])], step=number)


def output(step, *token_ids):
    count = len(token_ids)
    return StepOutput(
        step,
        np.array(token_ids, np.int32),
        np.full(count, -0.5, np.float32),
        top_tokens([([2 * each, 2 * each + 1], [-0.5, -each]) for each in range(count)]),
        {0: "all logits are NaN"},
    )


def assert_equal(left, right):
    for name in left.__struct_fields__:
        first, second = getattr(left, name), getattr(right, name)
        if name in ("sampling", "scoring", "scores", "top"):
            assert_equal(first, second)
        else:
            np.testing.assert_array_equal(first, second)


class TestSubmit:
    def test_submitted_arrays_arrive_unchanged(self, agent):
        sampling = sampling_input(2, history={1: [5, 6]}, bias={0: {3: -1.5}}, seed=[2**64 - 1, 4], temperature=0.5)
        first = step_input(
            [((5, 6, 7), 0, [1]), ((8,), 20, [2, 3])], step=0, sampling=sampling, moves=[(1, 4, 0), (0, 2, 3)]
        )
        second = a_step(1, 9)
        agent.executor.submit(first)
        agent.executor.submit(second)
        for expected in (first, second):
            step, buffer = agent.receive()
            assert buffer == expected.step
            assert_equal(step, expected)

    def test_a_buffer_is_not_reused_before_the_reply_to_its_step(self, agent):
        agent.executor.submit(a_step(0, 5))
        agent.executor.submit(a_step(1, 6))
        with pytest.raises(AssertionError, match=r"buffer 0 is still used by step 0"):
            agent.executor.submit(a_step(2, 7))
        step, _ = agent.receive()
        assert step.token_ids.tolist() == [5]
        agent.receive()
        agent.reply(0, 50)
        agent.executor.collect()
        agent.executor.submit(a_step(2, 7))
        step, buffer = agent.receive()
        assert (step.token_ids.tolist(), buffer) == ([7], 0)

    def test_a_failed_step_frees_its_buffer(self, agent):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.channel.send(StepFailed(0, "out of memory"))
        with pytest.raises(StepFailedError):
            agent.executor.collect()
        agent.executor.submit(a_step(2))

    def test_max_steps_in_flight_is_the_number_of_buffers(self, agent):
        assert agent.executor.max_steps_in_flight == 2

    def test_submit_detects_a_dead_work_agent(self, agent):
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.submit(a_step(0))


class TestCollect:
    def test_collect_returns_the_outputs_in_order(self, agent):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.reply(0, 50)
        agent.reply(1, 51)
        assert_equal(agent.executor.collect(), output(0, 50))
        assert_equal(agent.executor.collect(), output(1, 51))

    def test_num_compilations_comes_from_the_latest_reply(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.send(encode_output(output(0, 50), num_compilations=3))
        assert agent.executor.num_compilations == 0
        agent.executor.collect()
        assert agent.executor.num_compilations == 3

    def test_only_a_completed_step_ends_a_series_of_restarts(self, agent):
        agent.executor.num_restarts = 3
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.channel.send(StepFailed(0, "no"))
        agent.reply(1, 51)
        with pytest.raises(StepFailedError):
            agent.executor.collect()
        assert agent.executor.num_restarts == 3
        agent.executor.collect()
        assert agent.executor.num_restarts == 0

    @pytest.mark.parametrize("number", [1, 2**40, -1])
    def test_collect_rejects_the_reply_to_another_step(self, agent, number):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.reply(number, 50)
        with pytest.raises(StepMismatchError, match=f"expected the reply to step 0, got StepDone.step={number},"):
            agent.executor.collect()

    @pytest.mark.parametrize("reply", [Progress("loading"), StepFailed(1, "no")])
    def test_collect_rejects_other_messages(self, agent, reply):
        agent.executor.submit(a_step(0))
        agent.channel.send(reply)
        with pytest.raises(StepMismatchError, match="expected the reply to step 0, got "):
            agent.executor.collect()

    @pytest.mark.parametrize("reply", [encode_output(output(0, 50)), Progress("loading")])
    def test_collect_rejects_a_message_while_no_step_is_in_flight(self, agent, reply):
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        agent.executor.collect()
        agent.channel.send(reply)
        with pytest.raises(StepMismatchError, match="expected nothing, got "):
            agent.executor.collect()

    def test_a_failed_step_leaves_the_executor_usable(self, agent):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.channel.send(StepFailed(0, "out of memory"))
        agent.reply(1, 51)
        with pytest.raises(StepFailedError, match="out of memory"):
            agent.executor.collect()
        assert agent.executor.collect().token_ids.tolist() == [51]

    @pytest.mark.parametrize(
        "data",
        [
            struct.pack("<I", MAX_FRAME_BYTES + 1),
            struct.pack("<I", 4) + b"\xff\xff\xff\xff",
            struct.pack("<I", 0),
            b"GET / HTTP/1.1\r\n\r\n",
        ],
    )
    def test_invalid_frame_counts_as_a_dead_work_agent(self, agent, data):
        agent.executor.submit(a_step(0))
        agent.socket.sendall(data)
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (output(0), "other results than requested"),
            (output(0, 50, 51), "other results than requested"),
            (replace(output(0, 50), scores=Scores(np.zeros(1), np.zeros(1), top_tokens([([], [])]))), "other results"),
            (
                replace(output(0, 50), scores=replace(NO_SCORES, top=top_tokens([([], [])]))),
                "other results than requested",
            ),
            (replace(output(0, 50), vectors=np.zeros((1, 4), np.float32)), "other results than requested"),
            (replace(output(0, -1), row_errors={}), "has token ids outside"),
            (replace(output(0, -1), row_errors={1: "of another row"}), "or -1 without an error"),
            (replace(output(0, -1), row_errors={-1: "of no row"}), "or -1 without an error"),
            (output(0, -2), "has token ids outside"),
            (output(0, MAX_VOCAB_SIZE), "has token ids outside"),
        ],
    )
    def test_unrequested_results_count_as_a_dead_work_agent(self, agent, given, message):
        agent.executor.submit(a_step(0))
        agent.channel.send(encode_output(given))
        with pytest.raises(WorkerDiedError, match=message):
            agent.executor.collect()

    def test_a_failed_sample_is_accepted_with_its_row_error(self, agent):
        agent.executor.submit(a_step(0))
        agent.reply(0, -1)
        assert agent.executor.collect().row_errors == {0: "all logits are NaN"}

    def test_a_master_message_counts_as_a_dead_work_agent(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.send(Shutdown())
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    def test_a_closed_connection_counts_as_a_dead_work_agent(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    def test_a_late_reply_counts_as_a_dead_work_agent(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.submit(a_step(0))
        with pytest.raises(WorkerDiedError, match="no reply within 0 s"):
            agent.executor.collect()
        agent.close()

    def test_an_arrived_reply_is_read_after_the_timeout(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        assert agent.executor.collect().token_ids.tolist() == [50]
        agent.close()


def test_allowed_tokens_are_sent_after_the_step(agent):
    for number, words in enumerate(([3, -1], [4])):  # the second one is formed ahead
        agent.executor.submit(replace(a_step(number), allowed_follow=True))
        if number:
            assert not agent.executor.needs_allowed_tokens
            agent.reply(0, 50)
            agent.executor.collect()
        assert agent.executor.needs_allowed_tokens
        agent.executor.set_allowed_tokens(AllowedTokens(np.array([0, len(words)], np.int32), np.array(words, np.int32)))
        assert not agent.executor.needs_allowed_tokens
        step, _ = agent.receive()
        assert (step.step, step.allowed_follow) == (number, True)
        offsets, received = agent.receive_allowed()
        assert (offsets.tolist(), received.tolist()) == ([0, len(words)], words)
    agent.reply(1, 51)
    agent.executor.collect()
    agent.executor.submit(a_step(2))
    assert not agent.executor.needs_allowed_tokens


def test_collect_reports_a_work_agent_that_died_before_set_allowed_tokens(agent):
    agent.executor.submit(replace(a_step(0), allowed_follow=True))
    agent.channel.close()
    agent.executor.set_allowed_tokens(all_tokens_allowed(1))
    with pytest.raises(WorkerDiedError):
        agent.executor.collect()


class TestAwaitEnding:
    @pytest.fixture
    def agent(self):
        """Return an agent that has replied to step 0 and received step 1, whose end it must announce."""
        agent = Agent(step_timeout_s=10.0)
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        agent.executor.collect()
        agent.executor.submit(a_step(1), announce_ending=True)
        yield agent
        agent.close()

    def test_run_step_message_requests_the_announcement_of_the_end(self):
        agent = Agent()
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1), announce_ending=True)
        assert [agent.channel.receive(10.0).announce_ending for _ in range(2)] == [False, True]
        agent.close()

    def test_await_ending_returns_at_the_announcement(self, agent):
        agent.channel.send(StepEnding(1))
        agent.executor.await_ending()
        assert agent.executor._ending == 1
        agent.executor.submit(a_step(2), announce_ending=True)
        agent.reply(1, 51)
        agent.channel.send(StepEnding(2))
        agent.reply(2, 52)
        assert [agent.executor.collect().token_ids.tolist() for _ in range(2)] == [[51], [52]]

    def test_await_ending_waits_for_the_newest_step(self, agent):
        agent.executor.submit(a_step(2), announce_ending=True)
        for message in (StepEnding(1), encode_output(output(1, 51)), StepEnding(2)):
            agent.channel.send(message)
        agent.executor.await_ending()
        assert agent.executor._ending == 2
        agent.channel.close()
        assert agent.executor.collect().token_ids.tolist() == [51]
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    @pytest.mark.parametrize("reply", [encode_output(output(1, 51)), StepFailed(1, "out of memory")])
    def test_await_ending_does_not_wait_for_a_finished_step(self, agent, reply):
        agent.channel.send(reply)
        agent.executor.await_ending()
        agent.channel.close()
        if isinstance(reply, StepFailed):
            with pytest.raises(StepFailedError, match="out of memory"):
                agent.executor.collect()
        else:
            assert agent.executor.collect().token_ids.tolist() == [51]

    def test_await_ending_returns_at_once_without_a_step_or_an_announcement(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.await_ending()
        agent.executor.submit(a_step(0))
        agent.executor.await_ending()
        agent.close()

    def test_await_ending_counts_towards_the_step_timeout(self, agent):
        waits = []

        def receive(timeout_s):
            waits.append(timeout_s)
            agent.now += 4.0
            return StepEnding(1) if len(waits) == 1 else encode_output(output(len(waits) - 1, 51))

        agent._master_channel.receive = receive
        agent.executor.await_ending()
        agent.executor.submit(a_step(2))
        agent.executor.collect()
        agent.executor.collect()
        assert waits == [10.0, 6.0, 10.0]

    @pytest.mark.parametrize("number", [0, 2])
    def test_await_ending_rejects_an_unrequested_announcement(self, agent, number):
        agent.channel.send(StepEnding(number))
        with pytest.raises(
            StepMismatchError, match=f"announced the end of step {number}, which the master did not request"
        ):
            agent.executor.await_ending()

    def test_await_ending_detects_a_dead_work_agent(self, agent):
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.await_ending()


@pytest.mark.parametrize(
    "reply",
    [
        encode_output(output(7, 50)),
        StepDone(0, (bytes(4), b""), {}),
        StepDone(0, (bytes(4), bytes(4), bytes(4)), {}),
        StepDone(0, (bytes(3), bytes(4)), {}),
        StepDone(0, (bytes(8), bytes(8)), {}),
        StepDone(0, (b"", b""), {}),
        StepDone(0, (), {}),
    ],
    ids=[
        "another step",
        "no logprobs",
        "no top logprobs",
        "three bytes",
        "too many samples",
        "too few samples",
        "nothing",
    ],
)
def test_engine_publishes_no_tokens_of_an_invalid_reply(agent, reply):
    pieces = []
    engine = Engine(create_scheduler(), agent.executor, WordTokenizer(), Metrics(), pieces.extend)
    engine.submit(create_request(4, request_id="r"))
    agent.channel.send(reply)
    engine.run()
    (piece,) = pieces
    assert (piece.request_id, piece.token_ids, piece.text) == ("r", (), "")
    assert piece.failed
    assert engine.dead == piece.error


class TestProposals:
    ASKED = (
        DraftRequest(3, 0, [5, 6], 2, 1.0, 0, 0.9, 0.0, 2**64 - 1),
        DraftRequest(4, 128, [7], 1, 0.0, 0, 1.0, 0.0, 0),
    )

    @pytest.fixture
    def ask(self, agent):
        with ThreadPoolExecutor(1) as pool:
            yield lambda: pool.submit(agent.executor.propose, self.ASKED)

    def test_propose_returns_the_draft_tokens(self, agent, ask):
        proposed = ask()
        assert agent.channel.receive(10.0) == Propose(list(self.ASKED))
        agent.channel.send(Proposed([[8, 9], []]))
        assert proposed.result(10.0) == [[8, 9], []]
        agent.executor.submit(a_step(0, 5))
        agent.receive()
        agent.reply(0, 50)
        assert agent.executor.collect().token_ids.tolist() == [50]

    def test_propose_returns_nothing_if_the_draft_model_fails(self, agent, ask, caplog):
        proposed = ask()
        agent.channel.receive(10.0)
        agent.channel.send(Proposed([], "ValueError: no memory"))
        assert proposed.result(10.0) == [[], []]
        assert "the draft model failed: ValueError: no memory" in caplog.text

    @pytest.mark.parametrize(
        "reply",
        [
            Proposed([[1]]),
            Proposed([[1, 2, 3], []]),  # more than was wanted
            Proposed([[-1], []]),  # what a step takes for a token that another sample has chosen
            Proposed([[2**31], []]),
            StepFailed(0, "?"),
            None,
        ],
    )
    def test_propose_treats_an_invalid_reply_as_a_dead_work_agent(self, agent, ask, reply):
        proposed = ask()
        agent.channel.receive(10.0)
        if reply is None:
            agent.channel.close()
        else:
            agent.channel.send(reply)
        with pytest.raises((WorkerDiedError, StepMismatchError)):
            proposed.result(10.0)


class TestLocalExecutor:
    class Runner:
        def __init__(self, error):
            self.error = error

        def execute(self, step):
            if step.step == 0:
                raise self.error
            return output(step.step, 50)

    def two_steps(self, error):
        executor = LocalExecutor(self.Runner(error))
        executor.submit(a_step(0))
        executor.submit(a_step(1))
        return executor

    def test_local_executor_survives_a_failing_step(self):
        executor = self.two_steps(ValueError("too long"))
        with pytest.raises(StepFailedError, match="ValueError: too long"):
            executor.collect()
        assert executor.collect().token_ids.tolist() == [50]

    def test_local_executor_reports_a_dead_runner(self):
        with pytest.raises(WorkerDiedError, match="killed"):
            self.two_steps(WorkerDiedError("killed")).collect()
