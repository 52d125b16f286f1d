"""Responses that are kept for a while: for whoever asks again, and for conversations that go on with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec import json

from llm_serving.errors import RequestError, RequestNotFoundError, StoreFullError
from llm_serving.server.responses_schemas import ResponseObject
from llm_serving.server.schemas import ChatMessage, ToolCallOfMessage
from llm_serving.server.shares import Kept, Shares

OVERHEAD_BYTES = 4096
"""What a response takes beside its texts."""


@dataclass
class StoredResponse:
    """A response and the conversation up to its end."""

    response: ResponseObject
    tenant: str
    said: list[ChatMessage]
    """Before it, without instructions."""
    answer: ChatMessage | None = None
    """What it says itself, once it has ended."""
    task: asyncio.Task[None] | None = None
    """Computes it, where nobody waits for it on a connection."""

    @property
    def in_progress(self) -> bool:
        return self.response.status == "in_progress"

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation that goes on with it."""
        return self.said if self.answer is None else [*self.said, self.answer]


def _chars_of(message: ChatMessage) -> int:
    calls = message.tool_calls or ()
    texts = (message.content, message.reasoning_content, *(each for call in calls for each in _texts_of(call)))
    return sum(len(text) for text in texts if isinstance(text, str))


def _texts_of(call: ToolCallOfMessage) -> tuple[str, str]:
    return call.function.name, str(call.function.arguments)


class ResponseStore:
    """In memory, the newest ones, up to a number of bytes; and those in progress, up to as many again.

    Where there is no room, older ones go: of several tenants, of the one that has most.

    It belongs to the event loop.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._max_bytes = shares.num_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._ended, self._in_progress = Kept(shares), Kept(shares)

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return self._max_bytes > 0

    def begin(self, stored: StoredResponse) -> None:
        """Keeps a response that nobody waits for, until it has ended and longer.

        Raises:
            RequestError: It is larger than all that is kept.
            StoreFullError: Others that are computed leave no room for it.
        """
        num_bytes, tenant = _size_of(stored), stored.tenant
        if num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} ({self._shares.key})"
            raise RequestError("background", f"must be false: it takes {num_bytes} bytes of {limit}")
        if num_bytes > self._in_progress.room(tenant):
            raise StoreFullError(f"responses in the background {self._shares.rule}")
        self._stored[stored.response.id] = stored
        self._in_progress.add(stored.response.id, tenant, num_bytes)

    def keep(self, stored: StoredResponse) -> bool:
        """Keeps a response that has ended; older ones make room. Returns whether it is not too large."""
        self.drop(stored.response.id)
        num_bytes = _size_of(stored)
        older = self._ended.in_the_way(stored.tenant, num_bytes)
        if older is None:
            return False
        for name in older:
            self.drop(name)
        self._stored[stored.response.id] = stored
        self._ended.add(stored.response.id, stored.tenant, num_bytes)
        return True

    def find(self, response_id: str, tenant: str | None) -> StoredResponse:
        """A response that this tenant, or None: anybody, may see.

        Raises:
            RequestNotFoundError: There is none.
        """
        stored = self._stored.get(response_id)
        if stored is None or tenant not in (None, stored.tenant):
            raise RequestNotFoundError("response_id", "must be that of a response that is stored")
        return stored

    def drop(self, response_id: str) -> None:
        """Forgets a response, if it is there."""
        self._stored.pop(response_id, None)
        self._ended.remove(response_id)
        self._in_progress.remove(response_id)


def _size_of(stored: StoredResponse) -> int:
    said = sum(map(_chars_of, stored.messages))
    response = stored.response
    answered = len(json.encode((response.output, response.tools, response.tool_choice)))
    noted = len(response.instructions or "") + sum(len(key) + len(value) for key, value in response.metadata.items())
    return OVERHEAD_BYTES + 4 * (said + answered + noted)  # a character takes up to four
