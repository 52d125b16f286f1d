"""Requests that were submitted and have not ended, as the event loop knows them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llm_serving.core.request import Request
from llm_serving.engine.coalescing import CoalescedResponse
from llm_serving.engine.engine import Engine
from llm_serving.engine.request_stream import RequestStream
from llm_serving.observability.event_log import LiveRequests, client_ids

MAX_JOINED: Final = 4096
"""Answers that are remembered which others' requests computed."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    request: Request
    stream: RequestStream | CoalescedResponse
    """Gets its pieces."""
    engine: Engine
    """Which has it."""
    deadline: float | None = field(init=False)
    """As it was asked for last."""
    is_cancelled: bool = field(default=False, init=False)
    """Whoever has it is to end it, the replica that it moves to as well."""
    next_engine: Engine | None = field(default=None, init=False)
    """Whereto its blocks are brought: its engine has let go of it, and no other has it yet."""
    priority: int | None = field(default=None, init=False)
    """That it was given on its way, and has where it comes."""

    def __post_init__(self) -> None:
        self.deadline = self.request.deadline

    @property
    def is_on_way(self) -> bool:
        return self.next_engine is not None


class OpenRequests:
    """By the engine's id, by what clients call them, and by engine; nothing is kept of one that has ended."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._live = LiveRequests()
        self._num_of: Counter[Engine] = Counter()
        self._ranked: Mapping[int, Engine] = {}
        """Those that `by_load` was asked about last."""
        self._by_load: list[tuple[int, int]] = []
        """What it told, kept up to date."""
        self._num_coming: Counter[Engine] = Counter()
        self._joined: dict[str, dict[str, None]] = {}
        """A client's id -> engine's ids of what computes, or computed, its answers; the newest."""
        self._num_joined = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, opened: OpenRequest) -> None:
        self._requests[opened.request.request_id] = opened
        self._live.add(opened.request)
        self._count(opened.engine, 1)

    def get(self, request_id: str) -> OpenRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> OpenRequest | None:
        """Forgets it; None if it has ended before."""
        opened = self._requests.pop(request_id, None)
        if opened is not None:
            self._live.discard(request_id)
            self._count(opened.engine, -1)
            self._set_out(opened, None)
        return opened

    def set_out(self, request_id: str, engine: Engine) -> None:
        """Its blocks are brought to an engine, which has it later, or another one."""
        opened = self._requests.get(request_id)
        if opened is not None:
            self._set_out(opened, engine)

    def hand_over(self, request_id: str, request: Request, engine: Engine) -> None:
        """Another engine has it from now on, by another record."""
        opened = self.pop(request_id)
        if opened is not None:
            opened.request, opened.engine, opened.priority = request, engine, None
            self.add(opened)

    def left_at(self, engine: Engine) -> list[OpenRequest]:
        """Those that an engine has which has ended."""
        return [each for each in self._requests.values() if each.engine is engine and not each.is_on_way]

    def num_of(self, engine: Engine) -> int:
        """Exact on the event loop, where the engine itself may still have messages to take."""
        return self._num_of[engine]

    def by_load(self, engines: Mapping[int, Engine]) -> Sequence[tuple[int, int]]:
        """(how many requests an engine has, its index) of these engines, ascending.

        Asked about the same object again, it has not to look at all of them.
        """
        if engines is not self._ranked:
            self._ranked = engines
            self._by_load = sorted((self._num_of[engine], index) for index, engine in engines.items())
        return self._by_load

    def num_coming(self, engine: Engine) -> int:
        """Those that another engine has let go of, and whose blocks are brought to this one."""
        return self._num_coming[engine]

    def find(self, client_id: str, tenant: str | None) -> list[OpenRequest]:
        """All that a client means by an id: its own ones or, with None, everybody's."""
        found = {request.request_id: None for request in self._live.find(client_id, tenant)}
        for engine_id in self.joined(client_id):
            if engine_id in self._requests and tenant in (None, self._requests[engine_id].request.tenant):
                found[engine_id] = None
        return [self._requests[engine_id] for engine_id in found]

    def join(self, client_id: str, engine_id: str) -> None:
        """The answer to a client's request is what one of the engine's computes for another."""
        engine_ids = self._joined.setdefault(client_id, {})
        self._num_joined += engine_id not in engine_ids
        engine_ids[engine_id] = None
        if self._num_joined > MAX_JOINED:
            self._num_joined -= 1
            oldest, engine_ids = next(iter(self._joined.items()))
            del engine_ids[next(iter(engine_ids))]
            if not engine_ids:
                del self._joined[oldest]

    def joined(self, client_id: str) -> Sequence[str]:
        """Engine's ids of requests of others that a client's answers came from."""
        return [engine_id for each in client_ids(client_id) for engine_id in self._joined.get(each, ())]

    def _count(self, engine: Engine, change: int) -> None:
        before = self._num_of[engine]
        if before + change:
            self._num_of[engine] = before + change
        else:
            del self._num_of[engine]  # an engine that has ended is not kept for its count
        if self._ranked.get(engine.index) is engine:
            del self._by_load[bisect_left(self._by_load, (before, engine.index))]
            insort(self._by_load, (before + change, engine.index))

    def _set_out(self, opened: OpenRequest, engine: Engine | None) -> None:
        if (before := opened.next_engine) is not None:
            self._num_coming[before] -= 1
            if not self._num_coming[before]:
                del self._num_coming[before]
        opened.next_engine = engine
        if engine is not None:
            self._num_coming[engine] += 1
