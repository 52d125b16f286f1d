import pytest
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.kvcache.adapter_slots import AdapterSlots
from support.factories import create_scheduler, rows, run_step


def request(name: str, adapter: int, **fields: int) -> Request:
    sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 3))
    return Request(name, [1, 2, 3, 4], sampling, adapter=adapter, **fields)


def scheduler_with(num_slots: int, **limits: int):
    """Return a scheduler with slots of adapters."""
    return create_scheduler(adapters=AdapterSlots(num_slots), prefix_caching=True, **limits)


def test_a_free_slot_is_taken_before_the_least_recently_used_one() -> None:
    slots = AdapterSlots(2)
    first, second, third = (request(str(number), number) for number in (1, 2, 3))
    slots.acquire(first, 0)
    slots.release(first)
    slots.acquire(second, 1)
    assert [slots.slot_of(1), slots.slot_of(2)] == [0, 1]
    slots.release(second)
    slots.acquire(third, 2)
    assert [slots.slot_of(3), slots.slot_of(2)] == [0, 1]
    slots.check_integrity([third])


def test_a_slot_in_use_is_given_to_no_other_adapter() -> None:
    slots = AdapterSlots(1)
    first, second = request("a", 1), request("b", 2)
    slots.acquire(first, 0)
    assert slots.has_room_for(request("c", 1))
    assert not slots.has_room_for(second)
    assert slots.has_room_for(second, without=[first])


def test_a_step_fills_one_slot_and_the_next_adapter_waits_for_the_next_step() -> None:
    scheduler = scheduler_with(2)
    for name, adapter in (("a", 1), ("b", 1), ("c", 2), ("d", 0)):
        scheduler.add(request(name, adapter))
    assert [row[0] for row in rows(run_step(scheduler))] == ["a", "b"]
    assert sorted(row[0] for row in rows(run_step(scheduler))) == ["a", "b", "c", "d"]


def test_a_request_waits_without_a_slot_until_an_adapter_is_unused() -> None:
    scheduler = scheduler_with(1)
    scheduler.add(request("a", 1, max_tokens=2))
    scheduler.add(request("b", 2))
    run_step(scheduler)
    assert scheduler.blocked is not None
    assert scheduler.blocked.request_id == "b"
    assert [each.request_id for each in scheduler.running] == ["a"]
    run_step(scheduler)
    assert [row[0] for row in rows(run_step(scheduler))] == ["b"]
    scheduler.check_integrity()


@pytest.mark.parametrize("higher", [-5, 0])
def test_a_request_of_a_higher_class_takes_the_slot_of_an_adapter(higher: int) -> None:
    scheduler = scheduler_with(1)
    scheduler.add(request("low", 1, max_tokens=50, priority=5))
    run_step(scheduler)
    scheduler.add(request("high", 2, priority=higher))
    schedule = run_step(scheduler)
    assert [row[0] for row in rows(schedule)] == ["high"]
    assert [each.request_id for each in scheduler.running] == ["high"]
    scheduler.check_integrity()


def test_two_adapters_share_no_cached_block() -> None:
    scheduler = scheduler_with(2)
    prompt = list(range(1, 9))
    counts = []
    for number, adapter in enumerate((1, 1, 2, 0, 0)):
        scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=2), adapter=adapter))
        run_step(scheduler)
        counts.append(scheduler.running[0].num_cached_tokens)
        while scheduler.has_unfinished_requests:
            run_step(scheduler)
    assert counts == [0, 4, 0, 0, 4]
