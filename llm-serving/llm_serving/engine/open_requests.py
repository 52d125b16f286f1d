"""Requests that were submitted and have not ended, as the event loop knows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llm_serving.admission.door import Forecast
from llm_serving.core.request import Request
from llm_serving.engine.engine import Engine
from llm_serving.engine.request_stream import RequestStream
from llm_serving.observe.live_requests import LiveRequests


@dataclass(eq=False, slots=True)
class OpenRequest:
    request: Request
    stream: RequestStream
    engine: Engine
    """Which has it."""
    forecast: Forecast | None
    """Of its first token, as long as there is something to learn from it."""


class OpenRequests:
    """By the engine's id, by what clients call them, and by engine; nothing is kept of one that has ended."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}
        self._live = LiveRequests()
        self._num_of: Counter[Engine] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, opened: OpenRequest) -> None:
        self._requests[opened.request.request_id] = opened
        self._live.add(opened.request)
        self._num_of[opened.engine] += 1

    def get(self, request_id: str) -> OpenRequest | None:
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> OpenRequest | None:
        """Forgets it; None if it has ended before."""
        opened = self._requests.pop(request_id, None)
        if opened is not None:
            self._live.discard(request_id)
            self._num_of[opened.engine] -= 1
            if not self._num_of[opened.engine]:
                del self._num_of[opened.engine]  # an engine that has ended is not kept for its count
        return opened

    def num_of(self, engine: Engine) -> int:
        """Exact on the event loop, where the engine itself may still have messages to take."""
        return self._num_of[engine]

    def find(self, client_id: str, tenant: str | None) -> list[OpenRequest]:
        """All that a client means by an id: its own ones or, with None, everybody's."""
        return [self._requests[request.request_id] for request in self._live.find(client_id, tenant)]
