"""Reading a request body: limit its size while it arrives, check limits on its JSON, decode it strictly, name the wrong
field in errors.

Decoding JSON is one uninterruptible call: while it runs, no other request is served. Its cost depends on the number of
values rather than of bytes: an empty list costs as much as a hundred letters. So the values are counted first, in calls
that are short for any input.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import RequestError, RequestTimeoutError, RequestTooLargeError
from llm_serving.server.parsing.offload import INLINE_BYTES, off_loop

MAX_VALUES: Final = 2**19
"""Most values of any kind, enough for the token ids of a batch of long prompts. Decoding so many takes about 6 ms."""
MAX_TEXTS: Final = 2**16
"""Most strings, names included: about 5 ms."""
MAX_CONTAINERS: Final = 2**15
"""Most lists, objects and names together, each at most about 0.5 microseconds; 4,096 messages in parts have fewer."""
MAX_DIGITS: Final = 64
"""Most digits of a number: the time to decode an integer grows with their square."""

_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"000000000")


def check_json_limits(body: bytes) -> None:
    """Refuse a body that would take long to decode; malformed JSON may pass.

    Raises:
        RequestError: Names the limit that the body exceeds.
    """
    # An upper bound, which counts commas inside strings too, settles most bodies.
    if _num_structural(body) <= MAX_CONTAINERS and body.count(b'"') <= 2 * MAX_TEXTS and not _has_long_number(body):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left opens or closes a string
    if plain.count(b'"') > 2 * MAX_TEXTS:
        raise RequestError("body", f"must hold at most {MAX_TEXTS} texts and names")
    outside = b'"'.join(plain.split(b'"')[::2])
    if _num_structural(outside) - outside.count(b",") > MAX_CONTAINERS:
        raise RequestError("body", f"must hold at most {MAX_CONTAINERS} lists, objects and names")
    if outside.count(b",") >= MAX_VALUES:
        raise RequestError("body", f"must hold at most {MAX_VALUES} values")
    if _has_long_number(outside):
        raise RequestError("body", f"must hold numbers of at most {MAX_DIGITS} digits")


def _num_structural(text: bytes) -> int:
    return sum(map(text.count, (b"{", b"[", b":", b",")))


def _has_long_number(text: bytes) -> bool:
    return b"0" * (MAX_DIGITS + 1) in text.translate(_DIGITS_TO_ZERO)


def repeated_name(text: bytes, content: Mapping[str, msgspec.Raw]) -> str | None:
    """Return a name that an object has twice, nested objects aside; None: there is none.

    Args:
        text: The object as JSON.
        content: The decoded object.
    """
    # Each name is followed by a colon; all other colons are inside names and values.
    inside = sum(name.count(":") + bytes(value).count(b":") for name, value in content.items())
    if text.count(b":") <= len(content) + inside:
        return None
    return _first_repeated(text, only_outermost=True)


def repeated_name_within(text: bytes) -> str | None:
    """Return a name that an object, or an object nested in it, has twice; None: there is none."""
    return _first_repeated(text, only_outermost=False)


def _first_repeated(text: bytes, *, only_outermost: bool) -> str | None:
    repeated: str | None = None

    def check_names(pairs: list[tuple[str, Any]]) -> None:
        """Called for each object, the outermost last."""
        nonlocal repeated
        names = {name for name, _ in pairs}
        found = None if len(names) == len(pairs) else Counter(name for name, _ in pairs).most_common(1)[0][0]
        repeated = found if only_outermost or repeated is None else repeated

    try:
        json.loads(text, object_pairs_hook=check_names, parse_int=str, parse_float=str)
    except RecursionError:
        return None
    return repeated


MAX_ECHOED_BYTES: Final = 2**16
"""Longest body whose errors report the wrong value, because that takes decoding it a second time."""

_CUT_OFF: Final = "Input data was truncated"
_HALF_PAIR: Final = re.compile(r"(?:surrogate pair|end of hex escape) \((byte \d+)\)")
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
"""A step of a path: the name of a field, or the index of an item."""

T = TypeVar("T")


async def read_body(request: Request, limits: ServerConfig) -> bytes:
    """Return the whole body.

    Raises:
        RequestTooLargeError: It is longer than `max_request_body_bytes`; raised before all of it has been read.
        RequestTimeoutError: It did not arrive within `body_timeout_s`.
        ClientDisconnect: The client disconnected.
    """
    max_bytes = limits.max_request_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise RequestTooLargeError("body", f"must be at most {max_bytes} bytes")
    body = bytearray()  # not a list of chunks: a chunk of one byte would take forty bytes
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
    """Read and decode the body as a `kind`; decode a long one off the event loop.

    Args:
        request: The request.
        limits: Limits of size and time.
        kind: A msgspec Struct.
        strict: Do not convert strings to numbers and booleans.
        check: A further check of the body, once it has been decoded.

    Raises:
        RequestError: Names the field that is wrong, or the limit that the body exceeds.
        ClientDisconnect: The client disconnected.
    """
    body = await read_body(request, limits)
    is_long = len(body) > INLINE_BYTES

    def decode() -> T:
        if is_long:
            check_json_limits(body)
        content = decode_body(body, kind, strict=strict)
        if check is not None:
            check(body)
        return content

    return await off_loop(is_long, decode)


def decode_body(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    """Decode a body as a `kind`.

    Args:
        body: JSON. NaN, Infinity, invalid UTF-8, lone surrogates and deep nesting are refused.
        kind: A msgspec Struct.
        strict: Do not convert strings to numbers and booleans.

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
    """Return what is wrong with a JSON text, given the error of decoding it.

    A lone surrogate is reported as such. In the last six bytes, where its other half could follow, msgspec reports a
    truncated text instead; so decode it again with six bytes more.
    """
    if str(error) == _CUT_OFF:
        try:
            msgspec.json.decode(text + b" " * len(rb"\udc00"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
            error = reason
    half = _HALF_PAIR.search(str(error))
    return str(error) if half is None else f"half of a surrogate pair, which is no character, at {half[1]}"


def _field_error(body: bytes, message: str, kind: type) -> RequestError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.messages[0].role`" into an error of that field."""
    rule, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".").partition("[...]")[0]  # msgspec does not report the names in a dict
    rule = rule[0].lower() + rule[1:]
    if missing := re.fullmatch(r"object missing required field `(.+)`", rule):
        return RequestError(".".join(filter(None, [path, missing[1]])), "is required")
    found, value = _value_at(body, path)
    literals = _literals_at(kind, path) if rule.startswith("invalid enum value") else []
    rule = f"must be one of {', '.join(literals)}" if literals else f"is not valid: {rule}"
    return RequestError(path or "body", rule, *([value] if found else []))


def _value_at(body: bytes, path: str) -> tuple[bool, Any]:
    """Return whether a path such as `messages[0].role` leads to a value, and the value."""
    if len(body) > MAX_ECHOED_BYTES:
        return False, None
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return False, None
    return bool(path), value


def _literals_at(kind: type, path: str) -> list[str]:
    """Return the values that the field at a path may have, if its type lists them."""
    types = _alternatives(msgspec.inspect.type_info(kind))
    for name, _ in _STEP.findall(path):
        types = [inner for each in types for inner in _within(each, name)]
    return sorted(
        {str(value) for each in types if isinstance(each, msgspec.inspect.LiteralType) for value in each.values}
    )


def _within(kind: msgspec.inspect.Type, name: str) -> list[msgspec.inspect.Type]:
    """Return the types of a field of an object; without a name, those of an item of a list."""
    if not name and isinstance(kind, msgspec.inspect.ListType):
        return _alternatives(kind.item_type)
    if isinstance(kind, msgspec.inspect.StructType):
        return [inner for each in kind.fields if each.encode_name == name for inner in _alternatives(each.type)]
    return []


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]
