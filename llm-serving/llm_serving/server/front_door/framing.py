"""Where the body of a request ends: whoever else reads the request must see it end there too (RFC 9112, 6)."""

from __future__ import annotations

from typing import Final

from llm_serving.server.front_door.older_http import OLDER
from llm_serving.server.front_door.refusals import NO_CHUNKS, NO_EXPECTATION, NO_LENGTH, NOT_HTTP, RefusedError

LENGTH_DIGITS: Final = 20
"""Of a body's length, zeros before it among them."""


def declared_length(version: str, headers: list[tuple[bytes, bytes]]) -> int | None:
    """Bytes of the body that a head declares; None: none, or that the body comes in chunks.

    Args:
        version: Of HTTP.
        headers: That the parser let pass, so there are not both of the two; names in small letters.

    Raises:
        RefusedError: Chunks in a version that has none, a coding besides them, a length of too many digits, or an
            expectation that is not known.
    """
    length = None
    for name, value in headers:
        if name == b"content-length":
            if len(value) > LENGTH_DIGITS:
                raise RefusedError(NO_LENGTH)
            length = int(value)
        elif name == b"transfer-encoding":
            if version == OLDER:
                raise RefusedError(NOT_HTTP)
            if value.lower() != b"chunked":
                raise RefusedError(NO_CHUNKS)
        elif name == b"expect" and value.lower() != b"100-continue":
            raise RefusedError(NO_EXPECTATION)
    return length
