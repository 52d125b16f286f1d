"""Steps that a device computes while the WorkAgent reads the next message, and background work beside steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from llm_serving import work_agent
from llm_serving.core.step import AllowedTokens
from llm_serving.transport.messages import (
    Propose,
    Proposed,
    StepDone,
    StepFailed,
)
from llm_serving.worker.kv_transfer import BackgroundThrottle
from llm_serving.worker.token_graph import StartedStep
from msgspec.structs import replace
from support.work_agent_master import (
    DEADLINE_S,
    Runner,
    a_step,
    work_agents,
)

pytestmark = pytest.mark.mindspore


@pytest.fixture
def start(monkeypatch):
    with work_agents(monkeypatch) as start:
        yield start


class Copy:
    """A `HostCopy` that is complete once an event is set."""

    def __init__(self, ended):
        self._ended = ended

    @property
    def is_done(self):
        return self._ended.is_set()

    def array(self):
        assert self._ended.wait(DEADLINE_S)


class DeviceRunner(Runner):
    """A fake runner of a device. A step ends when its event in `ended` is set, or when the next step starts."""

    def __init__(self, failing=()):
        super().__init__()
        self.events = []
        self.ended = [threading.Event() for _ in range(4)]
        self._fails = failing

    def start(self, step, await_allowed=None):
        number = step.step
        self.events.append(("start", number))
        if number:
            self.ended[number - 1].set()
        copy = Copy(self.ended[number])

        def finish(copied):
            self.events.append(("output", number))
            if number in self._fails:
                raise RuntimeError("the device")
            return output

        output = self.execute(step, await_allowed) if not step.allowed_follow else None
        if output is None:
            return StartedStep(copy, lambda copied: self.execute(step, await_allowed), 1)
        return StartedStep(copy, finish, 1)


class TestStepsOnADevice:
    @pytest.fixture
    def running(self, start):
        def load(**arguments):
            runner = DeviceRunner(**arguments)
            master = start(lambda settings, on_progress: (runner, ""))
            master.load()
            return master, runner

        return load

    def test_the_next_step_is_started_before_the_first_has_ended(self, running):
        master, runner = running()
        master.run(a_step(0, 0, 5, 6))
        runner.ended[1].set()
        master.run(a_step(1, 2, -1))
        assert [master.receive().step for _ in range(2)] == [0, 1]
        assert runner.events == [("start", 0), ("start", 1), ("output", 0), ("output", 1)]

    def test_a_step_that_no_other_follows_is_replied_to_when_it_has_ended(self, running):
        master, runner = running()
        for number, step in enumerate([a_step(0, 0, 5, 6), a_step(1, 2, -1)]):
            master.run(step)
            runner.ended[number].set()
            assert master.receive().step == number

    def test_errors_are_replies_to_their_own_steps(self, running):
        master, runner = running(failing=[0])
        for ended in runner.ended:
            ended.set()
        master.run(a_step(0, 0, 5, 6))
        master.run(a_step(1, 2, -1))
        assert master.receive() == StepFailed(0, "RuntimeError: the device")
        assert isinstance(master.receive(), StepDone)

    def test_a_proposal_follows_the_reply_to_the_started_step(self, running):
        master, runner = running()
        master.run(a_step(0, 0, 5, 6))
        master.channel.send(Propose([]))
        runner.ended[0].set()
        assert [type(master.receive()) for _ in range(2)] == [StepDone, Proposed]

    def test_a_step_with_allowed_tokens_gets_them_before_the_next_message(self, running):
        master, runner = running()
        for ended in runner.ended:
            ended.set()
        step = replace(a_step(0, 0, 5, 6), allowed_follow=True)
        layout = master.run(step)
        master.allow(0, layout, AllowedTokens(np.array([0, 1], np.int32), np.array([1 << 3], np.int32)))
        assert isinstance(master.receive(), StepDone)
        assert runner.allowed == [[1 << 3]]
        master.run(a_step(1, 2, -1))
        assert isinstance(master.receive(), StepDone)


def test_background_work_is_throttled_during_a_step(start, monkeypatch) -> None:
    pauses = []
    beside = BackgroundThrottle(pauses.append)
    monkeypatch.setattr(work_agent, "BackgroundThrottle", lambda: beside)

    class BackgroundRunner(Runner):
        def execute(self, step, await_allowed=None):
            beside.pause_after(1.0)
            return super().execute(step, await_allowed)

    master = start(lambda settings, on_progress: (BackgroundRunner(), ""))
    master.load()
    master.run(a_step(0, 0, 5, 6, 7))
    assert isinstance(master.receive(), StepDone)
    beside.pause_after(1.0)
    assert len(pauses) == 1
