"""A WorkAgent in a thread, with a fake model; the test is its master."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

from llm_serving import work_agent
from llm_serving.config.schema import ServingConfig
from llm_serving.executor.supervisor import load_settings
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import STEP_TYPES, allowed_arrays, decode_output, step_arrays
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    AgentMessage,
    Hello,
    MasterMessage,
    RunStep,
    SetAllowedTokens,
    StepDone,
)
from llm_serving.transport.shared_memory import SharedBuffers, num_bytes
from support.fake_runner import FakeRunner
from support.step_factories import sampling_input, step_input

NUM_BLOCKS = 8
NUM_SWAP_BLOCKS = 3
DEADLINE_S = 10.0


class Runner(FakeRunner):
    """A fake runner that fails on given steps."""

    def __init__(self, failing=(), announces_end=False):
        super().__init__(NUM_BLOCKS, 4, NUM_SWAP_BLOCKS)
        self._announces_end = announces_end
        self._announcement = None
        self.kv_tensors = SimpleNamespace(
            num_blocks=NUM_BLOCKS, num_swap_blocks=NUM_SWAP_BLOCKS, block_bytes=0, transfer=None
        )
        self.num_compilations = 1
        self._failing = failing
        self.allowed = []

    def execute(self, step, await_allowed=None):
        if step.step in self._failing:
            self.steps.append(step)
            raise RuntimeError("x" * 5000)
        if self._announcement is not None:
            self._announcement()
            self._announcement = None

        def take():
            allowed = await_allowed()
            self.allowed.append(allowed.words.tolist())  # copied, because the buffer is reused
            return allowed

        return super().execute(step, take)

    def announce_ending(self, announce):
        if self._announces_end:
            self._announcement = announce
        return self._announces_end


class Master:
    """The test's end of a connection to a WorkAgent in a thread."""

    def __init__(self, config, pool, model_path=None, away=False):
        """With `away` the WorkAgent is on another machine, without shared memory, and has the model at `model_path`."""
        self.settings = load_settings(config, 0)
        self.socket, right = socket.socketpair()
        self.channel = Channel(self.socket, AgentMessage)
        self._agent_channel = Channel(right, MasterMessage)
        self.buffers = SharedBuffers.create(self.settings.num_buffers, self.settings.buffer_bytes)
        memory_fd = None if away else self.buffers.fd
        self.end = pool.submit(work_agent.serve, self._agent_channel, memory_fd, model_path=model_path)

    def greet(self, hello=None):
        self.channel.send(hello or Hello(PROTOCOL_VERSION))
        return self.receive()

    def load(self):
        self.greet()
        self.channel.send(self.settings)
        return self.receive()

    def run(self, step, announce_ending=False):
        buffer = step.step % self.settings.num_buffers
        shapes = self.buffers.write(buffer, step_arrays(step)).shapes
        self.channel.send(RunStep(step.step, buffer, shapes, announce_ending, step.allowed_follow))
        return shapes

    def allow(self, number, behind, allowed):
        buffer = number % self.settings.num_buffers
        written = self.buffers.write(buffer, allowed_arrays(number, allowed), num_bytes(behind, STEP_TYPES))
        self.channel.send(SetAllowedTokens(number, written.shapes))

    def receive(self):
        return self.channel.receive(DEADLINE_S)

    def close(self):
        self.channel.close()
        self.end.exception(DEADLINE_S)
        self._agent_channel.close()
        self.buffers.close()


@contextmanager
def work_agents(monkeypatch):
    """Yield a function that starts a WorkAgent whose runner `load_runner` returns; by default one that never fails."""
    masters = []

    with ThreadPoolExecutor() as pool:

        def start(load_runner=lambda settings, on_progress: (Runner(), ""), config=None, **where):
            monkeypatch.setattr(work_agent, "load_runner", lambda *given: load_runner(*given[:2]))
            masters.append(Master(config or ServingConfig(), pool, **where))
            return masters[-1]

        yield start
        for master in masters:
            master.close()


def a_step(number, computed, *token_ids):
    position = computed + len(token_ids)
    return step_input([(token_ids, computed, [1, 2])], step=number, sampling=sampling_input(1, position=position))


def token_of(reply):
    assert isinstance(reply, StepDone)
    return decode_output(reply).token_ids.tolist()
