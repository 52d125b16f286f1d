"""Honest refusal: who would exceed a limit, or wait longer than its class was promised, is told when to come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.admission.appointments import (
    HORIZON_S,
    UNHEARD_S,
    Appointment,
    AppointmentBook,
    Place,
    Visitor,
)
from llm_serving.admission.corrections import Corrections
from llm_serving.admission.load_estimator import NOTHING, Measured, Queue, UnderWay
from llm_serving.admission.refused_lately import Refused, RefusedLately
from llm_serving.admission.slots import Slots
from llm_serving.admission.waiting_room import Limit, WaitingRoom
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import CapacityError, RequestError, TooLateError
from llm_serving.observability.class_metrics import ClassMetrics

FEW_ENDS: Final = 8
"""Requests that must end before one can start; up to so many, chance has more to say than the rate."""
ROUGH_S: Final = 0.05
"""Seconds for which a prediction holds for others who are not let in; nobody gets an older one."""
HELD_SHARE: Final = 0.02
"""Of a predicted time, for which the prediction holds for others too."""
FRESH_S: Final = 10.0
"""Seconds without a step after which what was measured refuses nobody who would be alone."""
RETURNED_MEMORY: Final = 32
"""Requests let in at their second coming after which one counts 1/e for what others are told."""


class Kind(NamedTuple):
    """Predictions that err alike."""

    class_name: str
    queue: str
    """Whether slots are free, get free soon, many must end before, or those of its own tenant."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of the time from the door to the first token."""

    seconds: float
    uncorrected_s: float
    kind: Kind


@dataclass(frozen=True, slots=True)
class Line:
    """What requests stand behind at a replica, whatever their prompts."""

    ahead: Queue
    """With themselves, but for the tokens of their prompts."""
    num_requests: int
    """Of theirs."""
    wait: str
    """The `queue` of a `Kind`."""
    measured: Measured
    drawn: float
    """When it was, on the clock."""
    num_entered: int
    """Requests that had ever been let in to the replica then."""

    @property
    def num_ends(self) -> int:
        """Requests that must end before the last of theirs can start; 0 or less: none."""
        return self.measured.num_ends(self.ahead)

    def seconds(self, num_tokens: int, num_entered: int, now: float) -> float | None:
        """To the first token of the last of them, with so many tokens to compute, had they come later: at `now`, when
        so many had been let in."""
        ahead = replace(self.ahead, num_tokens=self.ahead.num_tokens + num_tokens)
        seconds = self.measured.seconds_to_first_token(ahead)
        if seconds is None or now == self.drawn:
            return seconds
        longer = (num_entered - self.num_entered) / self.num_ends if self.num_ends > 0 else 0.0
        return max(self.measured.step_s, seconds * (1 + longer) - (now - self.drawn))

    def holds(self, now: float) -> bool:
        """Whether others may stand behind it as well; of a short one, each request that ends is a large part."""
        seconds = self.measured.seconds_to_first_token(self.ahead)
        return self.num_ends > FEW_ENDS and seconds is not None and now - self.drawn <= HELD_SHARE * seconds


@dataclass(frozen=True, slots=True)
class Replica:
    """Where a request would go, as the door sees it."""

    index: int
    num_replicas: int
    """That share what belongs together."""
    measured: Measured | None
    honours_classes: bool
    """Whether its policy lets higher classes go first."""
    slots: Slots | None = None
    """The requests that have places there."""
    under_way: UnderWay = NOTHING
    num_cached_tokens: int = 0
    """Of the prompt that is asked about, that it has computed or will have when it comes to it."""
    elsewhere: Callable[[], Sequence[Slots]] = tuple
    """Tells the requests that have places at other replicas, which count for what a tenant may run."""


class Door:
    """Decides on the event loop, before anything is submitted.

    A refusal is an appointment: it says when a place will be free beside everybody who was told to come before, and
    whoever comes then finds it kept. Half of every limit is never kept for anybody: the server is busy whoever stays
    away.
    """

    def __init__(
        self, config: ServingConfig, room: WaitingRoom, metrics: ClassMetrics, clock: Clock = monotonic
    ) -> None:
        self.book = AppointmentBook()
        self.refused = RefusedLately()
        self.reload(config)
        self._room = room
        self._metrics = metrics
        self._clock = clock
        self._corrections: Corrections[Kind] = Corrections()
        self._lines: dict[tuple[str, str | None, int, int], Line | None] = {}
        """By what those who asked lately have in common."""
        self._lines_until = -math.inf
        self._wait_of_returned: dict[str, float] = {}
        """By class, seconds that those who came back were predicted to wait then."""

    def reload(self, config: ServingConfig) -> None:
        """From now on another configuration counts."""
        self._classes = config.request_classes
        self._factor = config.scheduler.slo_refusal_factor
        self._finds_prefixes = config.scheduler.prefix_caching

    def check(
        self,
        prompt_lens: Sequence[int],
        priority: int,
        tenant: str,
        visitor: Visitor,
        replica: Replica,
        came: float | None = None,
        owed_lens: Sequence[int] | None = None,
    ) -> Forecast | None:
        """Checks requests that belong together: all may come in, or none.

        Args:
            prompt_lens: Tokens of each prompt.
            owed_lens: Of these, what is computed for each; None: all.
            priority: Of all of them.
            tenant: Who asks.
            visitor: By which it is known when it comes again.
            replica: Where the first would go.
            came: When they arrived at the server, on the clock; None: now.

        Returns:
            When the last of them is expected to have its first token; None where too little has been measured.

        Raises:
            RequestError: They would not come in even if nothing waited.
            CapacityError: They may not come in now.
        """
        forecast, appointment = self._pass(prompt_lens, priority, tenant, visitor, replica, came, owed_lens)
        if appointment is not None:
            self.book.keep(appointment, visitor.says_again)
            if forecast is not None:
                name = forecast.kind.class_name
                before_s = self._wait_of_returned.get(name, forecast.seconds)
                self._wait_of_returned[name] = before_s + (forecast.seconds - before_s) / RETURNED_MEMORY
        return forecast

    def knock(
        self,
        least_lens: Sequence[int],
        priority: int,
        tenant: str,
        visitor: Visitor,
        replica: Replica,
        came: float | None = None,
    ) -> None:
        """Refuses as `check` does, and lets nobody in: for prompts that have at least so many tokens."""
        owed_lens = self.least_owed(least_lens)
        self._pass(least_lens, priority, tenant, visitor, replica, came, owed_lens, roughly=True)

    def _pass(
        self,
        prompt_lens: Sequence[int],
        priority: int,
        tenant: str,
        visitor: Visitor,
        replica: Replica,
        came: float | None,
        owed_lens: Sequence[int] | None = None,
        *,
        roughly: bool = False,
    ) -> tuple[Forecast | None, Appointment | None]:
        """What is predicted for requests that may come in, maybe only roughly, and the appointment by which they do."""
        request_class = class_of(priority, self._classes)
        num_requests, num_tokens = len(prompt_lens), sum(prompt_lens)
        try:
            self._room.check_group(num_requests, num_tokens, request_class, tenant)
        except RequestError:
            self._metrics.refused(request_class, "never_fits", num_requests)
            raise
        now = self._clock()
        came = now if came is None else min(now, max(came, now - UNHEARD_S))
        self.book.advance(now)
        appointment = self.book.due(visitor, came)
        limits = self._room.limits(num_requests, num_tokens, request_class, tenant)
        missing = [self._num_missing(each, appointment, came, now) for each in limits]
        is_full = any(each > 0 for each in missing)
        forecast = self.predict(owed_lens or prompt_lens, request_class, tenant, replica, roughly=roughly or is_full)
        predicted_s = None if forecast is None else forecast.seconds
        is_promised = self._factor is not None and request_class.ttft_slo_s is not None
        if predicted_s is not None and is_promised and self._is_measured(replica):
            limits.append(self._promise(request_class, predicted_s, num_requests, replica))
            missing.append(self._num_missing(limits[-1], appointment, came, now))
        for limit, num_missing in zip(limits, missing, strict=True):
            if num_missing <= 0:
                continue
            self._metrics.refused(request_class, limit.name, num_requests)
            self.refused.note(Refused(now, tuple(prompt_lens), priority, tenant))
            least_s = 1.0
            if limit.name == "slo" and predicted_s is not None and request_class.ttft_slo_s is not None:
                least_s = predicted_s - request_class.ttft_slo_s
            later_s = self._arrange(visitor, appointment, [each.place for each in limits], least_s, now)
            then_s = self._wait_of_returned.get(request_class.name, predicted_s)
            raise CapacityError(
                limit.refusal(num_missing - limit.place.over),
                later_s,
                None if predicted_s is None else 1000 * predicted_s,
                None if then_s is None else later_s + then_s,
            )
        return forecast, appointment

    def _num_missing(self, limit: Limit, appointment: Appointment | None, came: float, now: float) -> int:
        """Of what a limit allows, that is lacking for whoever has, or has not, an appointment; 0 or less: nothing."""
        num_kept = 0 if appointment is not None else self.book.num_kept_free(limit.place, came, now)
        return limit.place.over + num_kept

    def least_owed(self, prompt_lens: Sequence[int]) -> Sequence[int]:
        """Tokens that are surely computed of prompts of which only the lengths are known: others may be found."""
        return [1] * len(prompt_lens) if self._finds_prefixes else prompt_lens

    def _arrange(
        self, visitor: Visitor, kept: Appointment | None, places: Sequence[Place], least_s: float, now: float
    ) -> float:
        """Seconds after which the visitor is to come back, and is expected to if that is soon enough.

        Whole ones, unless it says how often it has tried: the libraries that do wait to the millisecond.

        Who came in time and found no room has waited already: it comes back as soon as there is one beside others like
        it, before all who are expected later.
        """
        again = kept is not None
        if kept is not None:
            self.book.keep(kept, visitor.says_again)
        elif (told := self.book.remaining_s(visitor, now)) is not None:
            return told
        is_exact = visitor.says_again is not None
        seconds = self.book.seconds_until_free(places, visitor.source, now, least_s, again=again, is_exact=is_exact)
        if seconds <= HORIZON_S:
            self.book.make(visitor, now + seconds, places, again=again)
        return seconds

    def _is_measured(self, replica: Replica) -> bool:
        """Whether its steps are known as they are now. One that has stood idle may be quick again; only who is let in
        shows it, so nobody would be any more."""
        load = self._room.load(replicas=(replica.index,))
        is_idle = load.num_waiting == load.num_running == 0
        return not is_idle or self._clock() - replica.under_way.began < FRESH_S

    def check_deadline(
        self, prompt_lens: Sequence[int], priority: int, tenant: str, remaining_s: float, replica: Replica
    ) -> None:
        """Raises TooLateError where the last of these requests would have its first token after its deadline."""
        request_class = class_of(priority, self._classes)
        forecast = self.predict(prompt_lens, request_class, tenant, replica)
        if forecast is None or forecast.seconds <= remaining_s or not self._is_measured(replica):
            return
        predicted_s = forecast.seconds
        self._metrics.refused(request_class, "deadline", len(prompt_lens))
        self.refused.note(Refused(self._clock(), tuple(prompt_lens), priority, tenant))
        expected = f"the first token is expected in {predicted_s:.3g} s"
        message = f"{expected}, and `timeout_s` leaves {max(0.0, remaining_s):.3g} s"
        raise TooLateError(message, max(1.0, predicted_s - remaining_s), 1000 * predicted_s)

    def predict(
        self,
        prompt_lens: Sequence[int],
        request_class: RequestClass,
        tenant: str,
        replica: Replica,
        *,
        roughly: bool = False,
    ) -> Forecast | None:
        """When the last of these requests would have its first token; None where too little is known.

        It reckons with what is there, its own class and higher ones, and corrects that by what such predictions have
        lacked lately: those who come later and go first, what tenants had before and what a step ahead costs are in
        that. Those whom the limit of their tenant holds apart are not in the way, but for others of the same.

        Where many come, each step would have another prediction, for as much time as all else takes. Nearly all of that
        goes to those ahead, who are the same for all alike: what was found of them a moment ago will do, if it is a
        short one beside the time that is predicted, or if `roughly`, for somebody who is not let in.
        """
        now = self._clock()
        line = self._line(len(prompt_lens), request_class, tenant, replica, now, roughly=roughly)
        if line is None:
            return None
        num_tokens = -(-sum(prompt_lens) * line.num_requests // len(prompt_lens)) - replica.num_cached_tokens
        num_tokens = max(line.num_requests, num_tokens)
        seconds = line.seconds(num_tokens, self._room.num_entered(replica.index), now)
        if seconds is None:
            return None
        kind = Kind(request_class.name, line.wait)
        return Forecast(seconds * self._corrections.factor(kind), seconds, kind)

    def _line(
        self,
        num_requests: int,
        request_class: RequestClass,
        tenant: str,
        replica: Replica,
        now: float,
        *,
        roughly: bool,
    ) -> Line | None:
        """As `_draw`, now or a moment ago."""
        if now >= self._lines_until:
            self._lines.clear()
            self._lines_until = now + ROUGH_S
        is_limited = self._room.max_running(tenant) is not None
        alike = (request_class.name, tenant if is_limited else None, replica.index, num_requests)
        line = self._lines.get(alike)
        if not (alike in self._lines and (roughly or (line is not None and line.holds(now)))):
            line = self._lines[alike] = self._draw(num_requests, request_class, tenant, replica, now)
        return line

    def _draw(
        self, num_requests: int, request_class: RequestClass, tenant: str, replica: Replica, now: float
    ) -> Line | None:
        """What so many requests that belong together would stand behind; None where too little is known."""
        measured = replica.measured
        if measured is None:
            return None
        max_rank = request_class.rank if replica.honours_classes else None
        num_before = self._room.load(replicas=(replica.index,), max_rank=max_rank).num_running
        num_running = self._room.load(replicas=(replica.index,)).num_running
        slots = replica.slots
        placed = frozenset[str]() if slots is None else slots.request_ids
        ahead = self._room.ahead(replica.index, max_rank, placed=placed)
        num_requests = -(-num_requests // replica.num_replicas)  # what belongs together is spread over the replicas
        queue = Queue(
            len(ahead.asked) + num_requests,
            ahead.num_tokens,
            num_before + ahead.num_placed,
            num_running + ahead.num_placed,
            under_way=replica.under_way,
            elapsed_s=max(0.0, now - replica.under_way.began),
        )
        num_ends = measured.num_ends(queue)
        wait = "free" if num_ends <= 0 else "short" if num_ends <= FEW_ENDS else "long"
        if slots is not None:
            steps = own_steps = None
            if num_ends > 0:
                before = ahead.asked + ahead.asked[: num_requests - 1]  # about as long
                steps = slots.steps_until_free(before, measured.num_slots, max_rank)
            if (most := self._room.max_running(tenant)) is not None:
                own_steps = self._steps_to_own(slots.with_others(replica.elsewhere()), tenant, num_requests, most)
            if own_steps is not None and own_steps > (steps or 0):
                steps, wait = own_steps, "own"
            queue = replace(queue, num_steps_to_slot=steps)
        num_entered = self._room.num_entered(replica.index)
        return Line(queue, num_requests, wait, measured, now, num_entered)

    def _steps_to_own(self, slots: Slots, tenant: str, num_requests: int, most: int) -> int | None:
        """Steps until a tenant that runs as many as it may, `most`, may run the last of these; None: it may now.

        `slots`: of all replicas, whose steps are taken to be as long as each other's.
        """
        ahead = self._room.ahead_of_tenant(tenant, slots.request_ids)
        num_running = self._room.num_running_of(tenant) + ahead.num_placed
        if num_running + len(ahead.asked) + num_requests <= most:
            return None
        return slots.steps_until_free(ahead.asked + ahead.asked[: num_requests - 1], most, None, tenant)

    def learn(self, forecast: Forecast, real_s: float) -> None:
        """What became of a prediction for one request."""
        self._corrections.learn(forecast.kind, forecast.uncorrected_s, real_s)

    def _promise(self, request_class: RequestClass, predicted_s: float, num_requests: int, replica: Replica) -> Limit:
        """What was promised to the class as a limit like the others: on milliseconds of waiting."""
        promised_s = request_class.ttft_slo_s
        assert promised_s is not None and self._factor is not None
        most_ms, predicted_ms = round(1000 * promised_s * self._factor), math.ceil(1000 * predicted_s)
        num_waiting = self._room.load(replicas=(replica.index,)).num_waiting
        own_ms = predicted_ms * num_requests // (num_waiting + num_requests)
        place = Place(f"promise {request_class.name}", predicted_ms - own_ms, most_ms, own_ms, 1000.0)
        key = f"request_classes.{request_class.name}.ttft_slo_s, scheduler_config.slo_refusal_factor"
        most = f"{promised_s:g} s times {self._factor:g}"
        return Limit("slo", key, place, f"the first token is expected in {predicted_s:.1f} s, more than {most}")
