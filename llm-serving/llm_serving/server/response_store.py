"""Responses that are kept for a while: for whoever asks again, and for conversations that go on with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec import json

from llm_serving.errors import RequestNotFoundError
from llm_serving.server.responses_schemas import ResponseObject
from llm_serving.server.schemas import ChatMessage, ToolCallOfMessage

OVERHEAD_BYTES = 4096
"""What a response takes beside its texts."""


@dataclass
class StoredResponse:
    """A response and the conversation up to its end."""

    response: ResponseObject
    tenant: str
    messages: list[ChatMessage]
    """What was said before it, without instructions, and its answer."""
    task: asyncio.Task[None] | None = None
    """Computes it, where nobody waits for it on a connection."""
    num_bytes: int = 0

    @property
    def in_progress(self) -> bool:
        return self.response.status == "in_progress"


def _chars_of(message: ChatMessage) -> int:
    calls = message.tool_calls or ()
    texts = (message.content, message.reasoning_content, *(each for call in calls for each in _texts_of(call)))
    return sum(len(text) for text in texts if isinstance(text, str))


def _texts_of(call: ToolCallOfMessage) -> tuple[str, str]:
    return call.function.name, str(call.function.arguments)


class ResponseStore:
    """In memory, the newest ones, up to a number of bytes; those in progress stay.

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

    def keep(self, stored: StoredResponse) -> None:
        """Keeps a response, or what has become of one; older ones make room."""
        self.drop(stored.response.id)
        stored.num_bytes = _size_of(stored)
        if stored.num_bytes > self._max_bytes:
            return
        self._stored[stored.response.id] = stored
        self._num_bytes += stored.num_bytes
        while self._num_bytes > self._max_bytes:
            oldest = next((each for each in self._stored.values() if not each.in_progress), None)
            if oldest is None:
                return
            self.drop(oldest.response.id)

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
