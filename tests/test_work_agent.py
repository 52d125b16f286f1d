"""The WorkAgent's side of the protocol, with a fake model; the test is the master."""

from __future__ import annotations

import os
import resource
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.fingerprint import code_fingerprint
from llm_serving.core.process import describe_address_space_limit
from llm_serving.core.step import AllowedTokens, BlockMoveKind, DraftRequest
from llm_serving.errors import ChannelClosedError, ConfigError, ProtocolError
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    DropCache,
    Failed,
    Hello,
    Loaded,
    Progress,
    Propose,
    Proposed,
    RunStep,
    SetAllowedTokens,
    Shutdown,
    StepDone,
    StepEnding,
    StepFailed,
    Welcome,
)
from msgspec.structs import replace
from support.fake_runner import expected_output
from support.step_factories import sampling_input, step_input
from support.work_agent_master import (
    DEADLINE_S,
    NUM_BLOCKS,
    NUM_SWAP_BLOCKS,
    Runner,
    a_step,
    token_of,
    work_agents,
)

pytestmark = pytest.mark.mindspore


@pytest.fixture
def start(monkeypatch):
    with work_agents(monkeypatch) as start:
        yield start


class TestLoading:
    def test_progress_is_reported_until_the_model_is_loaded(self, start):
        def load_runner(settings, on_progress):
            on_progress("reading weights")
            on_progress(f"compiling for {settings.device.device_target}")
            return Runner(), "slower than usual"

        master = start(load_runner)
        assert master.load() == Progress("reading weights")
        assert master.receive() == Progress("compiling for CPU")
        assert master.receive() == Loaded(NUM_BLOCKS, NUM_SWAP_BLOCKS, "slower than usual")

    def test_a_load_error_is_reported_and_ends_the_process(self, start):
        def load_runner(settings, on_progress):
            raise ConfigError("pa_config.num_blocks: must be at most 10. Given: 11")

        master = start(load_runner)
        assert master.load() == Failed("pa_config.num_blocks: must be at most 10. Given: 11")
        assert master.end.result(DEADLINE_S) is None

    def test_a_framework_error_is_reported(self, start):
        def load_runner(settings, on_progress):
            raise RuntimeError("allocation failed")

        master = start(load_runner)
        assert master.load() == Failed("the model cannot be loaded: allocation failed")
        assert master.end.result(DEADLINE_S) is None

    @pytest.mark.parametrize("is_limited", [True, False])
    def test_a_memory_limit_is_explained(self, start, monkeypatch, caplog, is_limited):
        def load_runner(settings, on_progress):
            raise RuntimeError("Allocate memory failed\n\n-------\n- C++ Call Stack: (For framework developers)\n---\n")

        limit = 2_000_000_000 if is_limited else resource.RLIM_INFINITY
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        failed = start(load_runner).load()
        limit = f": {describe_address_space_limit()}" if is_limited else ""
        assert failed == Failed("the model cannot be loaded: Allocate memory failed" + limit)
        assert ("Traceback" in caplog.text) != is_limited

    def test_a_missing_folder_on_another_machine_names_the_yaml_keys(self, start, tmp_path):
        config = ServingConfig(model=ModelConfig(model_path=tmp_path / "none"))
        failed = start(config=config, away=True).load()
        assert isinstance(failed, Failed)
        assert failed.error.startswith(
            "model_config.model_path must be at the same path on every machine, or come with"
        )
        assert "cluster_config.weights: object_store" in failed.error
        assert failed.error.endswith(f"Given: {tmp_path / 'none'}")

    @pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
    def test_another_machine_may_have_another_model_path(self, start, tmp_path, name):
        paths = []
        (tmp_path / name).write_bytes(b"weights")
        model = tmp_path if name == "model.safetensors" else tmp_path / name

        def load_runner(settings, on_progress):
            paths.append(settings.model.model_path)
            return Runner(), ""

        loaded = start(load_runner, away=True, model_path=model).load()
        assert isinstance(loaded, Loaded)
        assert (paths, loaded.model) == ([model], weight_fingerprint(model))

    def test_another_machine_may_have_a_model_file_at_the_masters_path(self, start, tmp_path):
        model = tmp_path / "model.gguf"
        model.write_bytes(b"weights")
        config = ServingConfig(model=ModelConfig(model_path=model))
        assert isinstance(start(config=config, away=True).load(), Loaded)

    @pytest.mark.parametrize("first", [RunStep(0, 0, ()), Shutdown(), Hello(PROTOCOL_VERSION)])
    def test_another_message_than_load_model_is_rejected(self, start, first):
        master = start()
        master.greet()
        master.channel.send(first)
        assert master.receive() == Failed(f"expected LoadModel, got {type(first).__name__}")
        assert master.end.result(DEADLINE_S) is None

    def test_work_agent_exits_if_the_master_is_lost_while_loading(self, start):
        master = None

        def load_runner(settings, on_progress):
            master.channel.close()
            on_progress("reading weights")

        master = start(load_runner)
        master.greet()
        master.channel.send(master.settings)
        with pytest.raises(ChannelClosedError):
            master.end.result(DEADLINE_S)


class TestSteps:
    def test_steps_are_answered_in_order(self, start):
        master = start()
        master.load()
        expected = expected_output([5, 6, 7], 3)
        master.run(a_step(0, 0, 5, 6, 7))
        master.run(a_step(1, 3, -1))
        replies = [master.receive(), master.receive()]
        assert [reply.step for reply in replies] == [0, 1]
        assert [token_of(reply) for reply in replies] == [expected[:1], expected[1:2]]
        master.run(a_step(2, 4, -1))
        assert token_of(master.receive()) == expected[2:]

    def test_a_reply_contains_the_number_of_compiled_graphs(self, start):
        runner = Runner()
        master = start(lambda settings, on_progress: (runner, ""))
        master.load()
        master.run(a_step(0, 0, 5))
        assert master.receive().num_compilations == 1
        runner.num_compilations = 2
        master.run(a_step(1, 0, 5))
        assert master.receive().num_compilations == 2

    @pytest.mark.parametrize("announces_end", [True, False])
    def test_the_end_of_a_step_is_announced_if_requested(self, start, announces_end):
        master = start(lambda settings, on_progress: (Runner(failing={2}, announces_end=announces_end), ""))
        master.load()
        for number, asked in enumerate((False, True, True, False)):
            master.run(a_step(number, 0, 5), announce_ending=asked)
            if asked and not (announces_end and number == 2):
                assert master.receive() == StepEnding(number)
            assert master.receive().step == number

    def test_a_swapped_request_continues_from_the_host_pool(self, start):
        master = start()
        master.load()

        def run(number, row, *moves):
            position = row[1] + len(row[0])
            master.run(step_input([row], number, sampling=sampling_input(1, position=position), moves=moves))
            return token_of(master.receive())

        expected = expected_output([5, 6, 7, 8, 9], 2)
        assert run(0, ([5, 6, 7, 8, 9], 0, [1, 2])) == expected[:1]
        # Its blocks go to another request, and its own come back elsewhere; the last one is copied besides.
        out = (BlockMoveKind.SWAP_OUT, 1, 2, 0, 0, 4), (BlockMoveKind.SWAP_OUT, 2, 0, 0, 0, 1)
        assert run(1, ([10, 11, 12, 13, 14], 0, [2, 1]), *out) == expected_output([10, 11, 12, 13, 14], 1)
        back = (
            (BlockMoveKind.SWAP_IN, 0, 5, 0, 0, 1),
            (BlockMoveKind.SWAP_IN, 2, 3, 0, 0, 4),
            (BlockMoveKind.COPY, 5, 6, 0, 0, 1),
        )
        assert run(2, (expected[:1], 5, [3, 6]), *back) == expected[1:]

    @pytest.mark.parametrize("max_model_len", [64, 77])
    @pytest.mark.parametrize("max_rows", [1, 3])
    def test_both_sides_use_the_same_buffer_offsets(self, start, max_model_len, max_rows):
        config = ServingConfig(
            model=ModelConfig(max_generate_length=max_model_len, decode_batch_size=max_rows),
            scheduler=SchedulerConfig(max_prefill_tokens=65),
        )
        master = start(config=config)
        master.load()
        for number in range(4):
            prompt = list(range(5, 9 + number))
            master.run(a_step(number, 0, *prompt))
            assert token_of(master.receive()) == expected_output(prompt, 1)

    def test_a_failing_step_is_reported_and_the_next_one_runs(self, start):
        master = start(lambda settings, on_progress: (Runner(failing={0}), ""))
        master.load()
        master.run(a_step(0, 0, 5))
        master.run(a_step(1, 0, 5, 6))
        failed = master.receive()
        assert isinstance(failed, StepFailed)
        assert failed.step == 0
        assert failed.error.startswith("RuntimeError: xxx")
        assert len(failed.error) == 2000
        assert token_of(master.receive()) == expected_output([5, 6], 1)

    def test_a_step_waits_for_its_allowed_tokens(self, start):
        runner = Runner(failing={1})
        master = start(lambda settings, on_progress: (runner, ""))
        master.load()
        replies = []
        for number in range(3):
            shapes = master.run(replace(a_step(number, 0, 5), allowed_follow=True))
            words = np.array([1 << number], np.int32)
            master.allow(number, shapes, AllowedTokens(np.array([0, 1], np.int32), words))
            replies.append(type(master.receive()))
        assert replies == [StepDone, StepFailed, StepDone]
        assert runner.allowed == [[1], [4]]

    @pytest.mark.parametrize("message", [RunStep(1, 1, ()), SetAllowedTokens(1, ())])
    def test_another_message_than_allowed_tokens_is_an_error(self, start, message):
        master = start()
        master.load()
        master.run(replace(a_step(0, 0, 5), allowed_follow=True))
        master.channel.send(message)
        with pytest.raises(ProtocolError, match="expected the allowed tokens of step 0, got"):
            master.end.result(DEADLINE_S)

    def test_a_shutdown_while_waiting_for_allowed_tokens_ends_it(self, start):
        master = start()
        master.load()
        master.run(replace(a_step(0, 0, 5), allowed_follow=True))
        master.channel.send(Shutdown())
        with pytest.raises(ChannelClosedError):
            master.end.result(DEADLINE_S)

    def test_a_step_with_a_missing_array_is_an_error(self, start):
        master = start()
        master.load()
        shapes = master.buffers.write(0, [np.zeros(3, np.int32)]).shapes
        master.channel.send(RunStep(0, 0, shapes))
        with pytest.raises(ProtocolError, match=r"a step has \d+ arrays; 1 arrived"):
            master.end.result(DEADLINE_S)

    def test_a_buffer_that_does_not_exist_is_an_error(self, start):
        master = start()
        master.load()
        master.channel.send(RunStep(0, 2, ()))
        with pytest.raises(ProtocolError, match="buffer 2 does not exist"):
            master.end.result(DEADLINE_S)

    def test_shutdown_ends_the_work_agent(self, start):
        master = start()
        master.load()
        master.channel.send(Shutdown())
        assert master.end.result(DEADLINE_S) is None

    def test_a_lost_master_ends_the_work_agent(self, start):
        master = start()
        master.load()
        master.channel.close()
        with pytest.raises(ChannelClosedError):
            master.end.result(DEADLINE_S)


def test_work_agent_drops_its_cache_between_two_steps(start):
    runner, cleared = Runner(), []
    runner.kv_tensors.clear = lambda: cleared.append(len(runner.steps))
    master = start(lambda settings, on_progress: (runner, ""))
    master.load()
    for number in range(2):
        master.run(a_step(number, 0, 5, 6, 7))
        assert token_of(master.receive()) == expected_output([5, 6, 7], 1)
        master.channel.send(DropCache())
    master.channel.send(Shutdown())
    master.end.result(DEADLINE_S)
    assert cleared == [1, 2]


class TestProposals:
    ASKED = DraftRequest(1, 0, [5, 6], 2, 0.0, 0, 1.0, 0.0, 0)

    def test_draft_model_proposes_between_steps(self, start):
        runner = Runner()
        runner.draft_model = SimpleNamespace(propose=lambda asked: [each.token_ids[::-1] for each in asked])
        master = start(lambda settings, on_progress: (runner, ""))
        master.load()
        master.channel.send(Propose([self.ASKED]))
        assert master.receive() == Proposed([[6, 5]])
        master.run(a_step(0, 0, 5, 6, 7))
        assert token_of(master.receive()) == expected_output([5, 6, 7], 1)

    @pytest.mark.parametrize("draft_model", [None, SimpleNamespace(propose=lambda asked: 1 / 0)])
    def test_a_failing_draft_model_does_not_fail_the_work_agent(self, start, draft_model):
        runner = Runner()
        runner.draft_model = draft_model
        master = start(lambda settings, on_progress: (runner, ""))
        master.load()
        master.channel.send(Propose([self.ASKED]))
        reply = master.receive()
        assert isinstance(reply, Proposed)
        assert (reply.token_ids, bool(reply.error)) == ([], True)
        master.run(a_step(0, 0, 5, 6, 7))
        assert token_of(master.receive()) == expected_output([5, 6, 7], 1)


class TestHandshake:
    def test_work_agent_replies_with_welcome(self, start):
        master = start()
        assert master.greet() == Welcome(PROTOCOL_VERSION, os.getpid(), code_fingerprint())

    @pytest.mark.parametrize("first", [Hello(PROTOCOL_VERSION - 1), Hello(PROTOCOL_VERSION + 1), Shutdown()])
    def test_another_protocol_version_is_rejected(self, start, first):
        master = start()
        assert master.greet(first) == Failed(f"expected Hello of version {PROTOCOL_VERSION}, got {first}")
        assert master.end.result(DEADLINE_S) is None

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 2**32 - 1)])
    def test_a_first_message_other_than_hello_is_rejected(self, start, data):
        master = start()
        master.socket.sendall(data)
        with pytest.raises(ProtocolError):
            master.end.result(DEADLINE_S)
