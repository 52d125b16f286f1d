"""Who waits, who runs, and which limit has no room."""

from __future__ import annotations

import pytest
from llm_serving.admission.waiting_room import LIMITS, WaitingRoom
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import ContextLengthError, RequestError

HIGH = RequestClass(name="high", rank=-1)
LOW = RequestClass(name="low", rank=1, max_waiting=3)


def create_room(max_waiting_queue: int = 5, max_waiting_tokens: int | None = None) -> WaitingRoom:
    return WaitingRoom(
        ServingConfig(
            scheduler=SchedulerConfig(max_waiting_queue=max_waiting_queue, max_waiting_tokens=max_waiting_tokens),
            request_classes=(HIGH, LOW),
            api_keys=(ApiKey(name="a", key_sha256="0a" * 32, max_waiting=2),),
        )
    )


def in_the_way(room, num_requests, num_tokens, request_class, tenant):
    limits = room.limits(num_requests, num_tokens, request_class, tenant)
    return next((limit for limit in limits if limit.place.over > 0), None)


def counts(room, **which):
    load = room.load(**which)
    return load.num_waiting, load.num_waiting_tokens, load.num_running


def test_a_request_waits_then_runs_then_is_gone() -> None:
    room = create_room()
    room.enter("x", 0, HIGH, "a", 7)
    room.enter("y", 1, LOW, "", 5)
    assert counts(room) == (2, 12, 0)
    room.start("x")
    room.start("x")
    assert counts(room) == (1, 5, 1)
    assert counts(room, replicas=(1,)) == (1, 5, 0)
    assert counts(room, max_rank=-1) == (0, 0, 1)
    for request_id in ("x", "y", "x"):
        room.leave(request_id)
    room.start("y")
    assert counts(room) == (0, 0, 0)


@pytest.mark.parametrize(
    ("waiting", "more", "limit", "text"),
    [
        ([(HIGH, "")] * 5, (HIGH, ""), "max_waiting_queue", "5 of 5 places in the queue"),
        ([(LOW, "")] * 3, (LOW, ""), "class_max_waiting", "3 of 3 places of class low in the queue"),
        ([(HIGH, "a")] * 2, (LOW, "a"), "key_max_waiting", "2 of 2 places of a in the queue"),
        ([(HIGH, ""), (LOW, "a")], (HIGH, "a"), None, None),
    ],
)
def test_the_limit_without_room_is_named_with_its_numbers(waiting, more, limit, text) -> None:
    room = create_room()
    for index, each in enumerate(waiting):
        room.enter(str(index), index % 2, *each, 4)
    found = in_the_way(room, 1, 4, *more)
    if limit is None:
        assert found is None
        return
    assert limit in LIMITS
    assert (found.name, found.place.over) == (limit, 1)
    assert found.refusal(0).startswith(text) and found.refusal(0).endswith("; 1 needed")
    room.start("0")
    assert in_the_way(room, 1, 4, *more) is None


def test_prompt_tokens_that_wait_are_limited() -> None:
    room = create_room(max_waiting_tokens=100)
    room.enter("x", 0, HIGH, "", 40)
    room.enter("y", 0, HIGH, "", 50)
    assert in_the_way(room, 2, 10, HIGH, "") is None
    found = in_the_way(room, 1, 11, HIGH, "")
    assert (found.name, found.place.over) == ("max_waiting_tokens", 1)
    assert found.refusal(0) == (
        "90 of 100 prompt tokens wait in the queue (scheduler_config.max_waiting_tokens); 11 needed"
    )


def test_a_group_is_charged_at_once() -> None:
    room = create_room()
    room.enter("x", 0, HIGH, "", 4)
    assert in_the_way(room, 4, 16, HIGH, "") is None
    assert in_the_way(room, 5, 20, HIGH, "").place.over == 1


def test_what_would_not_come_in_even_if_nothing_waited_can_never() -> None:
    room = create_room(max_waiting_tokens=100)
    room.check_group(3, 100, LOW, "")
    with pytest.raises(RequestError, match=r"`n` must ask for at most 3 .*request_classes\.low\.max_waiting.*Given: 4"):
        room.check_group(4, 4, LOW, "")
    with pytest.raises(RequestError, match=r"at most 2 answers at once \(api_keys\.a\.max_waiting\)"):
        room.check_group(3, 4, HIGH, "a")
    with pytest.raises(ContextLengthError, match=r"at most 100 tokens \(scheduler_config\.max_waiting_tokens\)"):
        room.check_group(1, 101, HIGH, "")
