"""The limits of a request line and its headers, looked at before anything parses them."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.front_door.refusals import NOT_HTTP, Refusal

BLANK_LINE: Final = b"\n\r\n"
"""The end of a head: of the last line, and an empty one."""
AROUND_URL: Final = 32
"""Bytes of a request line besides its URL: a method, spaces, the version, CR and LF."""
_REQUEST_LINE: Final = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/1\.[01]\r\n")
"""The parser lets more pass, other versions among it, in which whoever passed the request on may see another one."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


def without_upgrade(head: bytes) -> bytes:
    """A head that asks for no other protocol: with the question in it, the parser takes the body for that protocol's.

    A server may leave the question unanswered (RFC 9110, 7.8); Java's client asks for HTTP/2 with every request.
    """
    return _UPGRADE.sub(b"", head) if b"\r\nupgrade:" in head.lower() else head


class RequestHead:
    """Finds the first head in bytes and holds it against the limits.

    Args:
        limits: Their keys are `max_header_bytes`, `max_headers` and `max_url_bytes`.
    """

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._max_line = limits.max_url_bytes + AROUND_URL

    def size(self, data: bytes, searched: int) -> int:
        """Bytes of the head that `data` begins with; 0 where it is not complete.

        Args:
            data: What has arrived.
            searched: Bytes of it that hold no end of a head.
        """
        end = data.find(BLANK_LINE, max(0, searched - len(BLANK_LINE) + 1))
        return end + len(BLANK_LINE) if end >= 0 else 0

    def refusal(self, data: bytes, size: int) -> Refusal | None:
        """What is wrong with a head, complete or not; None where nothing is.

        Args:
            data: Begins with the head.
            size: Its bytes; where it is not complete, all there are.
        """
        if not 65 <= data[0] <= 90:  # a method is of capital letters: what else comes here never ends in a blank line
            return NOT_HTTP
        line = data.find(b"\n", 0, min(size, self._max_line))
        if line < 0 and size >= self._max_line:
            return Refusal(
                HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL must be at most {self._limits.max_url_bytes} bytes"
            )
        if line >= 0 and not _REQUEST_LINE.fullmatch(data, 0, line + 1):
            return NOT_HTTP
        too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        if data.count(b"\n", 0, size) > self._limits.max_headers + 2:  # with request line and blank line
            return Refusal(too_large, f"there must be at most {self._limits.max_headers} headers")
        if size > self._limits.max_header_bytes:
            return Refusal(too_large, f"request line and headers must be at most {self._limits.max_header_bytes} bytes")
        return None
