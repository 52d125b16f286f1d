"""The event log: what happened to requests and steps, kept for a while.

Nothing is written for each request of a step: a step keeps which requests it computed, a request the few times when
its state changed. `latency_breakdown.py` joins the two on demand. `LiveRequests` finds unfinished requests by the
client's ids.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from itertools import islice, pairwise, takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import HttpTimings
from llm_serving.scheduler import Schedule
from llm_serving.scheduler.schedule import Blocked

NO_DRAFTS: Final[Mapping[int, int]] = MappingProxyType({})

ID_PREFIXES: Final = ("cmpl-", "chatcmpl-")
"""Prefixes of the ids of responses, before the id of the request."""


class Step(NamedTuple):
    """One step. The WorkAgent began it when it was formed or when the step before had ended, whichever came last."""

    number: int
    formed: float
    ended: float
    singles: tuple[int, ...]
    """`Request.sequence` of the rows that computed one token and chose the next."""
    chunks: tuple[tuple[int, int, int], ...]
    """(`Request.sequence`, first token, tokens) of all other rows: prompts, and what is computed again."""
    drafts: tuple[tuple[int, int, int], ...] = ()
    """(`Request.sequence`, draft tokens verified, draft tokens accepted) of the rows among `singles` with drafts."""

    @property
    def num_tokens(self) -> int:
        num_draft_tokens = sum(verified for _, verified, _ in self.drafts)
        return len(self.singles) + num_draft_tokens + sum(count for _, _, count in self.chunks)


class Preempted(NamedTuple):
    time: float
    by_class: str
    swapped: bool


class Decision(NamedTuple):
    """Why those who wait do so, from a time on."""

    time: float
    blocked: Blocked | None


class Outage(NamedTuple):
    """The WorkAgent did nothing that counted: its last steps were lost, or it was being started again."""

    began: float
    ended: float
    """Infinite while it lasts."""


class RequestFacts(NamedTuple):
    """What a request tells of itself."""

    status: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_steps_waited: int | None
    wait_bound: int | None
    first_scheduled_time: float | None


class RequestRecord:
    """What is kept of one request: its own record, without its texts and tokens once it has ended."""

    __slots__ = (
        "_facts",
        "_request",
        "arrival_time",
        "ended_time",
        "first_token_time",
        "has_beams",
        "http_timings",
        "number",
        "preemptions",
        "queued_time",
        "request_class",
        "request_id",
        "sequences",
        "tenant",
    )

    def __init__(self, request: Request, request_class: RequestClass, number: int) -> None:
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.request_class = request_class
        self.number = number
        """Order of arrival at the engine, from 1."""
        self.http_timings: HttpTimings | None = request.http_timings
        self.arrival_time = request.arrival_time
        self.queued_time: float | None = None
        self.first_token_time: float | None = None
        self.ended_time: float | None = None
        self.has_beams = False
        """Whether it waits for others between its tokens, so that no bound on gaps is its."""
        self.sequences: frozenset[int] = frozenset()
        """`Request.sequence` of what is computed for it: its own, or those of its beams."""
        self.preemptions: tuple[Preempted, ...] = ()
        self._request: Request | None = request
        self._facts: RequestFacts | None = None

    @property
    def facts(self) -> RequestFacts:
        request = self._request
        if request is None:
            assert self._facts is not None
            return self._facts
        return RequestFacts(
            request.status.value,
            request.finish_reason,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            len(request.output_token_ids),
            len(self.preemptions),
            request.num_steps_waited,
            request.wait_bound,
            request.first_scheduled_time,
        )

    def end(self, time: float, status: str = "finished") -> None:
        self._facts = self.facts._replace(status=status)
        self._request = None
        self.ended_time = time


class Record:
    """A journal as it stands at one moment; it does not change while somebody reads it."""

    def __init__(
        self, now: float, steps: list[Step], decisions: list[Decision], outages: list[Outage], kept_since: float
    ) -> None:
        self.now = now
        self.steps = steps
        """In order; the last two may be under way, they end now."""
        self.decisions = decisions
        self.outages = outages
        self.kept_since = kept_since
        """Of what came before, the steps are gone."""
        self._members: dict[int, frozenset[int]] = {}

    def members(self, step: Step) -> frozenset[int]:
        """`singles` as a set; steps in a row usually share one."""
        key = id(step.singles)
        found = self._members.get(key)
        if found is None:
            found = self._members[key] = frozenset(step.singles)
        return found

    def steps_between(self, start: float, end: float) -> list[Step]:
        """Steps that ended after `start` and were formed before `end`."""
        first = bisect_left(self._ends, start)
        last = bisect_left(self._formed, end)
        return self.steps[first:last]

    @cached_property
    def _ends(self) -> list[float]:
        return [step.ended for step in self.steps]

    @cached_property
    def _formed(self) -> list[float]:
        return [step.formed for step in self.steps]


class EventLog:
    """The journal of one engine. Its thread writes; any thread may take a `record` or look for a request.

    Args:
        num_requests: Ended requests to keep, the newest; 0 turns the journal off.
        num_steps: Steps to keep, the newest.
    """

    def __init__(self, num_requests: int = 0, num_steps: int = 1) -> None:
        self.enabled = num_requests > 0
        self._num_requests = num_requests
        self._num_lives = 0
        self._lives: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque()
        self._steps: deque[Step] = deque(maxlen=num_steps)
        self._in_flight: deque[Step] = deque()
        self._decisions: deque[Decision] = deque(maxlen=num_steps)
        self._outages: deque[Outage] = deque(maxlen=num_steps)
        self._blocked: Blocked | None = None
        self._singles: tuple[int, ...] = ()

    # --- events -----------------------------------------------------------------------------------------------------

    def submitted(self, request: Request, request_class: RequestClass) -> None:
        """A request is on its way to the engine. May be called from any thread."""
        if not self.enabled:
            return
        self._num_lives += 1
        self._lives[request.request_id] = RequestRecord(request, request_class, self._num_lives)
        if request.http_timings is not None:
            request.http_timings.unfinished_request_ids.add(request.request_id)

    def forget(self, request: Request) -> None:
        """A request that was submitted has not got there."""
        self._lives.pop(request.request_id, None)
        if request.http_timings is not None:
            request.http_timings.unfinished_request_ids.discard(request.request_id)

    def departed(self, request: Request, now: float) -> None:
        """Another replica goes on with it; what is kept here is how it came so far."""
        if (life := self._lives.get(request.request_id)) is not None:
            life.end(now, "moved")
            self._keep(life)

    def arrived(self, request: Request, request_class: RequestClass, since: float) -> None:
        """Another replica has begun with it, until `since`."""
        self.submitted(request, request_class)
        if (life := self._lives.get(request.request_id)) is not None:
            life.arrival_time = since

    def queued(self, request: Request, now: float) -> None:
        """The engine has taken it from its inbox; the scheduler knows it."""
        if (life := self._lives.get(request.request_id)) is not None:
            life.queued_time = now
            computed = (request,) if request.sink is None else request.sink.active_requests
            life.sequences = frozenset(each.sequence for each in computed)
            life.has_beams = any(each.is_beam for each in computed)

    def first_token(self, request: Request, now: float) -> None:
        """The first token of the request's answer has come."""
        if (life := self._lives.get(request.request_id)) is not None:
            life.first_token_time = now

    def moved(self, request: Request, request_class: RequestClass) -> None:
        """The request is of another class now."""
        if (life := self._lives.get(request.request_id)) is not None:
            life.request_class = request_class

    def decided(self, now: float, blocked: Blocked | None) -> None:
        """The scheduler was asked for a step and left somebody waiting, or nobody."""
        if self.enabled and blocked != self._blocked:
            self._blocked = blocked
            self._decisions.append(Decision(now, blocked))

    def formed(self, now: float, schedule: Schedule) -> None:
        """A step goes to the WorkAgent."""
        if not self.enabled:
            return
        rows = schedule.rows
        singles = tuple([row[0].sequence for row in rows if row[3] and row[2] == row[3]])  # by index: rows are many
        if singles == self._singles:
            singles = self._singles  # the steps of a batch that only decodes share one tuple
        self._singles = singles
        chunks: tuple[tuple[int, int, int], ...] = ()
        if len(singles) < len(rows):
            chunks = tuple(
                (row.request.sequence, row.num_computed, row.query_len)
                for row in rows
                if row.query_len != row.num_samples
            )
        drafts: tuple[tuple[int, int, int], ...] = ()
        if schedule.has_draft_tokens:
            drafts = tuple((row.request.sequence, row.num_drafts, 0) for row in rows if row.num_drafts)
        self._in_flight.append(Step(schedule.step, now, math.inf, singles, chunks, drafts))
        for request in schedule.started:
            if (life := self._lives.get(request.root_request.request_id)) is not None:
                life.sequences |= {request.sequence}
        for request, preemption in zip(schedule.preempted, schedule.preemptions, strict=True):
            if (life := self._lives.get(request.root_request.request_id)) is not None:
                life.preemptions += (Preempted(now, preemption.by_class, preemption.swapped),)

    def replied(self, now: float, accepted_drafts: Mapping[int, int] = NO_DRAFTS) -> None:
        """Record the reply to the oldest step; `accepted_drafts`: accepted draft tokens by `Request.sequence`."""
        if self.enabled:
            step = self._in_flight.popleft()
            drafts = tuple((each, verified, accepted_drafts.get(each, 0)) for each, verified, _ in step.drafts)
            self._steps.append(step._replace(ended=now, drafts=drafts))

    def lost(self, now: float) -> None:
        """The steps in flight will never be replied to."""
        if not self.enabled:
            return
        began = self._in_flight[0].formed if self._in_flight else now
        if self._steps:
            began = max(began, self._steps[-1].ended)
        self._in_flight.clear()
        self._outages.append(Outage(began, math.inf))

    def recovered(self, now: float) -> None:
        """Steps can be formed again."""
        if self.enabled:
            self._outages[-1] = self._outages[-1]._replace(ended=now)

    def ended(self, request: Request, now: float) -> None:
        """The request has got its last piece."""
        if (life := self._lives.get(request.request_id)) is None:
            return
        life.end(now)
        if (http_timings := life.http_timings) is not None:
            http_timings.last_finished_time = max(http_timings.last_finished_time, now)
            http_timings.unfinished_request_ids.discard(life.request_id)
        self._keep(life)

    def _keep(self, life: RequestRecord) -> None:
        self._ended.append(life)
        if len(self._ended) > self._num_requests:
            oldest = self._ended.popleft()
            if self._lives.get(oldest.request_id) is oldest:  # one that left may have come back
                del self._lives[oldest.request_id]

    # --- what others may know; from any thread ----------------------------------------------------------------------

    def lives(self) -> list[RequestRecord]:
        """Of the requests that live and of the newest that ended."""
        return list(self._lives.values())

    def steps_since(self, time: float, most: int) -> list[tuple[float, Step]]:
        """When the WorkAgent began it, and the step: of those that ended after a time the newest so many, in order.

        To be called by the engine's thread.
        """
        newest = list(islice(reversed(self._steps), most + 1))
        began = [max(step.formed, before.ended) for step, before in pairwise(newest)]
        began += [step.formed for step in newest[len(began) :]]
        found = [each for each in zip(began, newest, strict=True) if each[1].ended > time]
        return found[:most][::-1]

    def ended_since(self, time: float, most: int) -> list[RequestRecord]:
        """Requests that ended after a time, the newest so many, in order. To be called by the engine's thread."""
        newest = takewhile(lambda life: life.ended_time is not None and life.ended_time > time, reversed(self._ended))
        return list(islice(newest, most))[::-1]

    def record(self, now: float) -> Record:
        # In this order a step that ends meanwhile is seen twice, never missed.
        in_flight, steps = list(self._in_flight), list(self._steps)
        full = len(steps) == self._steps.maxlen
        newest = steps[-1].number if steps else -1
        steps += [step._replace(ended=now) for step in in_flight if step.number > newest]
        kept_since = steps[0].formed if full else -math.inf
        return Record(now, steps, list(self._decisions), list(self._outages), kept_since)


def client_ids(request_id: str) -> list[str]:
    """What a client may mean by an id: that of its request, or that of the answer."""
    return [request_id, *(request_id.removeprefix(prefix) for prefix in ID_PREFIXES if request_id.startswith(prefix))]


def client_id_of(engine_id: str) -> str:
    """The client's part of an id of the engine, which ends with a random number that tells requests apart."""
    return engine_id.rpartition("-")[0]


class LiveRequests:
    """Found by any of their ids without looking at the others; lives on the event loop alone."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._by_client_id: dict[str, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._by_client_id.setdefault(client_id_of(request.request_id), {})[request.request_id] = request

    def discard(self, engine_id: str) -> None:
        """The request has ended or is given up; twice changes nothing."""
        if self._requests.pop(engine_id, None) is None:
            return
        client_id = client_id_of(engine_id)
        siblings = self._by_client_id[client_id]
        del siblings[engine_id]
        if not siblings:
            del self._by_client_id[client_id]

    def find(self, request_id: str, tenant: str | None) -> list[Request]:
        """All that a client means by an id, its own ones or, with None, everybody's; in order of arrival."""
        found: dict[str, Request] = {}
        for client_id in client_ids(request_id):
            found |= self._by_client_id.get(client_id, {})
        if request_id in self._requests:
            found[request_id] = self._requests[request_id]
        return [request for request in found.values() if tenant in (None, request.tenant)]
