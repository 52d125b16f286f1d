"""Restarts of a WorkAgent by the supervised executor."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from llm_serving.errors import ConfigError, ProtocolError, WorkerDiedError
from llm_serving.executor.executor import RemoteExecutor, RestartFailedError
from llm_serving.executor.supervisor import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    SupervisedExecutor,
    restart_delay_s,
    restart_timeout_s,
)
from llm_serving.executor.worker_process import RestartStatus, StartCancellation
from llm_serving.transport.messages import Loaded
from llm_serving.transport.shared_memory import InlineArrays

LOADED = Loaded(num_blocks=9, num_swap_blocks=2, notice="")


class FakeAgent:
    def __init__(self) -> None:
        self.loaded = LOADED
        self.channel, self.buffers = None, InlineArrays(2)
        self.ended = ""

    def kill(self) -> None:
        self.ended = self.ended or "killed"

    def stop(self) -> None:
        self.ended = self.ended or "stopped"


class Starts:
    """A fake function that starts WorkAgents: each call raises the next failure, if there is one."""

    def __init__(self, *failures: Exception | None) -> None:
        self.failures = list(failures)
        self.agents: list[FakeAgent] = []
        self.previous: list[Loaded | None] = []
        self.timeouts: list[float] = []

    def __call__(self, previous: Loaded | None, timeout_s: float | None) -> FakeAgent:
        assert (timeout_s is None) == (previous is None)
        self.timeouts += [] if timeout_s is None else [timeout_s]
        self.previous.append(previous)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.agents.append(FakeAgent())
        return self.agents[-1]


class Pauses:
    """A fake of waiting: records the seconds of each pause, and advances the clock at once."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.cancellation = False

    def __call__(self, delay_s: float) -> bool:
        self.waited.append(delay_s)
        return self.cancellation

    def now(self) -> float:
        return sum(self.waited)


@pytest.fixture(autouse=True)
def no_steps(monkeypatch):
    def collect(executor):
        executor.num_restarts = 0  # as after a completed step, see test_executor.py
        return "output"

    monkeypatch.setattr(RemoteExecutor, "collect", collect)


@pytest.fixture
def pauses():
    return Pauses()


def supervise(starts, pauses, max_restarts=5):
    return SupervisedExecutor(starts, 1.0, max_restarts, pauses.now, pauses)


def test_a_restarted_work_agent_allocates_as_many_blocks(pauses, caplog):
    starts = Starts()
    executor = SupervisedExecutor(starts, 1.0, 5, pauses.now, pauses, index=3)
    executor.restart("it died")
    assert "restarting WorkAgent 3 in 0 s: it died" in caplog.text
    assert starts.previous == [None, LOADED]
    assert [agent.ended for agent in starts.agents] == ["killed", ""]
    executor.close()
    assert starts.agents[-1].ended == "stopped"


@pytest.mark.parametrize(
    "failure", [ConfigError("no memory"), WorkerDiedError("killed at once"), ProtocolError("?"), OSError("no files")]
)
def test_restart_can_be_retried_without_limit(failure, pauses):
    executor = supervise(Starts(None, *[failure] * 50), pauses)
    for _ in range(50):
        with pytest.raises(RestartFailedError, match=str(failure).replace("?", "[?]")):
            executor.restart("it died")
    executor.restart("it died")
    assert executor.collect() == "output"
    assert pauses.waited == [restart_delay_s(attempt) for attempt in range(51)]


def test_restart_status_describes_each_attempt(pauses):
    executor = supervise(Starts(None, *[WorkerDiedError("killed")] * 3), pauses, max_restarts=2)
    assert executor.restart_status is None
    for attempt in range(3):
        began = pauses.now()
        with pytest.raises(RestartFailedError):
            executor.restart(f"reason {attempt}")
        assert executor.restart_status == RestartStatus(
            reason=f"reason {attempt}",
            lost_at=0.0,
            attempt_at=began + restart_delay_s(attempt),
            load_s=0.0,
            num_failed=attempt,
            num_restarts=attempt + 1,
            max_restarts=2,
        )
        assert executor.restart_status.restarts_exhausted == executor.restarts_exhausted == (attempt == 2)
    executor.restart("it died")
    assert executor.restart_status is None
    assert executor.restarts_exhausted, "no step has been computed yet"
    executor.collect()
    assert not executor.restarts_exhausted


def test_a_completed_step_resets_the_restart_delay(pauses):
    executor = supervise(Starts(), pauses)
    for _ in range(3):
        executor.restart("it died")
        executor.restart("it died")
        executor.collect()
    assert pauses.waited == [0.0, FIRST_DELAY_S] * 3


def test_no_restart_after_cancellation(pauses):
    starts = Starts()
    executor = SupervisedExecutor(starts, 1.0, 5)
    executor.cancel_restarts()
    with pytest.raises(WorkerDiedError, match="it died"):
        executor.restart("it died")
    assert len(starts.agents) == 1


def test_a_first_work_agent_killed_while_loading_is_replaced(pauses):
    starts = Starts(*[WorkerDiedError("killed")] * 3)
    assert supervise(starts, pauses).loaded == LOADED
    assert starts.previous == [None] * 4
    with pytest.raises(WorkerDiedError, match="killed"):
        supervise(Starts(*[WorkerDiedError("killed")] * 4), pauses, max_restarts=3)


def test_a_cancelled_first_start_is_not_retried(pauses, caplog):
    cancellation = StartCancellation()
    cancellation.cancel()
    with pytest.raises(WorkerDiedError, match="killed"):
        SupervisedExecutor(Starts(WorkerDiedError("killed")), 1.0, 5, pauses.now, pauses, cancellation)
    assert (pauses.waited, caplog.text) == ([], "")


def test_a_load_error_of_the_first_work_agent_is_not_retried(pauses):
    with pytest.raises(ConfigError, match="no such model"):
        supervise(Starts(ConfigError("no such model")), pauses)
    assert pauses.waited == []


def test_restart_delays_double_up_to_a_limit():
    delays = [restart_delay_s(attempt) for attempt in range(5000)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S


def test_restart_timeouts_start_short_and_double(pauses):
    """Regression: one timeout for all attempts was too long for the first, and always too short for slow starts."""
    starts = Starts(None, *[WorkerDiedError("not ready in time")] * 3)
    executor = supervise(starts, pauses)
    for _ in range(3):
        with pytest.raises(RestartFailedError):
            executor.restart("it died")
    executor.restart("it died")
    executor.restart("it died again")
    assert starts.timeouts == [20.0, 40.0, 80.0, 160.0, 20.0]
    assert [restart_timeout_s(24.0, num_failed) for num_failed in range(3)] == [72.0, 144.0, 288.0]


class TestRestartStatus:
    STATUS = RestartStatus(
        "killed", lost_at=10.0, attempt_at=12.0, load_s=4.0, num_failed=0, num_restarts=1, max_restarts=5
    )

    @pytest.mark.parametrize(("now", "seconds"), [(10.0, 6.0), (12.0, 4.0), (15.0, 1.0), (17.0, 0.0), (20.1, None)])
    def test_restart_prediction_is_the_duration_of_the_first_start(self, now, seconds):
        assert self.STATUS.predicted_s(now) == seconds
        assert self.STATUS.retry_after_s(now) == max(seconds or 0.0, 1.0)

    def test_restart_has_no_prediction_after_a_failed_attempt(self):
        assert replace(self.STATUS, num_failed=1).predicted_s(10.0) is None
        assert replace(self.STATUS, num_restarts=6).predicted_s(10.0) is None
        assert "completed no step after 5 restarts in a row; retrying: killed" in str(
            replace(self.STATUS, num_restarts=6)
        )


def test_restart_cancellation_interrupts_a_start_in_progress(pauses):
    cancellation = StartCancellation()
    starts, begun, broken_off = Starts(), threading.Event(), threading.Event()

    def start(previous, timeout_s):
        if previous is None:
            return starts(previous, timeout_s)
        with cancellation.on_cancel(broken_off.set):
            begun.set()
            assert broken_off.wait(30)
        raise WorkerDiedError("killed before it was ready")

    executor = SupervisedExecutor(start, 1.0, 5, pauses.now, pauses, cancellation)
    giver = threading.Thread(target=lambda: (begun.wait(30), executor.cancel_restarts()))
    giver.start()
    with pytest.raises(WorkerDiedError, match="it died"):
        executor.restart("it died")
    giver.join()
    with cancellation.on_cancel(begun.clear):  # what begins later is broken off at once
        assert not begun.is_set()
