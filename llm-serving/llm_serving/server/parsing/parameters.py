"""Reading the fields of request bodies: what is refused, and what is ignored.

Supported fields stand in the structs of the bodies, and rules of sampling parameters in `core.sampling_params`. An
unsupported field that might change a response is refused by name; one that cannot is ignored and named in the header
`x-ignored-parameters` of the response. An unknown field might change a response, so it is refused, as OpenAI does: a
misspelt `temprature` must not pass for the default. Only the older routes, which never refused a field, ignore it. A
field that is null counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError, shorten
from llm_serving.server.batches.schemas import BatchRequest
from llm_serving.server.parsing.body import malformed, read_as, repeated_name, repeated_name_within
from llm_serving.server.parsing.unsupported_fields import BodyFields, IgnoredField, RefusedField
from llm_serving.server.protocols import text_schemas
from llm_serving.server.protocols.anthropic import schemas as anthropic_schemas
from llm_serving.server.protocols.openai import responses_schemas, vector_schemas
from llm_serving.server.protocols.openai import unsupported_fields as openai_fields

T = TypeVar("T")
IGNORED_HEADER: Final = "x-ignored-parameters"
MAX_NAMED: Final = 20
"""Most fields that the header names."""
MAX_NEUTRAL_BYTES: Final = 64
"""Longest value that may be neutral."""
MAX_NAME_CHARS: Final = 60

BODIES: Final[Mapping[type, BodyFields]] = {
    **openai_fields.UNSUPPORTED,
    **responses_schemas.UNSUPPORTED,
    **vector_schemas.UNSUPPORTED,
    **anthropic_schemas.UNSUPPORTED,
    **text_schemas.UNSUPPORTED,
    BatchRequest: BodyFields({"output_expires_after": RefusedField()}),
}
"""Struct of a body, or of a part of one -> its unsupported fields."""

_Object = dict[str, msgspec.Raw]
_decode_object: Final = msgspec.json.Decoder(_Object).decode
_decode_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_names: Final = {kind: frozenset(each.encode_name for each in msgspec.structs.fields(kind)) for kind in BODIES}
_HEADER_NAME: Final = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME_CHARS}}}")


async def read_fields(engine: AsyncEngine, http_request: Request, kind: type[T], *, strict: bool = True) -> T:
    """Read the body of a request and check its unsupported fields; decode a long one off the event loop.

    Args:
        engine: Its configuration limits the size.
        http_request: The request; its state keeps the ignored fields.
        kind: Struct of the body.
        strict: Do not convert strings to numbers and booleans.

    Raises:
        RequestError: Names the field that is wrong or unsupported, or the limit that the body exceeds.
    """
    limits = engine.config.serving
    return await read_as(
        http_request, limits, kind, strict=strict, check=partial(check_other_fields, http_request, kind)
    )


def check_other_fields(http_request: Request, kind: type, body: bytes) -> None:
    """Refuse the first unsupported field of a valid body that would change the response; note the ignored ones.

    Raises:
        RequestError: Names the field.
    """
    try:
        ignored = list(dict.fromkeys(_ignored(body, kind, "")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # in an unsupported field
        raise RequestError("body", f"must be valid JSON: {shorten(malformed(body, error))}") from None
    if ignored:
        shown = [name for name in ignored if _HEADER_NAME.fullmatch(name)][:MAX_NAMED]
        others = [f"and {len(ignored) - len(shown)} more"] if len(shown) < len(ignored) else []
        http_request.state.ignored_parameters = ", ".join([*shown, *others])


def note_ignored(http_request: Request, name: str) -> None:
    """Name a supported field too in the header of the response, because this request makes it ineffective."""
    http_request.state.ignored_parameters = ", ".join(filter(None, [ignored_parameters(http_request), name]))


def ignored_parameters(http_request: Request) -> str | None:
    """Return the value of the header that names ignored fields; None: no field was ignored."""
    return getattr(http_request.state, "ignored_parameters", None)


def _ignored(text: bytes, kind: type, path: str) -> list[str]:
    content = _decode_object(text)
    if (repeated := repeated_name(text, content)) is not None:
        raise RequestError(path + repeated[:MAX_NAME_CHARS], "must be given once")
    fields, ignored = BODIES[kind], []
    for name, raw in content.items():
        if name in fields.nested:
            ignored += _ignored_within(raw, fields.nested[name], path + name)
        elif name not in _names[kind]:
            row = fields.rows.get(name, fields.unknown)
            if _is_neutral(raw, row):
                continue
            if isinstance(row, RefusedField):
                raise RequestError(path + name[:MAX_NAME_CHARS], row.why + _suggestion(name, kind, row))
            ignored.append(name)
        elif bytes(memoryview(raw)[:1]) == b"{" and (repeated := repeated_name_within(bytes(raw))) is not None:
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


def _is_neutral(raw: msgspec.Raw, row: RefusedField | IgnoredField) -> bool:
    if len(raw) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # valid JSON without a Python value, such as 1e400
    if value is None:
        return True
    if value in ([], {}):
        return isinstance(row, IgnoredField) or not row.empty_asks
    # In Python, True == 1.
    return isinstance(row, RefusedField) and any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in row.neutral
    )


def _suggestion(name: str, kind: type, row: RefusedField) -> str:
    if row is not BODIES[kind].unknown:
        return ""
    close = get_close_matches(name[:MAX_NAME_CHARS], _names[kind], 1)
    return f"; did you mean `{close[0]}`?" if close else ""
