"""A WorkAgent that dies is replaced, a few times in a row."""

from __future__ import annotations

import pytest
from llm_serving.engine import supervised_executor
from llm_serving.engine.supervised_executor import SupervisedExecutor, restart_delay_s
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.transport.messages import Loaded

LOADED = Loaded(num_blocks=9, num_swap_blocks=2, notice="")


class StandInAgent:
    def __init__(self) -> None:
        self.loaded = LOADED
        self.channel = self.buffers = None
        self.ended = ""

    def kill(self) -> None:
        self.ended = self.ended or "killed"

    def stop(self) -> None:
        self.ended = self.ended or "stopped"


class StandInExecutor:
    max_steps_in_flight = 2
    next_step = 0

    def __init__(self, channel, buffers, step_timeout_s, clock) -> None:
        pass

    def collect(self) -> str:
        return "output"


class Starts:
    """Starts WorkAgents, or does not, as the test wants."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.agents: list[StandInAgent] = []
        self.likes: list[Loaded | None] = []

    def __call__(self, like: Loaded | None) -> StandInAgent:
        self.likes.append(like)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.agents.append(StandInAgent())
        return self.agents[-1]


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(supervised_executor, "RemoteExecutor", StandInExecutor)
    monkeypatch.setattr(supervised_executor, "FIRST_DELAY_S", 0.0)


def test_the_new_work_agent_loads_as_much_as_the_old_one():
    starts = Starts()
    executor = SupervisedExecutor(starts, 1.0, 5)
    executor.restart("it died")
    assert starts.likes == [None, LOADED]
    assert [agent.ended for agent in starts.agents] == ["killed", ""]
    executor.close()
    assert starts.agents[-1].ended == "stopped"


def test_one_that_does_not_come_up_is_tried_again():
    starts = Starts(None, ConfigError("port in use"), WorkerDiedError("killed at once"))
    executor = SupervisedExecutor(starts, 1.0, 5)
    executor.restart("it died")
    assert len(starts.likes) == 4
    assert executor.collect() == "output"


def test_given_up_after_so_many_in_a_row():
    executor = SupervisedExecutor(Starts(None, *[ConfigError("no memory")] * 9), 1.0, 3)
    with pytest.raises(WorkerDiedError, match="no memory; given up after 3 restarts in a row"):
        executor.restart("it died")


def test_a_step_in_between_starts_the_count_again():
    executor = SupervisedExecutor(Starts(), 1.0, 1)
    for _ in range(3):
        executor.restart("it died")
        executor.collect()
    executor.restart("it died")
    with pytest.raises(WorkerDiedError, match="given up after 1 restarts"):
        executor.restart("it died")


def test_no_restart_once_given_up():
    starts = Starts()
    executor = SupervisedExecutor(starts, 1.0, 5)
    executor.give_up()
    with pytest.raises(WorkerDiedError, match="it died"):
        executor.restart("it died")
    assert len(starts.agents) == 1


def test_delays_double_up_to_a_limit():
    delays = [restart_delay_s(attempt) for attempt in range(12)]
    assert delays[:2] == [0.0, supervised_executor.FIRST_DELAY_S]
    assert delays == sorted(delays)
    assert delays[-1] <= supervised_executor.LONGEST_DELAY_S
