"""A WorkAgent that dies is replaced, as often as that is asked for."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from llm_serving.errors import ConfigError, ProtocolError, WorkerDiedError
from llm_serving.executor import supervisor
from llm_serving.executor.executor import RestartFailedError
from llm_serving.executor.restart_status import Away, GivenUp
from llm_serving.executor.supervisor import SupervisedExecutor, patience_s, restart_delay_s
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
        self.timeouts: list[float] = []

    def __call__(self, like: Loaded | None, timeout_s: float | None) -> StandInAgent:
        assert (timeout_s is None) == (like is None)
        self.timeouts += [] if timeout_s is None else [timeout_s]
        self.likes.append(like)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.agents.append(StandInAgent())
        return self.agents[-1]


class Pauses:
    """Seconds that were waited, at once; the clock goes on by them."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.given_up = False

    def __call__(self, delay_s: float) -> bool:
        self.waited.append(delay_s)
        return self.given_up

    def now(self) -> float:
        return sum(self.waited)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(supervisor, "RemoteExecutor", StandInExecutor)


@pytest.fixture
def pauses():
    return Pauses()


def supervise(starts, pauses, max_restarts=5):
    return SupervisedExecutor(starts, 1.0, max_restarts, pauses.now, pauses)


def test_the_new_work_agent_loads_as_much_as_the_old_one(pauses):
    starts = Starts()
    executor = supervise(starts, pauses)
    executor.restart("it died")
    assert starts.likes == [None, LOADED]
    assert [agent.ended for agent in starts.agents] == ["killed", ""]
    executor.close()
    assert starts.agents[-1].ended == "stopped"


@pytest.mark.parametrize(
    "failure", [ConfigError("no memory"), WorkerDiedError("killed at once"), ProtocolError("?"), OSError("no files")]
)
def test_one_that_does_not_come_up_is_tried_again_for_as_long_as_somebody_asks(failure, pauses):
    executor = supervise(Starts(None, *[failure] * 50), pauses)
    for _ in range(50):
        with pytest.raises(RestartFailedError, match=str(failure).replace("?", "[?]")):
            executor.restart("it died")
    executor.restart("it died")
    assert executor.collect() == "output"
    assert pauses.waited == [restart_delay_s(attempt) for attempt in range(51)]


def test_what_is_known_while_it_is_away(pauses):
    executor = supervise(Starts(None, *[WorkerDiedError("killed")] * 3), pauses, max_restarts=2)
    assert executor.away is None
    for attempt in range(3):
        began = pauses.now()
        with pytest.raises(RestartFailedError):
            executor.restart(f"reason {attempt}")
        assert executor.away == Away(
            reason=f"reason {attempt}",
            since=0.0,
            begins=began + restart_delay_s(attempt),
            load_s=0.0,
            num_failed=attempt,
            num_restarts=attempt + 1,
            max_restarts=2,
        )
        assert executor.away.used_up == executor.used_up == (attempt == 2)
    executor.restart("it died")
    assert executor.away is None
    assert executor.used_up, "no step has been computed yet"
    executor.collect()
    assert not executor.used_up


def test_a_step_in_between_starts_the_pauses_again(pauses):
    executor = supervise(Starts(), pauses)
    for _ in range(3):
        executor.restart("it died")
        executor.restart("it died")
        executor.collect()
    assert pauses.waited == [0.0, supervisor.FIRST_DELAY_S] * 3


def test_no_restart_once_given_up(pauses):
    starts = Starts()
    executor = SupervisedExecutor(starts, 1.0, 5)
    executor.give_up()
    with pytest.raises(WorkerDiedError, match="it died"):
        executor.restart("it died")
    assert len(starts.agents) == 1


def test_a_first_one_that_is_killed_while_it_loads_is_replaced(pauses):
    starts = Starts(*[WorkerDiedError("killed")] * 3)
    assert supervise(starts, pauses).loaded == LOADED
    assert starts.likes == [None] * 4
    with pytest.raises(WorkerDiedError, match="killed"):
        supervise(Starts(*[WorkerDiedError("killed")] * 4), pauses, max_restarts=3)


def test_a_first_one_that_says_why_it_cannot_load_is_believed(pauses):
    with pytest.raises(ConfigError, match="no such model"):
        supervise(Starts(ConfigError("no such model")), pauses)
    assert pauses.waited == []


def test_delays_double_up_to_a_limit():
    delays = [restart_delay_s(attempt) for attempt in range(5000)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == supervisor.LONGEST_DELAY_S


def test_one_that_hangs_while_it_loads_is_soon_replaced_and_a_slow_machine_gets_the_time_it_needs(pauses):
    """One patience for all attempts was too long for the former, and shorter than what the latter needed for ever."""
    starts = Starts(None, *[WorkerDiedError("not ready in time")] * 3)
    executor = supervise(starts, pauses)
    for _ in range(3):
        with pytest.raises(RestartFailedError):
            executor.restart("it died")
    executor.restart("it died")
    executor.restart("it died again")
    assert starts.timeouts == [20.0, 40.0, 80.0, 160.0, 20.0]
    assert [patience_s(24.0, num_failed) for num_failed in range(3)] == [72.0, 144.0, 288.0]


class TestAway:
    AWAY = Away("killed", since=10.0, begins=12.0, load_s=4.0, num_failed=0, num_restarts=1, max_restarts=5)

    @pytest.mark.parametrize(("now", "seconds"), [(10.0, 6.0), (12.0, 4.0), (15.0, 1.0), (17.0, 0.0), (20.1, None)])
    def test_the_first_attempt_is_expected_to_take_as_long_as_the_start(self, now, seconds):
        assert self.AWAY.predicted_s(now) == seconds
        assert self.AWAY.retry_after_s(now) == max(seconds or 0.0, 1.0)

    def test_nothing_is_predicted_once_an_attempt_has_failed(self):
        assert replace(self.AWAY, num_failed=1).predicted_s(10.0) is None
        assert replace(self.AWAY, num_restarts=6).predicted_s(10.0) is None
        assert "started 5 times in a row without a step; trying on: killed" in str(replace(self.AWAY, num_restarts=6))


def test_giving_up_breaks_off_a_start_that_is_under_way(pauses):
    given_up = GivenUp()
    starts, begun, broken_off = Starts(), threading.Event(), threading.Event()

    def start(like, timeout_s):
        if like is None:
            return starts(like, timeout_s)
        with given_up.breaks_off(broken_off.set):
            begun.set()
            assert broken_off.wait(30)
        raise WorkerDiedError("killed before it was ready")

    executor = SupervisedExecutor(start, 1.0, 5, pauses.now, pauses, given_up)
    giver = threading.Thread(target=lambda: (begun.wait(30), executor.give_up()))
    giver.start()
    with pytest.raises(WorkerDiedError, match="it died"):
        executor.restart("it died")
    giver.join()
    with given_up.breaks_off(begun.clear):  # what begins later is broken off at once
        assert not begun.is_set()
