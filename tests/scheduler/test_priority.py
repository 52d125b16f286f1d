"""Priority changes after arrival: the new position, and the bounds of other requests."""

from __future__ import annotations

import random

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.scheduler.queues import MIN_HEAP
from support.factories import create_classes, create_request, create_scheduler, rows, run_step
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun

ONE_SLOT = {"max_num_seqs": 1, "max_model_len": 32}


def order_of_admission(scheduler, requests, max_steps=500):
    started = []
    for _ in range(max_steps):
        schedule = run_step(scheduler)
        if schedule is None:
            break
        started += [request.request_id for request in schedule.started]
    assert all(request.is_finished for request in requests)
    return started


def test_waiting_request_moves_to_its_new_class():
    scheduler = create_scheduler(**ONE_SLOT)
    a, b, c = (create_request(request_id=name, priority=1, max_tokens=3) for name in "abc")
    for request in (a, b, c):
        scheduler.add(request)
    run_step(scheduler)
    assert scheduler.set_priority(c, -1)
    assert (c.request_class.name, c.priority) == ("high", -1)
    scheduler.check_integrity()
    assert order_of_admission(scheduler, [a, b, c]) == ["c", "b"]


def test_priority_shifts_a_request_from_its_arrival():
    scheduler = create_scheduler(max_overtakes=16, max_head_start_steps=50, **ONE_SLOT)
    names = [create_request(request_id=name, priority=1, max_tokens=2) for name in "abcd"]
    for request in names:
        scheduler.add(request)
    run_step(scheduler)
    key = names[3].queue_key
    for priority in (9, 1, 5, 1):
        assert scheduler.set_priority(names[3], priority)
    assert names[3].queue_key == key, "repeated changes moved it"
    scheduler.set_priority(names[1], 9)
    assert order_of_admission(scheduler, names) == ["c", "d", "b"]


def test_request_enters_another_class_behind_waiting_ones():
    scheduler = create_scheduler(max_overtakes=16, **ONE_SLOT)
    low = create_request(request_id="low", priority=1, max_tokens=2)
    normal = [create_request(request_id=name, priority=0, max_tokens=2) for name in "abc"]
    scheduler.add(create_request(request_id="first", priority=-1, max_tokens=2))
    scheduler.add(low)
    for request in normal:
        scheduler.add(request)
    run_step(scheduler)
    scheduler.set_priority(low, 0)
    assert order_of_admission(scheduler, [low, *normal]) == ["a", "b", "c", "low"]


def test_wait_counts_from_arrival_after_a_change_of_class():
    scheduler = create_scheduler(**ONE_SLOT)
    scheduler.add(create_request(priority=-1, max_tokens=12))
    request = create_request(priority=1, max_tokens=2)
    scheduler.add(request)
    for _ in range(5):
        run_step(scheduler)
    assert scheduler.set_priority(request, 0)
    for _ in range(4):
        run_step(scheduler)
    assert scheduler.set_priority(request, 1)
    order_of_admission(scheduler, [request])
    assert request.num_steps_waited >= 11
    bounds = scheduler.bounds[-1]
    assert request.wait_bound == bounds.max_wait_steps(0) + 9


def test_raised_running_request_is_preempted_only_above_its_new_class():
    def run(rises):
        scheduler = create_scheduler(**ONE_SLOT)
        low, normal = create_request(request_id="low", priority=1), create_request(request_id="normal", priority=0)
        scheduler.add(low)
        run_step(scheduler)
        if rises:
            assert scheduler.set_priority(low, 0)
        scheduler.add(normal)
        order_of_admission(scheduler, [low, normal])
        return low.num_preemptions

    assert run(rises=False) == 1
    assert run(rises=True) == 0


def test_change_of_class_of_a_running_request_counts_as_bypass():
    scheduler = create_scheduler(max_num_seqs=4, max_overtakes=2, max_model_len=32, num_blocks=64)
    running = [create_request(request_id=f"low {i}", priority=1, max_tokens=20) for i in range(4)]
    for request in running:
        scheduler.add(request)
    run_step(scheduler)
    assert all(scheduler.set_priority(request, 0) for request in running[:1]), "no request waits there"
    for request in running:
        scheduler.set_priority(request, 0)
    waiting = create_request(priority=0)
    scheduler.add(waiting)
    for request in running:
        assert scheduler.set_priority(request, 1)
    assert [scheduler.set_priority(request, 0) for request in running] == [True, True, False, False]
    assert [request.request_class.name for request in running] == ["normal", "normal", "low", "low"]
    scheduler.check_integrity()
    order_of_admission(scheduler, [*running, waiting])


def test_class_at_its_share_limit_accepts_no_running_request():
    classes = create_classes(high={"max_running_share": 0.25})
    scheduler = create_scheduler(max_num_seqs=4, classes=classes)
    high, low = create_request(priority=-1), create_request(priority=1)
    scheduler.add(high)
    scheduler.add(low)
    run_step(scheduler)
    assert not scheduler.set_priority(low, -1)
    assert low.request_class.name == "low"
    scheduler.finish(high, FinishReason.ABORT)
    assert scheduler.set_priority(low, -1)


def test_priority_of_a_finished_request_does_not_change():
    scheduler = create_scheduler()
    request = create_request()
    scheduler.add(request)
    scheduler.finish(request, FinishReason.ABORT)
    assert not scheduler.set_priority(request, -1)
    assert request.priority == 0


def test_waiting_fork_changes_its_class():
    scheduler = create_scheduler(max_num_batched_tokens=8, block_size=4)
    parent = create_request(24, max_tokens=4)
    fork = create_request(24, fork_of=parent.request_id, max_tokens=4)
    scheduler.add(parent)
    scheduler.add(fork)
    run_step(scheduler)
    assert scheduler.set_priority(fork, 1)
    order_of_admission(scheduler, [parent, fork])
    assert fork.request_class.name == "low"


def test_repeated_priority_changes_use_no_memory():
    scheduler = create_scheduler(max_overtakes=4, **ONE_SLOT)
    first, adversary, victim = (create_request(request_id=name, priority=0, max_tokens=20) for name in ("f", "l", "v"))
    for request in (first, adversary, victim):
        scheduler.add(request)
    run_step(scheduler)
    for number in range(2000):
        scheduler.set_priority(adversary, (-1, 1, 5, 0)[number % 4])
    for queue in scheduler.waiting.queues.values():
        heaps = (queue._by_arrival, queue._tenants, *queue._by_tenant.values())
        assert max(map(len, heaps), default=0) <= 2 * len(queue) + MIN_HEAP + 1
    order_of_admission(scheduler, [first, adversary, victim])


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_under_priority_changes_and_replays_are_equal(seed):
    rng = random.Random(seed)
    files = MemoryFiles()
    scheduler = create_recorded(
        files,
        policy=rng.choice(["prefill_first", "mixed", "decode_first", "throughput", "fcfs"]),
        num_blocks=rng.choice([12, 20, 64]),
        max_num_seqs=rng.choice([1, 2, 4]),
        max_num_batched_tokens=16,
        max_model_len=32,
        max_steps_in_flight=rng.choice([1, 2]),
        max_overtakes=rng.choice([0, 1, 4]),
        max_preemptions=rng.choice([0, 2]),
        max_head_start_steps=rng.choice([0, 8, 64]),
        classes=create_classes(ageing_steps=rng.choice([1, 10])),
    )
    run = SchedulerRun(scheduler)
    if not scheduler.policy.honours_classes:
        scheduler.classes = scheduler.classes[:1]
    for _ in range(200):
        if rng.random() < 0.25:
            tenant, priority = rng.choice("ab"), rng.choice([-9, -1, 0, 1, 9])
            run.add(create_request(rng.randint(1, 12), priority=priority, tenant=tenant, max_tokens=rng.randint(1, 16)))
        for request in rng.sample(run.requests, min(len(run.requests), rng.choice([0, 0, 1, 3]))):
            scheduler.set_priority(request, rng.choice([-9, -1, 0, 1, 9]))
            scheduler.check_integrity()
        run.step()
    run.finish()
    [data] = files.files
    assert replay(data).hash == seal(data)


def test_replay_shows_priority_changes():
    files = MemoryFiles()
    scheduler = create_recorded(files, **ONE_SLOT)
    a, b = create_request(priority=0), create_request(priority=1)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.set_priority(b, -1)
    assert rows(scheduler.schedule(0.0))[0][0] == b.request_id
    [data] = files.files
    assert replay(data).hash == seal(data)
