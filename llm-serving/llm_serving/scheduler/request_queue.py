"""Requests that wait, best first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from llm_serving.core.request import Request, RequestStatus


class RequestQueue:
    """A heap ordered by `Request.queue_key`, which never changes while a request lives.

    A request that ends while it waits is dropped lazily: it stays in the heap until it reaches the head.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: set[str] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        return (request for _, request in self._heap if request.request_id in self._members)

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in self._members, f"request {request.request_id} waits twice"
        self._members.add(request.request_id)
        heapq.heappush(self._heap, (request.queue_key, request))

    def peek(self) -> Request | None:
        """The best request, which stays in the queue; None when empty."""
        while self._heap:
            request = self._heap[0][1]
            if request.request_id in self._members:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._members.remove(request.request_id)
        return request

    def discard(self, request: Request) -> None:
        """Removes the request if it waits; its heap entry goes when it reaches the head."""
        self._members.discard(request.request_id)
