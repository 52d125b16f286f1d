"""Admission control: which requests it admits, and the `Retry-After` of the refused ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llm_serving.admission import admission_control
from llm_serving.admission.admission_control import (
    IDLE_S,
    JITTER,
    MAX_RETRY_AFTER_S,
    RETRY_SHARE,
    AdmissionControl,
    ReplicaLoad,
    RetrySchedule,
)
from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.admission.ttft_predictor import InFlightSteps, ReplicaSpeed
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.request_class import STANDARD, Caller
from llm_serving.errors import CapacityError
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import SchedulerLimits
from support.simulated_clock import Clock

QUEUE_LIMIT = 8
LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=64)


class Setup:
    """Admission control with a queue that only tests fill and empty."""

    def __init__(self, **scheduler) -> None:
        self.clock = Clock()
        config = ServingConfig(scheduler=SchedulerConfig(**{"max_waiting_queue": QUEUE_LIMIT, **scheduler}))
        self.queue = AdmissionQueue(config, self.clock)
        self.control = AdmissionControl(config, self.queue, Metrics().classes, self.clock)
        self.replica = ReplicaLoad(0, 1, None, True)

    def check(self, num_requests: int = 1, source: str = "a") -> float | None:
        return self.control.check([4] * num_requests, Caller(source=source), self.replica)

    def refused(self, num_requests: int = 1, source: str = "a") -> CapacityError:
        with pytest.raises(CapacityError) as refused:
            self.check(num_requests, source)
        assert refused.value.retry_after is not None
        return refused.value

    def fill(self, num_requests: int = QUEUE_LIMIT) -> None:
        for number in range(num_requests):
            self.queue.add(str(number), 0, STANDARD, "", 4)


def test_admission_admits_a_group_only_as_a_whole() -> None:
    setup = Setup()
    setup.fill(QUEUE_LIMIT - 2)
    setup.check(2)
    assert str(setup.refused(3)).startswith("6 of 8 requests wait in the queue")


def test_admission_admits_again_once_a_waiting_request_has_started() -> None:
    setup = Setup()
    setup.fill()
    setup.refused()
    setup.queue.start(["0"])
    setup.check()


def test_retry_after_grows_with_every_refusal() -> None:
    setup = Setup()
    setup.fill()
    delays = [setup.refused().retry_after or 0.0 for _ in range(50)]
    # Before the drain rate is measured, half of the limit is taken to drain in a second.
    spacing = 1 / (RETRY_SHARE * QUEUE_LIMIT / 2)
    for number, delay in enumerate(delays, start=1):
        assert 1 + number * spacing <= delay <= (1 + number * spacing) * (1 + JITTER)


def test_refusal_predicts_the_time_to_first_token_after_the_retry() -> None:
    setup = Setup()
    setup.fill()
    setup.replica = ReplicaLoad(0, 1, ReplicaSpeed(LIMITS, 0.0, 1.0, 0.5, 8), True)
    refusal = setup.refused()
    predicted_s = 4.0 * (QUEUE_LIMIT + 1)
    assert refusal.queue_estimate_ms == 1000 * predicted_s
    assert refusal.predicted_s == pytest.approx((refusal.retry_after or 0.0) + predicted_s)


def test_refused_requests_are_recorded_with_lengths_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    setup.fill()
    setup.clock.now = 2.5
    setup.refused(2)
    assert setup.control.refused_since(0.0) == [(2.5, (4, 4), 0, "")]
    assert setup.control.refused_since(2.6) == []
    monkeypatch.setattr(admission_control, "MAX_REFUSED", 5)
    for _ in range(3):
        setup.clock.now += 1.0
        setup.refused(2)
    assert [each.time for each in setup.control.refused_since(0.0)] == [4.5, 5.5]


def test_retry_schedule_spaces_retries_by_the_drain_rate() -> None:
    schedule = RetrySchedule()
    times = [schedule.delay_s("queue", "a", 2, 100.0, 0.0, 0.0) for _ in range(200)]
    assert times[0] >= 1.0
    assert times[-1] == pytest.approx(1 + 200 * 2 / (RETRY_SHARE * 100.0), rel=JITTER)


def test_retry_schedule_drops_retries_whose_time_has_passed() -> None:
    schedule = RetrySchedule()
    for _ in range(100):
        schedule.delay_s("queue", "a", 1, 10.0, 0.0, 0.0)
    assert schedule.delay_s("queue", "a", 1, 10.0, 0.0, 100.0) < 2.0


def test_retry_schedule_is_limited_to_the_longest_wait_and_spreads_retries_there() -> None:
    schedule = RetrySchedule()
    delays = [schedule.delay_s("queue", "a", 1, 1.0, 0.0, 0.0) for _ in range(1000)][-100:]
    assert max(delays) <= MAX_RETRY_AFTER_S
    assert max(delays) - min(delays) > 5.0
    assert len(set(delays)) == 100


def test_retry_schedule_is_deterministic() -> None:
    first, second = RetrySchedule(), RetrySchedule()
    for _ in range(10):
        assert first.delay_s("q", "a", 1, 10.0, 0.0, 0.0) == second.delay_s("q", "a", 1, 10.0, 0.0, 0.0)


def test_retry_schedule_waits_at_least_the_minimum() -> None:
    assert RetrySchedule().delay_s("slo", "a", 1, 100.0, 7.0, 0.0) >= 7.0


def test_flooding_source_delays_only_its_own_retries() -> None:
    schedule = RetrySchedule()
    for number in range(10_000):
        schedule.delay_s("queue", "flood", 1, 20.0, 0.0, number / 1000)
    assert schedule.delay_s("queue", "flood", 1, 20.0, 0.0, 10.0) > 100.0
    assert schedule.delay_s("queue", "honest", 1, 20.0, 0.0, 10.0) < 2.0


def test_each_limit_has_its_own_retry_schedule() -> None:
    schedule = RetrySchedule()
    for _ in range(1000):
        schedule.delay_s("request_classes.batch.max_waiting", "a", 1, 20.0, 0.0, 0.0)
    assert schedule.delay_s("queue", "a", 1, 20.0, 0.0, 0.0) < 2.0


def test_retry_schedule_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_control, "MAX_SOURCES", 10)
    schedule = RetrySchedule()
    for number in range(1000):
        schedule.delay_s("queue", str(number), 1, 1.0, 0.0, 0.0)
    assert len(schedule._last_retry) <= 11


def test_prediction_of_a_tenant_at_its_limit_waits_for_its_own_requests_only() -> None:
    setup = Setup(max_running_per_tenant=1)
    replica = ReplicaLoad(0, 1, ReplicaSpeed(LIMITS, 1.0, 0.0, 0.05, 2), True, InFlightSteps(1))
    for number in range(4):
        setup.queue.add(str(number), 0, STANDARD, "a", 1)
    setup.queue.start(["0"])
    # A step for its prompt, and one that is in flight.
    assert setup.control.predict_s([1], STANDARD, "b", replica) == 2.0
    # Four requests of 20 steps each that run one after the other.
    assert setup.control.predict_s([1], STANDARD, "a", replica) == 4 * 20 + LIMITS.max_steps_in_flight


def predicted_for(prompt_lens: list[int], num_replicas: int = 1, num_cached: int = 0) -> float | None:
    """Predict for an idle replica where a token takes a second and nothing else any time."""
    replica = ReplicaLoad(0, num_replicas, ReplicaSpeed(LIMITS, 0.0, 1.0, None, 8), True, num_cached_tokens=num_cached)
    return Setup().control.predict_s(prompt_lens, STANDARD, "", replica)


def test_prediction_distributes_a_group_but_no_prompt_over_replicas() -> None:
    assert predicted_for([20], num_replicas=2) == 20
    assert predicted_for([20, 20], num_replicas=2) == 20
    assert predicted_for([20, 20, 20], num_replicas=2) == 40


def test_prediction_leaves_out_cached_prompt_tokens() -> None:
    assert predicted_for([20], num_cached=16) == 4


class Strict:
    """Admission control that allows the 5 s of the class and no more; a token takes a second."""

    def __init__(self, prefix_caching: bool = False) -> None:
        setup = Setup(slo_refusal_factor=1.0, prefix_caching=prefix_caching)
        self.clock, self.queue, self.control = setup.clock, setup.queue, setup.control
        self.replica = ReplicaLoad(0, 1, ReplicaSpeed(LIMITS, 0.0, 1.0, None, 8), True, InFlightSteps(since=0.0))

    def passes_precheck(self, num_tokens: int) -> bool:
        uncached = self.control.min_uncached([num_tokens])
        return self._passes(lambda: self.control.check([num_tokens], Caller(), self.replica, uncached))

    def admits(self, num_tokens: int) -> bool:
        return self._passes(lambda: self.control.check([num_tokens], Caller(), self.replica))

    def meets_deadline(self, num_tokens: int, remaining_s: float) -> bool:
        caller = Caller(deadline=self.clock() + remaining_s)
        return self._passes(lambda: self.control.check_deadline([num_tokens], caller, self.replica))

    def _passes(self, ask: Callable[[], object]) -> bool:
        try:
            ask()
        except CapacityError:
            return False
        return True


def test_slo_refusal_depends_on_the_prompt_of_the_request() -> None:
    strict = Strict()
    assert not strict.passes_precheck(40)
    assert strict.passes_precheck(3)
    assert not strict.passes_precheck(40)


def test_slo_refusal_names_prediction_and_rule() -> None:
    strict = Strict()
    with pytest.raises(CapacityError) as refused:
        strict.control.check([40], Caller(), strict.replica)
    assert str(refused.value) == (
        "the first token is expected in 40.0 s, more than 5 s times 1 "
        "(request_classes.standard.ttft_slo_s, scheduler_config.slo_refusal_factor)"
    )
    assert (refused.value.retry_after or 0.0) >= 35.0


def test_precheck_excludes_tokens_that_may_be_cached() -> None:
    strict = Strict(prefix_caching=True)
    assert strict.passes_precheck(40)
    assert not strict.admits(40)


def test_idle_replica_refuses_no_request_by_an_old_measurement() -> None:
    strict = Strict()
    strict.clock.now = IDLE_S - 0.1
    assert not strict.admits(40)
    assert not strict.meets_deadline(40, 39.0)
    strict.clock.now = IDLE_S
    assert strict.admits(40)
    assert strict.meets_deadline(40, 39.0)
    strict.queue.add("first", 0, STANDARD, "", 1)
    assert not strict.admits(40)
    strict.queue.start(["first"])
    assert not strict.meets_deadline(40, 39.0)


def test_prompt_shared_by_several_choices_is_counted_once() -> None:
    strict = Strict()
    assert strict.control.check([3, 3, 3], Caller(), strict.replica, [3, 1, 1]) == 5
