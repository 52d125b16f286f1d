"""The bounds on waiting: as configured, never exceeded by the worst arrivals, and watched by the monitor."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler import PreemptionMode, Scheduler
from llm_serving.scheduler.bounds import WaitMonitor, longest_waits
from llm_serving.scheduler.policies import ORDERS, POLICIES
from support.factories import create_classes, create_request, create_scheduler
from support.scheduler_run import SchedulerRun

MAX_MODEL_LEN = 6


def tiny(**options: Any) -> dict[str, Any]:
    """Return options with one or two slots and outputs of a few tokens, so that the bounds are small."""
    return {
        "num_blocks": 5,
        "block_size": 2,
        "max_num_seqs": 2,
        "max_prefill_seqs": 2,
        "max_num_batched_tokens": 4,
        "max_model_len": MAX_MODEL_LEN,
        "max_decode_gap": 1,
        "max_prefill_gap": 1,
        "max_preemptions": 1,
        **options,
    }


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
@pytest.mark.parametrize("max_overtakes", [0, 1])
def test_bound_holds_for_every_order_of_a_few_arrivals(policy: str, max_overtakes: int) -> None:
    """All sequences of one arrival a step: none, a high one, or a low one of either of two tenants."""
    choices = [None, (-1, "x"), (1, "x"), (1, "y")]
    classes = create_classes(ageing_steps=1, high={"weight": 1}, low={"weight": 1})
    for sequence in itertools.product(choices, repeat=4):
        run = SchedulerRun(create_scheduler(**tiny(policy=policy, max_overtakes=max_overtakes, classes=classes)))
        for arrival in sequence:
            if arrival is not None:
                run.add(create_request(3, max_tokens=3, priority=arrival[0], tenant=arrival[1]))
            run.step()
        run.finish()


@st.composite
def tiny_options(draw: st.DrawFn) -> dict[str, Any]:
    max_num_seqs = draw(st.integers(1, 3))
    share = st.sampled_from([0.3, 0.5, 1.0, 1.0])
    classes = tuple(
        RequestClass(
            name=name,
            rank=rank,
            weight=draw(st.sampled_from([1, 2, 4])),
            ageing_steps=draw(st.sampled_from([0, 1, 2, 4])),
            max_running_share=draw(share),
            max_kv_share=draw(share),
        )
        for rank, name in enumerate(("high", "normal", "low"), start=-1)
    )
    return tiny(
        policy=draw(st.sampled_from(sorted(POLICIES))),
        separate=draw(st.booleans()),
        static_batching=draw(st.sampled_from([False, False, True])),
        preemption_mode=draw(st.sampled_from(PreemptionMode)),
        num_swap_blocks=draw(st.sampled_from([0, 8])),
        num_blocks=draw(st.integers(3, 8)),
        prefix_caching=draw(st.booleans()),
        max_num_seqs=max_num_seqs,
        max_prefill_seqs=draw(st.integers(1, 2)),
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 4])),
        max_decode_gap=draw(st.integers(1, 2)),
        max_prefill_gap=draw(st.integers(1, 2)),
        max_preemptions=draw(st.integers(0, 2)),
        max_overtakes=draw(st.integers(0, 2)),
        quantum_steps=draw(st.integers(1, 8)),
        max_steps_in_flight=draw(st.integers(1, 2)),
        order=draw(st.sampled_from(sorted(ORDERS))),
        classes=classes,
    )


@settings(max_examples=50)
@given(
    options=tiny_options(),
    pattern=st.lists(
        st.lists(st.tuples(st.integers(1, MAX_MODEL_LEN - 1), st.integers(-1, 1), st.sampled_from("xy")), max_size=3),
        min_size=1,
        max_size=6,
    ),
    waits=st.sampled_from([False, False, True]),
)
def test_bound_holds_for_every_repeated_pattern_of_arrivals(
    options: dict[str, Any], pattern: list[list[tuple[int, int, str]]], waits: bool
) -> None:
    """The pattern repeats, so a backlog builds up; each request has the maximum length."""
    run = SchedulerRun(create_scheduler(**options))
    for arrivals in itertools.islice(itertools.cycle(pattern), 40):
        for prompt, priority, tenant in arrivals:
            request = create_request(prompt, max_tokens=MAX_MODEL_LEN - prompt, priority=priority, tenant=tenant)
            request.needs_known_output = waits
            run.add(request)
        run.step()
    run.finish()


def set_bounds(scheduler: Scheduler, num_steps: int) -> None:
    """Set every wait bound to `num_steps`."""
    scheduler.waiting_requests.monitor = WaitMonitor(
        [replace(each, first_steps=num_steps, steps_per_admission=0.0) for each in scheduler.bounds]
    )


def test_monitor_counts_a_wait_beyond_the_bound_once() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    set_bounds(scheduler, 3)
    for _ in range(2):
        scheduler.add(create_request(max_tokens=12))
    counts = []
    for _ in range(8):
        schedule = scheduler.schedule(0.0)
        assert schedule is not None
        counts.append(schedule.num_bound_violations)
        scheduler.update(schedule, [7])
    assert counts == [0, 0, 0, 1, 0, 0, 0, 0]


def test_monitor_counts_from_arrival_not_from_becoming_first() -> None:
    scheduler = create_scheduler(max_num_seqs=1, max_overtakes=16)
    set_bounds(scheduler, 20)
    patient = create_request(priority=1, max_tokens=2)
    run = SchedulerRun(create_scheduler(max_num_seqs=1))
    run.scheduler = scheduler
    run.add(create_request(priority=1, max_tokens=2), patient)
    violations = 0
    for _ in range(30):
        scheduler.add(create_request(priority=-1, max_tokens=2))
        schedule = scheduler.schedule(0.0)
        assert schedule is not None
        violations += schedule.num_bound_violations
        scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))
    assert patient.status is RequestStatus.WAITING
    assert violations >= 1


def test_monitor_checks_only_the_newest_bound_of_a_request() -> None:
    """The request was in another class in between; it returns behind other requests, and its whole wait counts."""
    scheduler = create_scheduler()
    monitor = WaitMonitor([replace(each, first_steps=3, steps_per_admission=10.0) for each in scheduler.bounds])
    request = create_request()
    for name, num_ahead in (("normal", 0), ("low", 0), ("normal", 1)):
        request.request_class = next(each for each in scheduler.classes if each.name == name)
        monitor.start_wait(request, num_ahead, num_waited=2)
    assert [monitor.tick(()) for _ in range(30)] == [0] * 23 + [1] + [0] * 6
    assert request.wait_bound == 2 + 23


def run_beside(scheduler: Scheduler, request: Request, num_steps: int = 12) -> int:
    """Return the number of violated bounds while another request waits beside this one."""
    scheduler.add(request)
    scheduler.add(create_request(max_tokens=4))
    violations = 0
    for _ in range(num_steps):
        schedule = scheduler.schedule(0.0)
        if schedule is not None:
            violations += schedule.num_bound_violations
            scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))
    return violations


def test_monitor_counts_steps_while_a_request_needs_known_output() -> None:
    """Regression: a request with a bad word of two tokens disabled every bound."""
    scheduler = create_scheduler(max_num_seqs=1)
    set_bounds(scheduler, 3)
    request = create_request(max_tokens=12, bad_words=((1, 2),))
    assert request.needs_known_output
    assert run_beside(scheduler, request) == 1


def test_monitor_counts_no_steps_during_a_beam_search() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    set_bounds(scheduler, 3)
    request = create_request(max_tokens=12)
    request.is_beam = request.needs_known_output = True
    assert run_beside(scheduler, request) == 0


def test_bounds_include_steps_in_flight() -> None:
    """Each token of the request ahead takes two steps; the bound of the request behind it holds."""
    waited = []
    for max_steps_in_flight in (1, 2):
        scheduler = create_scheduler(
            max_num_seqs=2, max_model_len=32, policy="mixed", max_steps_in_flight=max_steps_in_flight
        )
        run = SchedulerRun(scheduler)
        ahead = [create_request(max_tokens=20, bad_words=((1, 2),), priority=-1), create_request(max_tokens=28)]
        last = create_request()
        run.add(*ahead, last)
        run.finish()
        waited.append(last.num_steps_waited)
    assert waited[1] > waited[0] + 5
    tight, ahead_of_replies = (create_scheduler(max_steps_in_flight=number).bounds[0] for number in (1, 2))
    assert ahead_of_replies.max_wait_steps(0) > tight.max_wait_steps(0)


def test_wait_bound_is_set_again_after_the_cache_was_lost() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    set_bounds(scheduler, 5)
    requests = [create_request(max_tokens=4) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    for _ in range(4):
        scheduler.schedule(0.0)
    scheduler.reset_cache()
    violations = 0
    for _ in range(5):
        schedule = scheduler.schedule(0.0)
        assert schedule is not None
        violations += schedule.num_bound_violations
        scheduler.update(schedule, [7] * sum(row.num_samples for row in schedule.rows))
    assert violations == 0


def test_monitor_counts_no_steps_while_a_class_is_at_its_share_limit() -> None:
    classes = create_classes(normal={"max_running_share": 0.5})
    scheduler = create_scheduler(max_num_seqs=2, classes=classes)
    set_bounds(scheduler, 3)
    run = SchedulerRun(scheduler)
    run.add(create_request(max_tokens=20), create_request(max_tokens=20))
    run.finish()


def test_monitor_counts_no_steps_while_a_batch_fills() -> None:
    scheduler = create_scheduler(max_prefill_seqs=2, batch_waiting_time=100.0)
    set_bounds(scheduler, 3)
    for _ in range(2):
        scheduler.add(create_request(max_tokens=20))
    run = SchedulerRun(scheduler)
    run.step()
    run.add(create_request())
    for _ in range(10):
        run.step()
    assert scheduler.num_waiting == 1


def test_wait_bound_grows_with_the_requests_ahead() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    requests = [create_request() for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    bounds = scheduler.bounds[1]
    assert [request.wait_bound for request in requests] == [bounds.max_wait_steps(count) for count in range(3)]
    assert bounds.max_wait_steps(0) < bounds.max_wait_steps(1) < bounds.max_wait_steps(2)


def test_wait_bound_includes_forks_that_wait_for_their_parent() -> None:
    """The forks arrived earlier, so each may be admitted before a new request."""
    scheduler = create_scheduler(max_num_seqs=1)
    parent = create_request()
    forks = [create_request(fork_of=parent.request_id) for _ in range(3)]
    other = create_request(fork_of=parent.request_id, priority=1)
    last = create_request()
    for request in (parent, *forks, other, last):
        scheduler.add(request)
    assert last.wait_bound == scheduler.bounds[1].max_wait_steps(1 + len(forks))


def test_monitor_counts_a_prefill_gap_beyond_the_bound_once() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8)
    scheduler.decode._max_prompt_gaps = dict.fromkeys(scheduler.slots_by_class, 3)
    scheduler.add(create_request(40, max_tokens=1))
    last = create_request(4, max_tokens=1)
    scheduler.add(last)
    scheduler.schedule(0.0)
    last.status, last.last_scheduled_step = RequestStatus.WAITING, -1
    scheduler.waiting.discard(last)
    scheduler.blocks.admit(last, 4)
    last.status, last.last_scheduled_step, last.admission_number = RequestStatus.RUNNING, 0, 9
    scheduler.slots.add(last)
    schedules = [scheduler.schedule(0.0) for _ in range(5)]
    assert [schedule.num_bound_violations for schedule in schedules if schedule] == [0, 0, 0, 1, 0]


def test_wait_bound_includes_one_admission_for_each_request_that_ran_before() -> None:
    """A preempted request returns ahead of its class, which does not count as a bypass."""
    scheduler = create_scheduler(max_num_seqs=1, max_overtakes=3)
    scheduler.add(create_request())
    run = SchedulerRun(scheduler)
    run.step()
    waiting = [create_request() for _ in range(2)]
    for request in waiting:
        scheduler.add(request)
    bounds = scheduler.bounds[1]
    assert [each.wait_bound for each in waiting] == [bounds.max_wait_steps(0, 1), bounds.max_wait_steps(1, 1)]
    assert bounds.max_wait_steps(0, 1) < bounds.max_wait_steps(1)


def test_bounds_describe_waits_in_seconds_once_the_time_of_a_step_is_known() -> None:
    bounds = replace(create_scheduler().bounds[1], first_steps=100, steps_per_admission=50.0, max_overtakes=0)
    wait = "normal: a request waits at most 150 engine steps before its prompt starts, when no request of its class is"
    assert str(bounds).startswith(f"{wait} ahead, and 50 more for each one that is;")
    assert "150 engine steps (1.5 s) before" in bounds.describe(0.01)
    assert "50 more (0.5 s) for each" in bounds.describe(0.01)


def test_longest_waits_describes_all_classes_in_one_sentence() -> None:
    bounds = replace(create_scheduler().bounds[1], first_steps=100, steps_per_admission=50.0, max_overtakes=0)
    assert longest_waits([bounds, replace(bounds, name="low", first_steps=200)]) == (
        "a request waits at most 150 (normal) or 250 (low) engine steps before its prompt starts, "
        "when no request of its class is ahead"
    )
