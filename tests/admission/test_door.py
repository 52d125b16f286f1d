"""Whom the door lets in, and what it tells the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from llm_serving.admission.answer_lengths import AnswerLengths, Asked
from llm_serving.admission.appointments import GRACE_S, HORIZON_S, UNHEARD_S, Visitor
from llm_serving.admission.door import FEW_ENDS, FRESH_S, ROUGH_S, Door, Forecast, Line, Replica
from llm_serving.admission.load_estimator import Measured, Queue, UnderWay
from llm_serving.admission.slots import Slots
from llm_serving.admission.waiting_room import WaitingRoom
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import STANDARD
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import CapacityError
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import SchedulerLimits
from support.simulated_clock import Clock

PLACES = 8


class Setup:
    """A door before a queue that only tests make longer or shorter."""

    def __init__(self) -> None:
        self.clock = Clock()
        config = ServingConfig(scheduler=SchedulerConfig(max_waiting_queue=PLACES))
        self.room = WaitingRoom(config, self.clock)
        self.door = Door(config, self.room, Metrics().classes, self.clock)
        self.says_again: bool | None = None
        """What whoever asks says of itself."""
        self._waiting: list[str] = []
        self._count = 0

    def ask(self, number: int, num_requests: int = 1, came: float | None = None) -> Forecast | None:
        visitor = Visitor("a", number.to_bytes(4, "big"), self.says_again)
        forecast = self.door.check([4] * num_requests, 0, "", visitor, Replica(0, 1, None, True), came)
        self.enter(num_requests)
        return forecast

    def refused(self, number: int, num_requests: int = 1, came: float | None = None) -> CapacityError:
        with pytest.raises(CapacityError) as refused:
            self.ask(number, num_requests, came)
        assert refused.value.retry_after is not None
        return refused.value

    def enter(self, num_requests: int = 1) -> None:
        for _ in range(num_requests):
            self._count += 1
            self._waiting.append(str(self._count))
            self.room.enter(self._waiting[-1], 0, STANDARD, "", 4)

    def start(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self.room.start(self._waiting.pop(0))


def test_who_says_how_often_it_has_tried_is_told_a_time_to_the_millisecond_and_finds_its_place() -> None:
    setup = Setup()
    setup.enter(PLACES)
    setup.says_again = False
    due = setup.refused(0).retry_after or 0.0
    assert 1.0 < due < 1.25 and due % 0.25 > 0.01
    setup.clock.now, setup.says_again = due, True
    setup.start(1)
    setup.ask(0)
    assert setup.door.book.num_kept == 1


def test_who_comes_when_told_finds_a_place_kept_from_newcomers() -> None:
    setup = Setup()
    setup.enter(PLACES)
    told = [setup.refused(number).retry_after for number in range(2)]
    assert told == [1, 1]
    setup.clock.now = 1.0
    setup.start(2)
    refusal = str(setup.refused(99))
    assert refusal.startswith("6 of 8 places in the queue are taken and 2 kept for those who were told to come now")
    setup.ask(0)
    setup.ask(1)
    assert setup.room.load().num_waiting == PLACES


def test_those_who_are_not_let_in_within_a_moment_share_one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    draw, predicted = setup.door._draw, []

    def count(*args: object) -> object:
        predicted.append(args)
        return draw(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(setup.door, "_draw", count)
    setup.enter(PLACES)
    for number in range(20):
        setup.refused(number)
    assert len(predicted) == 1
    setup.clock.now = ROUGH_S
    setup.refused(20)
    assert len(predicted) == 2
    setup.clock.now = 1.0
    setup.start(PLACES)
    setup.ask(0)
    setup.ask(1)
    assert len(predicted) == 4
    for number in range(2, 9):  # prompts of any lengths
        setup.door.knock([4 * number], 0, "", Visitor("a", number.to_bytes(4, "big")), Replica(0, 1, None, True))
    assert len(predicted) == 4


def test_a_long_line_is_the_same_for_those_who_are_let_in_within_a_moment_and_grows_with_them() -> None:
    limits = SchedulerLimits(64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=64)
    measured = Measured(limits, 1.0, 0.0, 0.125, 8)  # one of them ends in a second
    queue = Queue(num_requests=20, num_tokens=0, num_running=8, num_running_in_all=8)
    line = Line(queue, 1, "long", measured, drawn=5.0, num_entered=100)
    alone = line.seconds(4, 100, 5.0)
    assert alone == 20 + limits.max_steps_in_flight
    assert line.seconds(4, 102, 5.25) == pytest.approx(alone * 1.1 - 0.25)
    assert line.holds(5.25) and not line.holds(6.0)
    few = replace(line, ahead=replace(queue, num_requests=FEW_ENDS))
    assert not few.holds(5.25)  # each one counts
    assert line.seconds(4, 100, 100.0) == measured.step_s


def test_who_was_refused_is_remembered_with_what_it_asked_for() -> None:
    setup = Setup()
    setup.enter(PLACES)
    setup.clock.now = 2.5
    setup.refused(1, 2)
    assert setup.door.refused.since(0.0) == [(2.5, (4, 4), 0, "")]
    setup.start(PLACES)
    setup.ask(2)
    assert len(setup.door.refused.since(0.0)) == 1


def test_what_is_kept_for_those_who_stay_away_is_free_after_a_while() -> None:
    setup = Setup()
    setup.enter(PLACES)
    told = [setup.refused(number).retry_after for number in range(3)]
    setup.start(2)
    setup.clock.now = max(told) + GRACE_S
    setup.ask(99)
    setup.clock.now += UNHEARD_S
    setup.ask(98)
    assert setup.door.book.num_missed == 3


def test_who_came_in_time_and_was_heard_late_is_let_in_before_newcomers_that_came_with_it() -> None:
    setup = Setup()
    setup.enter(PLACES)
    due = setup.refused(0).retry_after or 0.0
    setup.start(1)
    setup.clock.now = due + GRACE_S + 2.0
    setup.refused(99, came=due + 0.1)
    setup.ask(0, came=due + 0.05)
    setup.start(1)
    setup.refused(98, came=0.0)  # however early it says it came, the place is kept for 99


def test_who_sends_the_beginning_of_a_request_early_has_nothing_of_it() -> None:
    setup = Setup()
    setup.enter(PLACES)
    due = setup.refused(0).retry_after or 0.0
    setup.start(1)
    setup.clock.now = due
    setup.refused(99, came=0.0)
    setup.ask(0)


def test_half_of_the_places_are_kept_for_nobody() -> None:
    setup = Setup()
    setup.enter(PLACES)
    for number in range(50):
        setup.refused(number)
    setup.start(PLACES // 2 + 1)
    setup.clock.now = 1.0
    setup.ask(99)


def test_who_came_in_time_and_found_no_room_comes_next() -> None:
    setup = Setup()
    setup.enter(PLACES)
    first = setup.refused(0).retry_after
    for number in range(1, 40):
        setup.refused(number)
    setup.clock.now = first
    assert setup.refused(0).retry_after == 1
    assert (setup.refused(99).retry_after or 0) > 1
    setup.clock.now += 1
    setup.start(1)
    setup.ask(0)


def test_a_group_has_one_appointment_for_all() -> None:
    setup = Setup()
    setup.enter(PLACES)
    setup.clock.now = setup.refused(0, num_requests=3).retry_after or 0.0
    setup.start(3)
    setup.refused(99)
    setup.ask(0, num_requests=3)


def test_a_queue_that_stands_still_longer_than_clients_wait_makes_no_appointments() -> None:
    setup = Setup()
    setup.enter(PLACES)
    for number in range(2000):
        setup.refused(number)
    assert (setup.refused(99_999).retry_after or 0) > HORIZON_S
    assert len(setup.door.book) < 2000


def test_who_knocks_is_refused_as_who_comes_in_and_takes_no_place() -> None:
    setup = Setup()
    visitor = Visitor("a", b"knocks")

    def knock() -> None:
        setup.door.knock([1], 0, "", visitor, Replica(0, 1, None, True))

    knock()
    setup.enter(PLACES)
    with pytest.raises(CapacityError) as refused:
        knock()
    setup.clock.now = refused.value.retry_after or 0.0
    setup.start(1)
    knock()
    setup.refused(99)  # its place is still kept
    setup.door.check([4], 0, "", visitor, Replica(0, 1, None, True))
    assert (setup.door.book.num_kept, len(setup.door.book)) == (1, 1)


def test_those_whom_the_limit_of_their_tenant_holds_apart_are_in_nobodys_way_but_its_own() -> None:
    config = ServingConfig(scheduler=SchedulerConfig(max_running_per_tenant=1))
    room, certain = WaitingRoom(config), SamplingParams(max_tokens=20, ignore_eos=True)
    door = Door(config, room, Metrics().classes, clock=lambda: 0.0)
    request = Request(request_id="0", prompt_token_ids=[1], sampling=certain, tenant="a")
    limits = SchedulerLimits(64, max_num_seqs=2, max_prefill_seqs=8, max_model_len=64, max_steps_in_flight=2)
    measured, slots = Measured(limits, 1.0, 0.0, None, 2), Slots([request], AnswerLengths())
    for number in range(4):
        room.enter(str(number), 0, STANDARD, "a", 1, Asked(certain))
    room.start("0")

    def predicted_s(tenant: str) -> float | None:
        forecast = door.predict([1], STANDARD, tenant, Replica(0, 1, measured, True, slots, UnderWay((0,))))
        return None if forecast is None else forecast.seconds

    assert predicted_s("b") == 2.0  # a step for its prompt, and one that is under way
    # The running answer, three that wait with a step between each two, its prompt, and the step that is under way.
    assert predicted_s("a") == 20 + 3 * 21 + 2.0
    room.leave("0")
    room.leave("1")
    room.enter("4", 0, STANDARD, "b", 1, Asked(certain))
    assert room.ahead(0, None).asked == [Asked(certain)] * 2  # one of each tenant


def test_who_has_a_place_already_does_not_wait_for_one_though_the_door_has_not_heard_of_it() -> None:
    config, certain = ServingConfig(), SamplingParams(max_tokens=20, ignore_eos=True)
    room = WaitingRoom(config)
    door = Door(config, room, Metrics().classes, clock=lambda: 0.0)
    limits = SchedulerLimits(64, max_num_seqs=1, max_prefill_seqs=8, max_model_len=64, max_steps_in_flight=2)
    measured = Measured(limits, 1.0, 0.0, None, 1)
    slots = Slots([Request(request_id="0", prompt_token_ids=[1], sampling=certain)], AnswerLengths())
    predicted = []
    for hears in (lambda: room.enter("0", 0, STANDARD, "a", 1, Asked(certain)), lambda: room.start("0")):
        hears()
        forecast = door.predict([1], STANDARD, "b", Replica(0, 1, measured, True, slots, UnderWay((0,))))
        predicted.append(None if forecast is None else forecast.seconds)
    assert predicted == [20 + 2.0] * 2


def predicted_for(prompt_lens: list[int], num_replicas: int = 1, num_cached: int = 0) -> float:
    """Seconds for requests at an idle replica where a step takes none and a token one."""
    config = ServingConfig()
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=64)
    measured = Measured(limits, 0.0, 1.0, None, 8)
    door = Door(config, WaitingRoom(config), Metrics().classes, Clock())
    forecast = door.predict(
        prompt_lens, STANDARD, "", Replica(0, num_replicas, measured, True, num_cached_tokens=num_cached)
    )
    assert forecast is not None
    return forecast.seconds


def test_a_prompt_is_computed_by_one_replica_and_only_a_group_is_spread_over_them() -> None:
    assert predicted_for([20], num_replicas=2) == 20
    assert predicted_for([20, 20], num_replicas=2) == 20
    assert predicted_for([20, 20, 20], num_replicas=2) == 40


def test_what_a_replica_has_of_a_prompt_is_not_computed_again() -> None:
    assert predicted_for([20], num_cached=16) == 4


def test_what_those_ahead_find_computed_delays_nobody_and_still_counts_as_waiting() -> None:
    room = WaitingRoom(ServingConfig())
    room.enter("0", 0, STANDARD, "", 20, num_cached=16)
    room.enter("1", 0, STANDARD, "", 20)
    assert room.ahead(0, None).num_tokens == 24
    assert (room.load().num_waiting_tokens, room.load().num_owed_tokens) == (40, 24)
    room.start("0")
    assert (room.load().num_waiting_tokens, room.load().num_owed_tokens) == (20, 20)


class Strict:
    """A door that refuses whoever is expected to wait more than the 5 s of its class; a token takes a second."""

    def __init__(self, prefix_caching: bool = False) -> None:
        self.clock = Clock()
        config = ServingConfig(scheduler=SchedulerConfig(slo_refusal_factor=1.0, prefix_caching=prefix_caching))
        self.room = WaitingRoom(config, self.clock)
        self.door = Door(config, self.room, Metrics().classes, self.clock)
        limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=64)
        self.replica = Replica(0, 1, Measured(limits, 0.0, 1.0, None, 8), True, under_way=UnderWay(began=0.0))

    def knocks(self, num_tokens: int) -> bool:
        return not self._is_refused(lambda: self.door.knock([num_tokens], 0, "", Visitor(), self.replica))

    def comes_in(self, num_tokens: int) -> bool:
        return not self._is_refused(lambda: self.door.check([num_tokens], 0, "", Visitor(), self.replica))

    def is_in_time(self, num_tokens: int, remaining_s: float) -> bool:
        return not self._is_refused(lambda: self.door.check_deadline([num_tokens], 0, "", remaining_s, self.replica))

    def _is_refused(self, ask: Callable[[], object]) -> bool:
        try:
            ask()
        except CapacityError:
            return True
        return False


def test_a_short_prompt_is_not_refused_for_what_a_long_one_takes_that_came_a_moment_before() -> None:
    strict = Strict()
    assert not strict.knocks(40)
    assert strict.knocks(3)
    assert not strict.knocks(40)


def test_who_only_knocks_is_not_refused_for_tokens_that_it_may_find_computed() -> None:
    strict = Strict(prefix_caching=True)
    assert strict.knocks(40)
    assert not strict.comes_in(40)


def test_a_replica_that_was_slow_when_it_was_measured_serves_again_once_it_has_stood_idle() -> None:
    strict = Strict()
    strict.clock.now = FRESH_S - 0.1
    assert not strict.comes_in(40)
    assert not strict.is_in_time(40, 39.0)
    strict.clock.now = FRESH_S
    assert strict.comes_in(40)
    assert strict.is_in_time(40, 39.0)
    strict.room.enter("first", 0, STANDARD, "", 1)
    assert not strict.comes_in(40)
    strict.room.start("first")
    assert not strict.is_in_time(40, 39.0)


def test_a_prompt_that_several_answers_share_is_computed_once() -> None:
    strict = Strict()
    visitor = Visitor("a", b"several")
    forecast = strict.door.check([3, 3, 3], 0, "", visitor, strict.replica, owed_lens=[3, 1, 1])
    assert forecast is not None
    assert forecast.seconds == 5
