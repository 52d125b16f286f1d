"""Who was refused is remembered, and no more of them than there is room for."""

from __future__ import annotations

from llm_serving.admission.refused_lately import MAX_REFUSED, Refused, RefusedLately


def refused(time: float, count: int) -> Refused:
    return Refused(time, (3,) * count, 0, "a")


def test_the_newest_are_told_since_a_time() -> None:
    lately = RefusedLately()
    for time in range(4):
        lately.note(refused(time, 1))
    assert [each.time for each in lately.since(2)] == [2, 3]


def test_few_who_ask_for_much_take_no_more_room_than_many() -> None:
    lately = RefusedLately()
    for time in range(10):
        lately.note(refused(time, MAX_REFUSED // 4))
    assert [each.time for each in lately.since(0)] == [6, 7, 8, 9]
    lately.note(refused(10, 1))
    assert [each.time for each in lately.since(0)] == [7, 8, 9, 10]
    lately.note(refused(11, MAX_REFUSED + 1))
    assert lately.since(0) == []
    lately.note(refused(12, 1))
    assert lately.since(0) == [refused(12, 1)]
