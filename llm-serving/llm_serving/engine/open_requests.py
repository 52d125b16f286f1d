"""The unfinished requests of a server. The event loop tracks them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llm_serving.core.request import Request
from llm_serving.engine.engine import Engine
from llm_serving.engine.request_stream import CoalescedResponse, RequestStream
from llm_serving.observability.event_log import client_id_of, client_ids

MAX_COALESCED: Final = 4096
"""Maximum number of coalesced requests whose engine ids are stored. The oldest entry is removed first."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    request: Request
    stream: RequestStream | CoalescedResponse
    engine: Engine
    deadline: float | None
    """The latest deadline that was requested. The engine applies it between two steps."""
    is_cancelled: bool = field(default=False, init=False)
    """Whether the request was cancelled. Its engine, or the next one after a migration, must end it."""
    next_engine: Engine | None = field(default=None, init=False)
    """The engine to which the request's blocks are being transferred. No engine has the request meanwhile."""
    priority: int | None = field(default=None, init=False)
    """Priority that was set during a migration, for the next engine."""

    @property
    def is_in_transfer(self) -> bool:
        return self.next_engine is not None


class OpenRequests:
    def __init__(self) -> None:
        self.by_id: dict[str, OpenRequest] = {}
        """Engine id -> request. Other classes only read it and the counters."""
        self.num_of: Counter[Engine] = Counter()
        self._ranked: Mapping[int, Engine] = {}
        self._by_load: list[tuple[int, int]] = []
        self.num_migrating_to: Counter[Engine] = Counter()
        self._coalesced: dict[str, dict[str, None]] = {}
        self._num_coalesced = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, opened: OpenRequest) -> None:
        self.by_id[opened.request.request_id] = opened
        self._count(opened.engine, 1)

    def pop(self, request_id: str) -> OpenRequest | None:
        opened = self.by_id.pop(request_id, None)
        if opened is not None:
            self._count(opened.engine, -1)
            if opened.next_engine is not None:
                self._end_transfer(opened)
        return opened

    def start_transfer(self, request_id: str, engine: Engine) -> None:
        """Record that a request's blocks are being transferred to an engine. This replaces an earlier target engine."""
        if (opened := self.by_id.get(request_id)) is not None:
            self._end_transfer(opened)
            opened.next_engine = engine
            self.num_migrating_to[engine] += 1

    def finish_migration(self, request_id: str, request: Request, engine: Engine) -> None:
        if (opened := self.pop(request_id)) is not None:
            opened.request, opened.engine, opened.priority = request, engine, None
            self.add(opened)

    def by_load(self, engines: Mapping[int, Engine]) -> Sequence[tuple[int, int]]:
        """Return (number of open requests, index) of each engine, ascending. Later changes update the returned list."""
        if engines is not self._ranked:
            self._ranked = engines
            self._by_load = sorted((self.num_of[engine], index) for index, engine in engines.items())
        return self._by_load

    def find(self, client_id: str, tenant: str | None) -> list[OpenRequest]:
        names, engine_ids = client_ids(client_id), {client_id, *self.coalesced_with(client_id)}
        return [
            opened
            for engine_id, opened in self.by_id.items()
            if (engine_id in engine_ids or client_id_of(engine_id) in names) and tenant in (None, opened.request.tenant)
        ]

    def record_coalesced(self, client_id: str, engine_id: str) -> None:
        engine_ids = self._coalesced.setdefault(client_id, {})
        self._num_coalesced += engine_id not in engine_ids
        engine_ids[engine_id] = None
        if self._num_coalesced > MAX_COALESCED:
            self._num_coalesced -= 1
            oldest, engine_ids = next(iter(self._coalesced.items()))
            del engine_ids[next(iter(engine_ids))]
            if not engine_ids:
                del self._coalesced[oldest]

    def coalesced_with(self, client_id: str) -> Sequence[str]:
        return [engine_id for each in client_ids(client_id) for engine_id in self._coalesced.get(each, ())]

    def _count(self, engine: Engine, change: int) -> None:
        before = self.num_of[engine]
        if before + change:
            self.num_of[engine] = before + change
        else:
            del self.num_of[engine]  # so that an engine that has ended can be freed
        if self._ranked.get(engine.index) is engine:
            del self._by_load[bisect_left(self._by_load, (before, engine.index))]
            insort(self._by_load, (before + change, engine.index))

    def _end_transfer(self, opened: OpenRequest) -> None:
        if (engine := opened.next_engine) is not None:
            opened.next_engine = None
            self.num_migrating_to[engine] -= 1
            if not self.num_migrating_to[engine]:
                del self.num_migrating_to[engine]
