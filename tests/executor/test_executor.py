"""The master's end of a step: what it writes, what it makes of replies."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
from llm_serving.core.step import NO_SCORES, AllowedTokens, Continuation, Scores, StepOutput, all_tokens_allowed
from llm_serving.engine.engine import Engine
from llm_serving.errors import StepMismatchError, WorkerDiedError
from llm_serving.executor.executor import LocalExecutor, RemoteExecutor, StepFailedError
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.observability.metrics import Metrics
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel
from llm_serving.transport.codec import allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    Allow,
    MasterMessage,
    Progress,
    Propose,
    Proposed,
    RunStep,
    Shutdown,
    StepDone,
    StepEnding,
    StepFailed,
)
from llm_serving.transport.shared_memory import SharedBuffers
from support.factories import create_request, create_scheduler
from support.step_factories import sampling_input, step_input, top_tokens
from support.word_tokenizer import WordTokenizer


class Agent:
    """The other end of an executor, without a process: the test reads what arrives and writes the replies."""

    def __init__(self, step_timeout_s=None):
        master, self.socket = socket.socketpair()
        self._master_channel = Channel(master, AgentMessage)
        self.channel = Channel(self.socket, MasterMessage)
        self._buffers = SharedBuffers.create(2, 65536)
        self._mapping = SharedBuffers(self._buffers.fd, 2, self._buffers.buffer_bytes)
        self.now = 0.0
        """Seconds; they pass only when the test says so."""
        self.executor = RemoteExecutor(self._master_channel, self._buffers, step_timeout_s, lambda: self.now)

    def receive(self):
        """The next step as it lies in the memory, and the buffer it lies in."""
        message = self.channel.receive(10.0)
        assert isinstance(message, RunStep)
        self._newest = message
        arrays = self._mapping.read(message.buffer, message.layout)
        return step_from_arrays(message.step, arrays, message.allowed_follow), message.buffer

    def receive_allowed(self):
        """What the newest step may choose."""
        message, step = self.channel.receive(10.0), self._newest
        assert isinstance(message, Allow)
        arrays = self._mapping.read(step.buffer, message.layout, behind=step.layout)
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
    for field in fields(left):
        first, second = getattr(left, field.name), getattr(right, field.name)
        if field.name in ("sampling", "scoring", "scores", "top"):
            assert_equal(first, second)
        else:
            np.testing.assert_array_equal(first, second)


class TestSubmit:
    def test_the_other_side_reads_what_was_submitted(self, agent):
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

    def test_a_buffer_is_not_written_again_before_the_reply_to_its_step(self, agent):
        agent.executor.submit(a_step(0, 5))
        agent.executor.submit(a_step(1, 6))
        with pytest.raises(AssertionError, match=r"buffer 0 still belongs to step \[0\]"):
            agent.executor.submit(a_step(2, 7))
        step, _ = agent.receive()
        assert step.token_ids.tolist() == [5]
        agent.receive()
        agent.reply(0, 50)
        agent.executor.collect()
        agent.executor.submit(a_step(2, 7))
        step, buffer = agent.receive()
        assert (step.token_ids.tolist(), buffer) == ([7], 0)

    def test_a_failed_step_gives_its_buffer_back(self, agent):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.channel.send(StepFailed(0, "out of memory"))
        with pytest.raises(StepFailedError):
            agent.executor.collect()
        agent.executor.submit(a_step(2))

    def test_as_many_steps_fit_as_there_are_buffers(self, agent):
        assert agent.executor.max_steps_in_flight == 2

    def test_a_work_agent_that_is_gone_is_noticed(self, agent):
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.submit(a_step(0))


class TestCollect:
    def test_replies_become_the_outputs_of_their_steps(self, agent):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.reply(0, 50)
        agent.reply(1, 51)
        assert_equal(agent.executor.collect(), output(0, 50))
        assert_equal(agent.executor.collect(), output(1, 51))

    def test_the_latest_reply_tells_how_many_graphs_were_compiled(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.send(encode_output(output(0, 50), num_compilations=3))
        assert agent.executor.num_compilations == 0
        agent.executor.collect()
        assert agent.executor.num_compilations == 3

    @pytest.mark.parametrize("number", [1, 2**40, -1])
    def test_the_reply_to_another_step_is_not_used(self, agent, number):
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1))
        agent.reply(number, 50)
        with pytest.raises(StepMismatchError, match=f"expected the reply to step 0, got StepDone.step={number},"):
            agent.executor.collect()

    @pytest.mark.parametrize("reply", [Progress("loading"), StepFailed(1, "no")])
    def test_what_is_no_reply_to_the_step_is_not_used(self, agent, reply):
        agent.executor.submit(a_step(0))
        agent.channel.send(reply)
        with pytest.raises(StepMismatchError, match="expected the reply to step 0, got "):
            agent.executor.collect()

    @pytest.mark.parametrize("reply", [encode_output(output(0, 50)), Progress("loading")])
    def test_what_comes_when_nothing_is_in_flight_is_not_used(self, agent, reply):
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        agent.executor.collect()
        agent.channel.send(reply)
        with pytest.raises(StepMismatchError, match="expected nothing, got "):
            agent.executor.collect()

    def test_a_failed_step_does_not_end_the_executor(self, agent):
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
    def test_garbage_is_the_end(self, agent, data):
        agent.executor.submit(a_step(0))
        agent.socket.sendall(data)
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (output(0), "has results of another step"),
            (output(0, 50, 51), "has results of another step"),
            (replace(output(0, 50), scores=Scores(np.zeros(1), np.zeros(1), top_tokens([([], [])]))), "another step"),
            (replace(output(0, 50), scores=replace(NO_SCORES, top=top_tokens([([], [])]))), "results of another"),
            (replace(output(0, 50), vectors=np.zeros((1, 4), np.float32)), "results of another step"),
            (replace(output(0, -1), row_errors={}), "has tokens that no model has"),
            (output(0, -2), "has tokens that no model has"),
            (output(0, MAX_VOCAB_SIZE), "has tokens that no model has"),
        ],
    )
    def test_results_that_nobody_asked_for_are_the_end(self, agent, given, said):
        agent.executor.submit(a_step(0))
        agent.channel.send(encode_output(given))
        with pytest.raises(WorkerDiedError, match=said):
            agent.executor.collect()

    def test_a_token_that_could_not_be_chosen_is_told_as_such(self, agent):
        agent.executor.submit(a_step(0))
        agent.reply(0, -1)
        assert agent.executor.collect().row_errors == {0: "all logits are NaN"}

    def test_a_message_of_the_master_is_the_end(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.send(Shutdown())
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    def test_the_end_of_the_connection_is_the_end(self, agent):
        agent.executor.submit(a_step(0))
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.collect()

    def test_a_reply_that_does_not_come_in_time_is_the_end(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.submit(a_step(0))
        with pytest.raises(WorkerDiedError, match="no reply within 0 s"):
            agent.executor.collect()
        agent.close()

    def test_what_has_arrived_is_taken_when_no_time_is_left(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        assert agent.executor.collect().token_ids.tolist() == [50]
        agent.close()


def test_what_a_step_may_choose_follows_it(agent):
    for number, words in enumerate(([3, -1], [4])):  # the second one is formed ahead
        agent.executor.submit(replace(a_step(number), allowed_follow=True))
        if number:
            assert not agent.executor.awaits_allowed
            agent.reply(0, 50)
            agent.executor.collect()
        assert agent.executor.awaits_allowed
        agent.executor.allow(AllowedTokens(np.array([0, len(words)], np.int32), np.array(words, np.int32)))
        assert not agent.executor.awaits_allowed
        step, _ = agent.receive()
        assert (step.step, step.allowed_follow) == (number, True)
        offsets, told = agent.receive_allowed()
        assert (offsets.tolist(), told.tolist()) == ([0, len(words)], words)
    agent.reply(1, 51)
    agent.executor.collect()
    agent.executor.submit(a_step(2))
    assert not agent.executor.awaits_allowed


def test_a_work_agent_that_is_gone_before_it_is_told_is_noticed_by_who_collects(agent):
    agent.executor.submit(replace(a_step(0), allowed_follow=True))
    agent.channel.close()
    agent.executor.allow(all_tokens_allowed(1))
    with pytest.raises(WorkerDiedError):
        agent.executor.collect()


class TestAwaitEnding:
    @pytest.fixture
    def agent(self):
        """Has replied to step 0, and has got step 1, whose end is to be announced."""
        agent = Agent(step_timeout_s=10.0)
        agent.executor.submit(a_step(0))
        agent.reply(0, 50)
        agent.executor.collect()
        agent.executor.submit(a_step(1), announce_ending=True)
        yield agent
        agent.close()

    def test_the_work_agent_is_told_whether_it_is_asked_for(self):
        agent = Agent()
        agent.executor.submit(a_step(0))
        agent.executor.submit(a_step(1), announce_ending=True)
        assert [agent.channel.receive(10.0).announce_ending for _ in range(2)] == [False, True]
        agent.close()

    def test_it_returns_when_the_end_is_near(self, agent):
        agent.channel.send(StepEnding(1))
        agent.executor.await_ending()
        assert agent.executor._ending == 1
        agent.executor.submit(a_step(2), announce_ending=True)
        agent.reply(1, 51)
        agent.channel.send(StepEnding(2))
        agent.reply(2, 52)
        assert [agent.executor.collect().token_ids.tolist() for _ in range(2)] == [[51], [52]]

    def test_it_waits_for_the_newest_step(self, agent):
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
    def test_a_step_that_has_ended_is_not_waited_for(self, agent, reply):
        agent.channel.send(reply)
        agent.executor.await_ending()
        agent.channel.close()
        if isinstance(reply, StepFailed):
            with pytest.raises(StepFailedError, match="out of memory"):
                agent.executor.collect()
        else:
            assert agent.executor.collect().token_ids.tolist() == [51]

    def test_nothing_is_waited_for_without_a_step_or_an_announcement(self):
        agent = Agent(step_timeout_s=0.0)
        agent.executor.await_ending()
        agent.executor.submit(a_step(0))
        agent.executor.await_ending()
        agent.close()

    def test_time_that_it_took_counts_for_the_deadline(self, agent):
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
    def test_an_end_that_nobody_asked_for_is_an_error(self, agent, number):
        agent.channel.send(StepEnding(number))
        with pytest.raises(StepMismatchError, match=f"the end of step {number} was announced"):
            agent.executor.await_ending()

    def test_a_work_agent_that_dies_meanwhile_is_noticed(self, agent):
        agent.channel.close()
        with pytest.raises(WorkerDiedError):
            agent.executor.await_ending()


@pytest.mark.parametrize(
    "reply",
    [
        encode_output(output(7, 50)),
        StepDone(0, bytes(4), b"", b"", b"", 0, {}),
        StepDone(0, bytes(4), bytes(4), bytes(4), b"", 1, {}),
        StepDone(0, bytes(3), bytes(4), b"", b"", 0, {}),
        StepDone(0, bytes(8), bytes(8), b"", b"", 0, {}),
        StepDone(0, b"", b"", b"", b"", 0, {}),
    ],
    ids=["another step", "no logprobs", "no top logprobs", "three bytes", "too many samples", "too few samples"],
)
def test_tokens_of_a_wrong_reply_reach_nobody(agent, reply):
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
        Continuation(3, 0, [5, 6], 2, 1.0, 0, 0.9, 0.0, 2**64 - 1),
        Continuation(4, 128, [7], 1, 0.0, 0, 1.0, 0.0, 0),
    )

    @pytest.fixture
    def ask(self, agent):
        with ThreadPoolExecutor(1) as pool:
            yield lambda: pool.submit(agent.executor.propose, self.ASKED)

    def test_they_arrive_as_they_were_asked_for(self, agent, ask):
        proposed = ask()
        assert agent.channel.receive(10.0) == Propose(list(self.ASKED))
        agent.channel.send(Proposed([[8, 9], []]))
        assert proposed.result(10.0) == [[8, 9], []]
        agent.executor.submit(a_step(0, 5))
        agent.receive()
        agent.reply(0, 50)
        assert agent.executor.collect().token_ids.tolist() == [50]

    def test_a_draft_model_that_fails_says_nothing(self, agent, ask, caplog):
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
    def test_a_work_agent_that_answers_nonsense_or_ends_is_gone(self, agent, ask, reply):
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

    def test_a_failing_step_does_not_end_it(self):
        executor = self.two_steps(ValueError("too long"))
        with pytest.raises(StepFailedError, match="ValueError: too long"):
            executor.collect()
        assert executor.collect().token_ids.tolist() == [50]

    def test_a_runner_that_is_gone_is_the_end(self):
        with pytest.raises(WorkerDiedError, match="killed"):
            self.two_steps(WorkerDiedError("killed")).collect()
