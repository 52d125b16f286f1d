"""Stored responses, which clients can retrieve and later requests can continue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec import json

from llm_serving.errors import RequestError, RequestNotFoundError, StoreFullError
from llm_serving.server.protocols.openai.responses_schemas import ResponseObject
from llm_serving.server.protocols.openai.schemas import ChatMessage
from llm_serving.server.tenant_quota import StoredSizes, TenantQuota

OVERHEAD_BYTES = 4096


@dataclass
class StoredResponse:
    response: ResponseObject
    tenant: str
    input: list[ChatMessage]
    """The conversation before the response, without instructions."""
    output: ChatMessage | None = None
    """None if the response has no output: it is in progress or has failed."""
    task: asyncio.Task[None] | None = None

    @property
    def in_progress(self) -> bool:
        return self.response.status == "in_progress"

    @property
    def messages(self) -> list[ChatMessage]:
        return self.input if self.output is None else [*self.input, self.output]


def _chars_of(message: ChatMessage) -> int:
    texts: list[object] = [message.content, message.reasoning_content]
    for call in message.tool_calls or ():
        texts += call.function.name, str(call.function.arguments)
    return sum(len(text) for text in texts if isinstance(text, str))


class ResponseStore:
    """Stores finished responses, and background responses in progress. Each of these two kinds may use the whole quota.
    If finished responses exceed it, the oldest one of the tenant that uses the most bytes is evicted. Only the event
    loop may use the store.
    """

    def __init__(self, quota: TenantQuota) -> None:
        self._quota = quota
        self._max_bytes = quota.num_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._finished, self._in_progress = StoredSizes(quota), StoredSizes(quota)

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def add_running(self, stored: StoredResponse) -> None:
        """Store a background response. Raise RequestError if it exceeds the quota, StoreFullError if others fill it."""
        num_bytes, tenant = _size_of(stored), stored.tenant
        if num_bytes > self._max_bytes:
            limit = f"{self._quota.key} {self._max_bytes}"
            raise RequestError(
                "background",
                f"must be false: the response to store takes {num_bytes} bytes, more than the limit of {limit}",
            )
        if num_bytes > self._in_progress.room(tenant):
            raise StoreFullError(f"the store of responses has no room: responses in the background {self._quota.rule}")
        self._stored[stored.response.id] = stored
        self._in_progress.add(stored.response.id, tenant, num_bytes)

    def add(self, stored: StoredResponse) -> bool:
        """Store a finished response, and evict older ones to make room. Return False if it is too large."""
        self.remove(stored.response.id)
        num_bytes = _size_of(stored)
        older = self._finished.evictions(stored.tenant, num_bytes)
        if older is None:
            return False
        for name in older:
            self.remove(name)
        self._stored[stored.response.id] = stored
        self._finished.add(stored.response.id, stored.tenant, num_bytes)
        return True

    def find(self, response_id: str, tenant: str | None) -> StoredResponse:
        """Return a stored response of `tenant` (None: any tenant). Raise RequestNotFoundError if there is none."""
        stored = self._stored.get(response_id)
        if stored is None or tenant not in (None, stored.tenant):
            raise RequestNotFoundError("response_id", "must be the id of a stored response")
        return stored

    def remove(self, response_id: str) -> None:
        self._stored.pop(response_id, None)
        self._finished.remove(response_id)
        self._in_progress.remove(response_id)


def _size_of(stored: StoredResponse) -> int:
    response = stored.response
    num_chars = sum(map(_chars_of, stored.messages)) + len(response.instructions or "")
    num_chars += len(json.encode((response.output, response.tools, response.tool_choice)))
    num_chars += sum(len(key) + len(value) for key, value in response.metadata.items())
    return OVERHEAD_BYTES + 4 * num_chars  # a character takes up to four bytes
