"""Requests that were submitted and have not ended, as clients know them."""

from __future__ import annotations

from typing import Final

from llm_serving.core.request import Request

ID_PREFIXES: Final = ("cmpl-", "chatcmpl-")
"""What answers put before the id of their request."""


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
