"""Reads a request body: limits its size, decodes it strictly, and checks unsupported fields. Decoding cannot be
interrupted, so a body with too many values is refused before it is decoded. A field that the body's struct lacks is
refused if it might change the response, else named in the header `x-ignored-parameters`. A null counts as absent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelNotFoundError, RequestError, RequestTimeoutError, RequestTooLargeError, shorten
from llm_serving.server.parsing.offload import INLINE_BYTES
from llm_serving.server.parsing.unsupported_fields import ANY_OTHER, UNKNOWN, UNSUPPORTED, IgnoredField, RefusedField
from llm_serving.server.request_context import request_context_of

MAX_VALUES: Final = 2**19
"""Maximum number of values, enough for the token ids of a batch of long prompts. Decoding them takes about 6 ms."""
MAX_TEXTS: Final = 2**16
"""Maximum number of strings, names included. Decoding them takes about 5 ms."""
MAX_CONTAINERS: Final = 2**15
"""Maximum number of lists, objects and keys together. Each takes about 0.5 us. 4,096 messages have fewer."""
MAX_DIGITS: Final = 64
"""Maximum number of digits in a number. The time to decode an integer grows with the square of its digits."""
MAX_ECHOED_BYTES: Final = 2**16
"""Maximum size of a body whose errors report the wrong value, for which it is decoded a second time."""
IGNORED_HEADER: Final = "x-ignored-parameters"
MAX_NAMED: Final = 20
MAX_NEUTRAL_BYTES: Final = 64
MAX_NAME_CHARS: Final = 60
EMPTY_BODIES: Final = (b"", b"{}", b"null")
ANY_MODEL: Final = "*"

_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"000000000")
_CUT_OFF: Final = "Input data was truncated"
_HALF_PAIR: Final = re.compile(r"(?:surrogate pair|end of hex escape) \((byte \d+)\)")
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
"""A part of a path: the name of a field, or the index of an item."""
_HEADER_NAME: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}")

T = TypeVar("T")
_Object = dict[str, msgspec.Raw]
_decode_object: Final = msgspec.json.Decoder(_Object).decode
_decode_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def read_fields(engine: AsyncEngine, http_request: Request, kind: type[T], *, strict: bool = True) -> T:
    """Return the request body as a struct, decoded outside the event loop if it is long. Store the names of ignored
    fields in the request's state. Raise ClientDisconnect, or RequestError, which names the invalid field or the limit.
    Raise ModelNotFoundError if the struct has a field `model` that names an unknown model.
    """
    body = await read_body(http_request, engine.config.serving)
    is_long = len(body) > INLINE_BYTES

    def decode() -> T:
        if is_long:
            check_json_limits(body)
        content = decode_body(body, kind, strict=strict)
        check_other_fields(http_request, kind, body)
        return content

    content = await asyncio.to_thread(decode) if is_long else decode()
    check_model(engine, getattr(content, "model", None))
    return content


async def read_body(request: Request, limits: ServerConfig) -> bytes:
    """Return the complete body. Raise ClientDisconnect, RequestTooLargeError or RequestTimeoutError."""
    max_bytes = limits.max_request_body_bytes
    declared = request_context_of(request).headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise RequestTooLargeError("body", f"must be at most {max_bytes} bytes")
    body = bytearray()  # not a list of chunks, in which a chunk of one byte would take forty bytes
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


async def check_no_body(request: Request, limits: ServerConfig) -> None:
    body = (await read_body(request, limits)).strip()
    if body in EMPTY_BODIES:
        return
    try:
        fields = _decode_object(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("body", "must be empty: this route takes no body") from None
    for name, value in fields.items():
        if bytes(value) != b"null":
            raise RequestError(name[:64], "is not a parameter of this route, which takes no body")


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raise ModelNotFoundError unless `name` is absent, or is the served model, one of its aliases or an adapter."""
    served, aliases = engine.config.model.model_name, engine.config.model.model_aliases
    if name and name != served and name not in aliases and ANY_MODEL not in aliases:
        if name in (adapters := engine.adapters.by_name):
            return
        others = f", or an adapter: {', '.join(adapters)}" if adapters else ""
        rule = f"must be {served}, the model that is served, or one of its aliases{others}"
        raise ModelNotFoundError("model", rule, name)


def check_json_limits(body: bytes) -> None:
    """Raise RequestError, which names the limit, if a body would take long to decode. Do not check its syntax."""
    # This upper bound also counts commas inside strings. Most bodies are below it, so they need no exact count.
    if _num_structural(body) <= MAX_CONTAINERS and body.count(b'"') <= 2 * MAX_TEXTS and not _has_long_number(body):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote opens or closes a string
    if plain.count(b'"') > 2 * MAX_TEXTS:
        raise RequestError("body", f"must hold at most {MAX_TEXTS} strings and keys")
    outside = b'"'.join(plain.split(b'"')[::2])
    if _num_structural(outside) - outside.count(b",") > MAX_CONTAINERS:
        raise RequestError("body", f"must hold at most {MAX_CONTAINERS} lists, objects and keys")
    if outside.count(b",") >= MAX_VALUES:
        raise RequestError("body", f"must hold at most {MAX_VALUES} values")
    if _has_long_number(outside):
        raise RequestError("body", f"must hold numbers of at most {MAX_DIGITS} digits")


def _num_structural(text: bytes) -> int:
    return sum(map(text.count, (b"{", b"[", b":", b",")))


def _has_long_number(text: bytes) -> bool:
    return b"0" * (MAX_DIGITS + 1) in text.translate(_DIGITS_TO_ZERO)


def repeated_name(text: bytes, content: Mapping[str, msgspec.Raw]) -> str | None:
    """Return a name that occurs twice in the JSON object `text`, or None. Names in nested objects do not count."""
    # Each name is followed by a colon; all other colons are inside names and values.
    inside = sum(name.count(":") + bytes(value).count(b":") for name, value in content.items())
    if text.count(b":") <= len(content) + inside:
        return None
    return _first_repeated(text, only_outermost=True)


def _first_repeated(text: bytes, *, only_outermost: bool) -> str | None:
    repeated: str | None = None

    def check_names(pairs: list[tuple[str, Any]]) -> None:
        nonlocal repeated
        names = {name for name, _ in pairs}
        found = None if len(names) == len(pairs) else Counter(name for name, _ in pairs).most_common(1)[0][0]
        repeated = found if only_outermost or repeated is None else repeated

    try:
        json.loads(text, object_pairs_hook=check_names, parse_int=str, parse_float=str)
    except RecursionError:
        return None
    return repeated


def decode_body(body: bytes, kind: type[T], *, strict: bool = True) -> T:
    """Decode a JSON body. Raise RequestError, which names the wrong field. If not `strict`, accept "1" for 1."""
    try:
        return msgspec.json.decode(body, type=kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _field_error(body, str(error), kind) from None
    except RecursionError:
        raise RequestError("body", "is nested too deeply to be decoded") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError("body", f"must be valid JSON: {malformed(body, error)}") from None


def malformed(text: bytes, error: msgspec.DecodeError | UnicodeDecodeError | RecursionError) -> str:
    if str(error) == _CUT_OFF:
        try:
            msgspec.json.decode(text + b" " * len(rb"\udc00"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
            error = reason
    half = _HALF_PAIR.search(str(error))
    return str(error) if half is None else f"half of a surrogate pair, which is no character, at {half[1]}"


def _field_error(body: bytes, message: str, kind: type) -> RequestError:
    """Convert msgspec's "Expected `int`, got `str` - at `$.messages[0].role`" to an error of that field."""
    rule, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".").partition("[...]")[0]  # msgspec does not report the names in a dict
    rule = rule[0].lower() + rule[1:]
    if missing := re.fullmatch(r"object missing required field `(.+)`", rule):
        return RequestError(".".join(filter(None, [path, missing[1]])), "is required")
    literals = _literals_at(kind, path) if rule.startswith("invalid enum value") else []
    rule = f"must be one of {', '.join(literals)}" if literals else f"is not valid: {rule}"
    return RequestError(path or "body", rule, *_value_at(body, path))


def _value_at(body: bytes, path: str) -> list[Any]:
    """Return the value of a field, or an empty list if there is none, or the body is large."""
    if not path or len(body) > MAX_ECHOED_BYTES:
        return []
    try:
        value = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[name] if name else value[int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return []
    return [value]


def _literals_at(kind: type, path: str) -> list[str]:
    """Return the values that the type of a field allows, or none if the type is no `Literal`."""
    *outer, last = [name for name, _ in _STEP.findall(path) if name]
    for name in outer:
        inner = fields_of(kind)[name]
        assert inner is not None
        kind = inner
    [hint] = [each.type for each in msgspec.structs.fields(kind) if each.encode_name == last]
    literals = [each for each in (hint, *get_args(hint)) if get_origin(each) is Literal]
    return sorted(str(value) for each in literals for value in get_args(each))


def check_other_fields(http_request: Request, kind: type, body: bytes) -> None:
    """Record ignored fields for `x-ignored-parameters`. Raise RequestError for refused fields and repeated names."""
    try:
        ignored = list(dict.fromkeys(_ignored(body, kind, "")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # in an unsupported field
        raise RequestError("body", f"must be valid JSON: {shorten(malformed(body, error))}") from None
    if ignored:
        shown = [name for name in ignored if _HEADER_NAME.fullmatch(name)][:MAX_NAMED]
        others = [f"and {len(ignored) - len(shown)} more"] if len(shown) < len(ignored) else []
        request_context_of(http_request).ignored_parameters = ", ".join([*shown, *others])


def note_ignored(http_request: Request, name: str) -> None:
    """Add a supported field to the header `x-ignored-parameters`, because it has no effect in this request."""
    context = request_context_of(http_request)
    before = context.ignored_parameters
    context.ignored_parameters = name if before is None else f"{before}, {name}"


@functools.cache
def fields_of(kind: type) -> Mapping[str, type | None]:
    """Return the fields of a struct: name -> struct of its object or of the objects in its list, or None."""

    def struct_in(kind: msgspec.inspect.Type) -> type | None:
        if isinstance(kind, msgspec.inspect.ListType):
            return struct_in(kind.item_type)
        if isinstance(kind, msgspec.inspect.UnionType):
            return next(filter(None, map(struct_in, kind.types)), None)
        return kind.cls if isinstance(kind, msgspec.inspect.StructType) else None

    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {each.encode_name: struct_in(each.type) for each in info.fields}


def _ignored(text: bytes, kind: type, path: str) -> list[str]:
    content = _decode_object(text)
    if text.count(b":") > len(content) and (repeated := repeated_name(text, content)) is not None:
        raise RequestError(path + repeated[:MAX_NAME_CHARS], "must be given once")
    fields, rules, ignored = fields_of(kind), UNSUPPORTED.get(kind, {}), []
    for name, raw in content.items():
        if name not in fields:
            rule = rules.get(name) or rules.get(ANY_OTHER, UNKNOWN)
            if _is_neutral(raw, rule):
                continue
            if isinstance(rule, RefusedField):
                close = get_close_matches(name[:MAX_NAME_CHARS], fields, 1) if rule is UNKNOWN else []
                hint = f"; did you mean `{close[0]}`?" if close else ""
                raise RequestError(path + name[:MAX_NAME_CHARS], rule.why + hint)
            ignored.append(name)
        elif (inner := fields[name]) is not None:
            ignored += _ignored_within(raw, inner, path + name)
        elif (
            bytes(memoryview(raw)[:1]) == b"{"
            and (repeated := _first_repeated(bytes(raw), only_outermost=False)) is not None
        ):
            raise RequestError(path + name, f"must not have the name {shorten(repeated)} twice")
    return ignored


def _ignored_within(raw: msgspec.Raw, kind: type, path: str) -> list[str]:
    begin = bytes(memoryview(raw)[:1])
    if begin == b"{":
        return _ignored(bytes(raw), kind, "" if path == "parameters" else f"{path}.")
    if begin == b"[":
        items = enumerate(_decode_items(raw))
        return [name for i, each in items for name in _ignored_within(each, kind, f"{path}[{i}]")]
    return []


def _is_neutral(raw: msgspec.Raw, rule: RefusedField | IgnoredField) -> bool:
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # valid JSON without a Python value, such as 1e400
    if value is None:
        return True
    if value in ([], {}):
        return isinstance(rule, IgnoredField) or not rule.empty_asks
    # In Python, True == 1.
    return isinstance(rule, RefusedField) and any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in rule.neutral
    )
