"""Answers to what never becomes a request."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from msgspec import json

RETRY_AFTER_S: Final = 1


@dataclass(frozen=True)
class Refusal:
    """Why a client is sent away; the connection ends with it.

    Attributes:
        status: HTTP status.
        message: What rule was broken, and its limit.
    """

    status: HTTPStatus
    message: str

    def to_bytes(self, retry_after_s: int = RETRY_AFTER_S) -> bytes:
        """A whole HTTP response in the form of the OpenAI API; whoever may come again is told when."""
        busy = self.status == HTTPStatus.SERVICE_UNAVAILABLE
        kind = "service_unavailable_error" if busy else "invalid_request_error"
        body = json.encode({"error": {"message": self.message, "type": kind, "param": None, "code": None}})
        retry = f"retry-after: {retry_after_s}\r\n" if busy else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


NO_PLACE: Final = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
NO_MEMORY: Final = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server holds too many unfinished requests")
NOT_HTTP: Final = Refusal(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
NO_HOST: Final = Refusal(
    HTTPStatus.BAD_REQUEST, "`Host` must be given once, as a name or an address, with a port or without"
)
NO_PATH: Final = Refusal(HTTPStatus.BAD_REQUEST, "the URL must be a path, or begin with http:// or https://")
NO_LENGTH: Final = Refusal(HTTPStatus.BAD_REQUEST, "`Content-Length` must have at most 20 digits")
NO_EXPECTATION: Final = Refusal(HTTPStatus.EXPECTATION_FAILED, "`Expect` must be 100-continue")
NO_CHUNKS: Final = Refusal(HTTPStatus.NOT_IMPLEMENTED, "`Transfer-Encoding` must be chunked and nothing else")


class RefusedError(ValueError):
    """A head breaks a rule.

    Args:
        refusal: The answer to it.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
