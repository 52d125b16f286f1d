"""Work whose length a client chooses is done beside the event loop once there is much of it.

A thread shares Python's lock with the loop and hands it over every few milliseconds, but not within one call of a
library. So what is done there consists of many short calls, or is bounded before it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response

INLINE_BYTES: Final = 2**15
"""Bodies up to this length are read on the loop, at once: 4 ms at worst. A thread would cost 0.1 ms."""
INLINE_ITEMS: Final = 2**11
"""The same of lists that are gone through."""
INLINE_TOKENS: Final = 64
"""The same of tokens with log-probabilities: each may name twenty others."""
ITEMS_AT_ONCE: Final = 2**8
"""Of a list that is written as JSON in one call."""

T = TypeVar("T")
_encode: Final = msgspec.json.Encoder().encode


async def off_loop(is_much: bool, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread if it is much."""
    return await asyncio.to_thread(work) if is_much else work()


class Long(msgspec.Struct):
    """Base of structs that hold lists as long as an answer."""


def encode_in_parts(content: Any) -> bytes:
    """What `msgspec.json.encode` gives, made by many short calls: for a thread beside the loop.

    Args:
        content: `Long` structs and objects are gone into, and their lists written piece by piece; what these hold is
            written many at a time, but for `Long` structs.
    """
    return b"".join(_parts(content))


async def large_json_response(
    content: Long | dict[str, Any] | list[Any], headers: dict[str, str] | None = None
) -> Response:
    """An answer that may be long, written beside the loop."""
    body = await asyncio.to_thread(encode_in_parts, content)
    return Response(body, headers=headers, media_type="application/json")


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, Long):
        opening = b"{"
        for name in content.__struct_encode_fields__:
            if (value := getattr(content, name)) is not msgspec.UNSET:
                yield opening + _encode(name) + b":"
                yield from _parts(value)
                opening = b","
        yield b"}"
    elif isinstance(content, dict) and any(isinstance(value, dict | list) for value in content.values()):
        opening = b"{"
        for name, value in content.items():
            yield opening + _encode(name) + b":"
            yield from _parts(value)
            opening = b","
        yield b"}"
    elif isinstance(content, list) and content:
        yield from _list_parts(content)
    else:
        yield _encode(content)


def _list_parts(items: list[Any]) -> Iterator[bytes]:
    opening = b"["
    step = 1 if isinstance(items[0], Long) or len(items) == 1 else ITEMS_AT_ONCE
    for start in range(0, len(items), step):
        yield opening
        if step == 1:
            yield from _parts(items[start])
        else:
            yield _encode(items[start : start + step])[1:-1]
        opening = b","
    yield b"]"
