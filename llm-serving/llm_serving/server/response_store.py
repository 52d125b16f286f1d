"""Responses that are kept for a while: for whoever asks again, and for conversations that go on with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec import json

from llm_serving.errors import RequestError, RequestNotFoundError, StoreFullError
from llm_serving.server.responses_schemas import ResponseObject
from llm_serving.server.schemas import ChatMessage, ToolCallOfMessage

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
    num_bytes: int = 0

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
    """In memory, the newest ones, up to a number of bytes.

    Those in progress stay, and the one that has just ended: nobody but the store can tell what became of it.

    It belongs to the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: dict[str, StoredResponse] = {}

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
        stored.num_bytes = _size_of(stored)
        limit = f"{self._max_bytes} (serving_config.response_store_bytes)"
        if stored.num_bytes > self._max_bytes:
            raise RequestError("background", f"must be false: it takes {stored.num_bytes} bytes of {limit}")
        num_taken = sum(each.num_bytes for each in self._stored.values() if each.in_progress)
        if num_taken + stored.num_bytes > self._max_bytes:
            raise StoreFullError(f"responses in the background leave no room for another one in {limit} bytes")
        self.keep(stored)

    def keep(self, stored: StoredResponse) -> bool:
        """Keeps a response, or what has become of one; older ones make room. Returns whether it is not too large."""
        self.drop(stored.response.id)
        stored.num_bytes = _size_of(stored)
        if stored.num_bytes > self._max_bytes:
            return False
        older = [each for each in self._stored.values() if not each.in_progress]
        self._stored[stored.response.id] = stored
        self._num_bytes += stored.num_bytes
        for each in older:
            if self._num_bytes <= self._max_bytes:
                break
            self.drop(each.response.id)
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
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._num_bytes -= stored.num_bytes


def _size_of(stored: StoredResponse) -> int:
    said = sum(map(_chars_of, stored.messages))
    response = stored.response
    answered = len(json.encode((response.output, response.tools, response.tool_choice)))
    noted = len(response.instructions or "") + sum(len(key) + len(value) for key, value in response.metadata.items())
    return OVERHEAD_BYTES + 4 * (said + answered + noted)  # a character takes up to four
