"""The book of those who were told to come back, by the second."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from llm_serving.admission import appointments
from llm_serving.admission.appointments import (
    EARLY_S,
    GRACE_S,
    HORIZON_S,
    MAX_OF_VISITOR,
    MIN_OF_SOURCE,
    UNHEARD_S,
    AppointmentBook,
    Place,
    Visitor,
)

RATE = 10.0


def place(taken: int = 20, limit: int = 20, rate: float | None = RATE, name: str = "queue", amount: int = 1) -> Place:
    return Place(name, taken, limit, amount, rate)


def visitor(number: int, source: str = "a") -> Visitor:
    return Visitor(source, number.to_bytes(4, "big"))


def refuse(book: AppointmentBook, who: Visitor, *places: Place, now: float = 0.0) -> float:
    """What the door does with a newcomer."""
    places = places or (place(),)
    seconds = book.seconds_until_free(places, who.source, now, is_exact=who.says_again is not None)
    if seconds <= HORIZON_S:
        book.make(who, now + seconds, places)
    return seconds


def kept_free(book: AppointmentBook, where: Place, now: float) -> int:
    """For somebody who comes and is heard at once."""
    return book.num_kept_free(where, now, now)


def test_no_more_are_told_to_come_than_the_server_can_do_by_then() -> None:
    book = AppointmentBook()
    times = Counter(refuse(book, visitor(number), now=number / 1000) for number in range(500))
    told = [seconds for seconds in sorted(times) for _ in range(times[seconds])]
    # Half of what may be kept is left for slower times, so of 20 places 5 may be wanted beyond the rate.
    assert all(number <= seconds * RATE + 5 for number, seconds in enumerate(told))
    assert max(told) < 500 / RATE * 1.3


def test_whoever_waits_to_the_millisecond_is_told_times_that_are_spread_over_each_second() -> None:
    book = AppointmentBook()
    exact = replace(visitor(0), says_again=False)
    told = [refuse(book, replace(exact, key=number.to_bytes(4, "big"))) for number in range(400)]
    gaps = [after - before for before, after in pairwise(sorted(told))]
    assert max(gaps) < 3 / RATE and sum(gap < 0.1 / RATE for gap in gaps) < 0.2 * len(gaps)
    assert all(number <= seconds * RATE + 5 for number, seconds in enumerate(sorted(told)))
    assert refuse(book, visitor(0)) % 1 == 0


def test_the_same_request_is_recognized_when_it_comes_in_time_and_not_before() -> None:
    book = AppointmentBook()
    seconds = refuse(book, visitor(1))
    assert book.due(visitor(1), seconds - 2 * EARLY_S) is None
    assert book.due(visitor(2), seconds) is None
    assert book.due(visitor(1, source="b"), seconds) is None
    kept = book.due(visitor(1), seconds + GRACE_S / 2)
    assert kept is not None
    book.keep(kept)
    assert (book.num_kept, book.num_missed, len(book)) == (1, 0, 0)
    assert book.due(visitor(1), seconds) is None


def saying(number: int, says_again: bool | None) -> Visitor:
    return replace(visitor(number), says_again=says_again)


def come_back(book: AppointmentBook, who: Visitor, now: float) -> float:
    """Is refused, and comes when it was told to; returns when that is."""
    due = now + refuse(book, who, now=now)
    kept = book.due(who, due)
    if kept is not None:
        book.keep(kept, who.says_again)
    book.advance(due)
    return due


def test_who_comes_for_the_first_time_takes_no_appointment_where_those_who_come_back_say_so() -> None:
    book = AppointmentBook()
    now = come_back(book, saying(1, True), 0.0)
    due = now + refuse(book, visitor(2), now=now)
    assert book.due(saying(2, False), due) is None
    # Whoever says nothing is taken for the one that was told to come, as is who says that it has been refused.
    assert book.due(saying(2, None), due) is not None
    assert book.due(saying(2, True), due) is not None


def test_who_never_says_that_it_comes_back_has_its_appointments_all_the_same() -> None:
    """Programs that try again themselves, by libraries that say each time that it is the first."""
    book, now = AppointmentBook(), 0.0
    for number in range(10):
        now = come_back(book, saying(number, False), now)
    assert (book.num_kept, book.num_missed) == (10, 0)


def test_who_no_longer_says_that_it_comes_back_is_believed_after_a_while() -> None:
    book, now = AppointmentBook(), 0.0
    for number in range(100):
        now = come_back(book, saying(number, True), now)
    for number in range(100):
        now = come_back(book, saying(number, False), now)
    assert 0 < book.num_missed < 40
    assert book.num_kept == 200 - book.num_missed


def test_an_appointment_that_is_not_kept_is_forgotten() -> None:
    book = AppointmentBook()
    seconds = refuse(book, visitor(1))
    book.advance(seconds + GRACE_S - 0.01)
    assert kept_free(book, place(), seconds + GRACE_S - 0.01) == 1
    book.advance(seconds + GRACE_S + 0.25)
    assert kept_free(book, place(), seconds + GRACE_S + 0.25) == 0
    assert book.due(visitor(1), seconds + GRACE_S) is None
    book.advance(seconds + GRACE_S + UNHEARD_S)
    assert (book.num_missed, len(book)) == (1, 0)


def test_who_came_in_time_and_was_heard_late_has_its_place() -> None:
    book = AppointmentBook()
    seconds = refuse(book, visitor(1))
    heard = seconds + GRACE_S + UNHEARD_S - 0.1
    book.advance(heard)
    assert book.num_kept_free(place(), heard - 0.1, heard) == 0
    assert book.num_kept_free(place(), seconds + 0.2, heard) == 1  # who came with it and is heard before it leaves it
    kept = book.due(visitor(1), seconds + 0.1)
    assert kept is not None
    book.keep(kept)
    assert (book.num_kept, book.num_missed) == (1, 0)


def test_places_are_kept_for_those_expected_soon_and_never_more_than_half() -> None:
    book = AppointmentBook()
    for number in range(3):
        book.make(visitor(number), 1.0, [place()])
    for number in range(3, 8):
        book.make(visitor(number), 100.0, [place()])
    assert kept_free(book, place(), 0.0) == 3  # a newcomer is out of the way after 2 s
    assert kept_free(book, place(name="other"), 0.0) == 0
    for number in range(8, 60):
        book.make(visitor(number), 1.0, [place()])
    assert kept_free(book, place(), 0.0) == 10
    assert kept_free(book, place(limit=1), 0.0) == 0


def test_all_places_that_a_request_needs_must_have_room() -> None:
    book = AppointmentBook()
    slow = place(name="key a", taken=6, limit=6, rate=0.5)
    assert refuse(book, visitor(1), place(), slow) > refuse(book, visitor(2), place())
    first, second = (refuse(book, visitor(number), place(), slow) for number in (3, 4))
    assert second >= first + 1 / 0.5


def test_what_is_known_of_the_rate_does_not_keep_anybody_from_being_told_a_time() -> None:
    book = AppointmentBook()
    times = [refuse(book, visitor(number), place(rate=None)) for number in range(40)]
    assert times[0] == 1 and times == sorted(times) and times[-1] > 2


def test_a_slow_server_tells_more_than_clients_would_wait_and_writes_nothing() -> None:
    book = AppointmentBook()
    assert refuse(book, visitor(1), place(taken=1000, limit=20, rate=1.0)) > HORIZON_S
    assert len(book) == 0


def test_who_books_without_coming_pushes_nobody_for_long() -> None:
    book = AppointmentBook()
    for number in range(1000):
        refuse(book, visitor(number, source="liar"), now=number / 1000)
    now = 20.5
    book.advance(now)
    assert book.num_missed > 100
    assert refuse(book, visitor(1, source="honest"), now=now) <= 3


def test_a_large_source_is_held_to_its_share_in_places_that_it_wants_later_too() -> None:
    book = AppointmentBook()
    other = place(name="class batch")
    refuse(book, visitor(0, source="honest"), other)
    for number in range(MIN_OF_SOURCE):
        refuse(book, visitor(number, source="large"))
    for number in range(1000):
        refuse(book, visitor(1000 + number, source="large"), other, now=number / 1000)
    assert refuse(book, visitor(1, source="honest"), other, now=1.0) <= 10


def test_one_source_leaves_half_of_the_server_to_the_others() -> None:
    book = AppointmentBook()
    refuse(book, visitor(0, source="honest"))
    for number in range(1000):
        refuse(book, visitor(number, source="large"), now=number / 1000)
    times = [refuse(book, visitor(number, source="honest"), now=1 + number / 16) for number in range(1, 16)]
    assert max(times) <= 15 / (RATE / 2) + 3


def test_one_request_asked_again_and_again_has_few_appointments() -> None:
    book = AppointmentBook()
    for _ in range(100):
        refuse(book, visitor(1))
    assert len(book) == MAX_OF_VISITOR
    assert book.remaining_s(visitor(1), 0.0) is not None
    assert book.remaining_s(visitor(2), 0.0) is None


def test_the_book_has_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appointments, "MAX_APPOINTMENTS", 10)
    monkeypatch.setattr(appointments, "MAX_SOURCES", 4)
    book = AppointmentBook()
    for number in range(100):
        refuse(book, visitor(number, source=str(number)))
    assert len(book) == len(book._sources) == 10
    book.advance(1000.0)
    assert list(book._sources) == ["6", "7", "8", "9"], "beside those with appointments only so many are remembered"
    for number in range(100):
        refuse(book, visitor(number, source=str(number)), now=1000.0 + 500 * number)
        book.advance(1400.0 + 500 * number)
    assert len(book) == 0 and not book._expected and len(book._sources) == 4


def test_nobody_who_cannot_be_recognized_has_an_appointment() -> None:
    book = AppointmentBook()
    assert refuse(book, Visitor("a", b"")) >= 1
    assert len(book) == 0


def test_those_who_found_no_room_come_again_one_after_the_other_and_before_all_others() -> None:
    """When a server becomes slower many find no room: coming back all at once, again and again, they make it slower."""
    book = AppointmentBook()
    for number in range(200):
        refuse(book, visitor(number), now=number / 1000)
    told = []
    for number in range(1000, 1200):
        seconds = book.seconds_until_free([place()], "a", 0.0, again=True)
        book.make(visitor(number), seconds, [place()], again=True)
        told.append(seconds)
    assert told[0] == 1 and told == sorted(told)
    assert all(number <= seconds * RATE + 5 for number, seconds in enumerate(told))
    assert told[-1] < 200 / RATE * 1.5
    assert refuse(book, visitor(2000)) > told[-1]
