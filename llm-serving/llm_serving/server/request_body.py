"""Reading a request body: size limited while it arrives, JSON strict, errors that name field, rule and value."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import RequestError, RequestTimeoutError, RequestTooLargeError
from llm_serving.server.body_census import check_census
from llm_serving.server.off_loop import INLINE_BYTES, off_loop

MAX_ECHOED_BYTES: Final = 2**16
"""Of longer bodies an error does not tell the value: they would be read a second time for it."""

_CUT_OFF: Final = "Input data was truncated"
_HALF_PAIR: Final = re.compile(r"(?:surrogate pair|end of hex escape) \((byte \d+)\)")
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
"""Of a path: the name of a field, or the place of an item."""

T = TypeVar("T")


async def read_body(request: Request, limits: ServerConfig) -> bytes:
    """The whole body.

    Raises:
        RequestTooLargeError: It is longer than `max_request_body_bytes`; noticed before it is all read.
        RequestTimeoutError: It did not arrive within `body_timeout_s`.
        ClientDisconnect: The client left before.
    """
    max_bytes = limits.max_request_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise RequestTooLargeError("body", f"must be at most {max_bytes} bytes")
    body = bytearray()  # not a list of pieces: a piece of one byte would take forty
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = message.get("body", b""), message.get("more_body", False)
                if len(body) + len(chunk) > max_bytes:
                    raise RequestTooLargeError("body", f"must be at most {max_bytes} bytes")
                body += chunk
    except TimeoutError:
        raise RequestTimeoutError("body", f"must arrive within {limits.body_timeout_s:g} seconds") from None
    return bytes(body)


async def read_as(
    request: Request,
    limits: ServerConfig,
    kind: type[T],
    *,
    strict: bool = True,
    check: Callable[[bytes], None] | None = None,
) -> T:
    """The body as a `kind`, as `read_body` and `decode_body` read it; beside the event loop where it is long.

    Args:
        request: The request.
        limits: Of its size and time.
        kind: A msgspec Struct.
        strict: Do not read numbers and booleans out of strings.
        check: What else the body has to pass, once it is known to be a `kind`.

    Raises:
        RequestError: Names the field that is wrong, or what the body has too much of.
        ClientDisconnect: The client left before.
    """
    body = await read_body(request, limits)
    is_long = len(body) > INLINE_BYTES

    def decode() -> T:
        if is_long:
            check_census(body)
        content = decode_body(body, kind, strict=strict)
        if check is not None:
            check(body)
        return content

    return await off_loop(is_long, decode)


def decode_body(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    """The body as a `kind`.

    Args:
        body: JSON. NaN, Infinity, invalid UTF-8, lone surrogates and deep nesting are refused.
        kind: A msgspec Struct.
        strict: Do not read numbers and booleans out of strings.

    Raises:
        RequestError: Names the field that is wrong and the value it has.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _field_error(body, str(error), kind) from None
    except RecursionError:
        raise RequestError("body", "must not be nested so deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError("body", f"must be valid JSON: {malformed(body, error)}") from None


def malformed(text: bytes, error: msgspec.DecodeError | UnicodeDecodeError | RecursionError) -> str:
    """What is wrong with a JSON text, by the error that it gave.

    Half a surrogate pair is told as that. Where it stands in the last six bytes, in which the other half would have
    room, msgspec takes the text for one that is cut off: so it is read again with six more.
    """
    if str(error) == _CUT_OFF:
        try:
            msgspec.json.decode(text + b" " * len(rb"\udc00"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
            error = reason
    half = _HALF_PAIR.search(str(error))
    return str(error) if half is None else f"half of a surrogate pair, which is no character, at {half[1]}"


def _field_error(body: bytes, message: str, kind: type) -> RequestError:
    """`Expected `int`, got `str` - at `$.messages[0].role`` as an error of that field."""
    rule, _, place = message.partition(" - at `$")
    place = place.rstrip("`").lstrip(".").partition("[...]")[0]  # names of an object that has any are not told
    rule = rule[0].lower() + rule[1:]
    if missing := re.fullmatch(r"object missing required field `(.+)`", rule):
        return RequestError(".".join(filter(None, [place, missing[1]])), "is required")
    found, value = _value_at(body, place)
    words = _words_at(kind, place) if rule.startswith("invalid enum value") else []
    rule = f"must be one of {', '.join(words)}" if words else f"is not valid: {rule}"
    return RequestError(place or "body", rule, *([value] if found else []))


def _value_at(body: bytes, place: str) -> tuple[bool, Any]:
    """The value at a path such as `messages[0].role`; False where the path cannot be followed."""
    if len(body) > MAX_ECHOED_BYTES:
        return False, None
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(place):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return False, None
    return bool(place), value


def _words_at(kind: type, place: str) -> list[str]:
    """The words among which the field at a path must be."""
    types = _alternatives(msgspec.inspect.type_info(kind))
    for name, _ in _STEP.findall(place):
        types = [inner for each in types for inner in _within(each, name)]
    return sorted(
        {str(word) for each in types if isinstance(each, msgspec.inspect.LiteralType) for word in each.values}
    )


def _within(kind: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """What a field of an object may be; without a name, what an item of a list may be."""
    if not name and isinstance(kind, msgspec.inspect.ListType):
        return _alternatives(kind.item_type)
    if isinstance(kind, msgspec.inspect.StructType):
        return [inner for each in kind.fields if each.encode_name == name for inner in _alternatives(each.type)]
    return []


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]
