"""Reads structured output from the fields of several protocols, and compiles it to a constraint on tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from llm_serving.core.sampling_params import DEFAULTS, NOT_WITH_A_CONSTRAINT
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import CapacityError, RequestError
from llm_serving.server.parsing.offload import FairThreads
from llm_serving.text.structured_output import Grammar, GrammarError, TokenConstraint
from llm_serving.text.structured_output.grammars import (
    WHITESPACES,
    any_grammar,
    choice_grammar,
    json_grammar,
    regex_grammar,
)

NUM_COMPILERS: Final = 2
MAX_WAIT_S: Final = 10.0
"""Maximum seconds to compile a grammar, including the time in the queue."""
_COMPILING: Final = FairThreads(NUM_COMPILERS, "grammar")
MAX_GUIDED_CHOICES: Final = 1024
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar for the text of an output, not yet compiled. The request's field `field` asks for it."""

    field: str
    make: Callable[[str], Grammar]
    """Returns the grammar, given the default whitespace in JSON. Slow. Raises GrammarError or RequestError."""
    parts: Sequence[StructuredOutput] = ()
    """The outputs that this one combines. If it cannot be compiled, each is compiled to find the one that fails."""
    size: Callable[[], int] = lambda: 0
    """Returns a lower bound of the size of the grammar's source. Slow, but faster than `make`."""
    is_json: bool = False
    """Whether the output is JSON, so that the request may choose its whitespace."""


def structured_output_of(request: object, names: Mapping[str, str] | None = None) -> StructuredOutput | None:
    """Return the structured output that a request asks for. Return None if any text is allowed."""
    whitespace = getattr(request, "guided_whitespace_pattern", None)
    found = []
    for name, read in _READERS.items():
        value = getattr(request, name, None)
        if value is not None and (output := read(name, value, whitespace)) is not None:
            found.append(output)
    if len(found) > 1:
        raise RequestError(found[1].field, f"must not be given together with `{found[0].field}`")
    if whitespace is not None:
        _check_whitespace(found, "guided_whitespace_pattern")
    if not found:
        return None
    check_compatible(request, found[0].field, names)
    return found[0]


def check_compatible(request: object, field: str, names: Mapping[str, str] | None = None) -> None:
    """Raise RequestError if a request has a parameter that cannot be combined with structured output. `field` is the
    field that asks for structured output. `names` maps parameters to the protocol's field names where these differ.
    """
    if getattr(request, "use_beam_search", None):
        raise RequestError(field, "is not supported with use_beam_search")
    for name in NOT_WITH_A_CONSTRAINT:
        other = (names or {}).get(name, name)
        value = getattr(request, other, None)
        if value and value != DEFAULTS[name]:
            raise RequestError(other, f"is not supported with `{field}`")


async def compile_constraint(engine: AsyncEngine, output: StructuredOutput, source: str) -> TokenConstraint:
    """Compile a structured output in a thread. Clients, identified by `source`, share the compiler threads fairly."""
    if not engine.constraints.can_end:
        raise RequestError(output.field, "is not supported: the model has no token that ends an answer")
    try:
        async with asyncio.timeout(MAX_WAIT_S):  # not `wait_for`: it leaves a reference cycle with the error
            return await asyncio.wrap_future(_COMPILING.submit(source, partial(_compile, engine, output)))
    except TimeoutError:
        raise CapacityError(
            f"`{output.field}` was not compiled within {MAX_WAIT_S:g} s: the grammar compilers are busy. Retry later",
            MAX_WAIT_S,
        ) from None


def _compile(engine: AsyncEngine, output: StructuredOutput) -> TokenConstraint:
    compiler = engine.constraints
    try:
        compiler.check_size(output.size())  # checked first, because making the grammar costs more
        return compiler.compiled(output.make(json_whitespace(engine)))
    except GrammarError as error:
        for part in output.parts:
            _compile(engine, part)
        raise RequestError(output.field, str(error)) from None


def json_whitespace(engine: AsyncEngine) -> str:
    """Return the configured whitespace that JSON output may contain, as a regular expression."""
    return WHITESPACES[engine.config.serving.json_whitespace]


# --- reading each field -----------------------------------------------------------------------------------------------

_Read = Callable[[str, Any, str | None], StructuredOutput | None]
"""(field name, value, whitespace pattern of the request) -> structured output, or None if any text is allowed."""


def _check_whitespace(found: Sequence[StructuredOutput], field: str) -> None:
    if not any(output.is_json for output in found):
        raise RequestError(field, "is allowed only if the structured output is JSON")


def _schema(field: str, value: Any, whitespace: str | None) -> StructuredOutput:
    if not isinstance(value, dict | str):
        raise RequestError(field, "must be a JSON schema, an object", value)

    def make(default: str) -> Grammar:
        return json_grammar(_schema_text(field, value), default if whitespace is None else whitespace)

    return StructuredOutput(field, make, size=lambda: _schema_size(value), is_json=True)


def _schema_text(field: str, schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (ValueError, RecursionError):
            raise RequestError(field, "must be a JSON schema: its text is not JSON") from None
    if not isinstance(schema, dict):
        raise RequestError(field, "must be a JSON schema, an object", schema)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise GrammarError("is nested too deeply") from None


def _schema_size(schema: Any) -> int:
    if isinstance(schema, str):
        return len(schema)
    try:
        return len(msgspec.json.encode(schema))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None


def _any_object(field: str, value: Any, whitespace: str | None) -> StructuredOutput | None:
    if not isinstance(value, bool):
        raise RequestError(field, "must be true or false", value)
    return _schema(field, _ANY_OBJECT, whitespace) if value else None


def _text_grammar(make: Callable[[str], Grammar], field: str, value: Any, _: str | None) -> StructuredOutput:
    if not isinstance(value, str) or not value:
        raise RequestError(field, "must be a text that is not empty", value)
    return StructuredOutput(field, lambda _: make(value), size=lambda: len(value))


_regex: Final = partial(_text_grammar, regex_grammar)
_grammar: Final = partial(_text_grammar, any_grammar)


def _choice(field: str, value: Any, _: str | None) -> StructuredOutput:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_GUIDED_CHOICES:
        raise RequestError(field, f"must hold 1 to {MAX_GUIDED_CHOICES} texts")
    if not all(isinstance(each, str) and each for each in value):
        raise RequestError(field, "must hold texts, none of them empty")
    texts = list(dict.fromkeys(value))
    return StructuredOutput(field, lambda _: choice_grammar(texts), size=lambda: sum(map(len, texts)))


def _response_format(field: str, value: Any, whitespace: str | None) -> StructuredOutput | None:
    kind = _kind(field, value, ("text", "json_object", "json_schema", "json", "regex"))
    if kind in ("json", "regex"):
        return _tgi_grammar(field, value, whitespace)
    if kind == "json_object" and value.get("value") is not None:
        return _tgi_grammar(field, {**value, "type": "json"}, whitespace)
    known = {"text": ("type",), "json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
    refuse_unknown_keys(field, value, known[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        given = value.get("schema")
        return _any_object(field, True, whitespace) if given is None else _schema(f"{field}.schema", given, whitespace)
    field, inner = f"{field}.json_schema", value.get("json_schema")
    if not isinstance(inner, dict):
        raise RequestError(field, "must be an object with a `schema`", inner)
    refuse_unknown_keys(field, inner, ("name", "description", "schema", "strict"))
    _check_texts(field, inner, ("name", "description"))
    if not isinstance(inner.get("strict"), bool | None):
        raise RequestError(f"{field}.strict", "must be true or false", inner["strict"])
    return _schema(f"{field}.schema", inner.get("schema"), whitespace)


def _structured_outputs(field: str, value: Any, _: str | None) -> StructuredOutput | None:
    """Read vLLM's `structured_outputs`. Its key `regex` means the same as the field `guided_regex`, and so on."""
    if not isinstance(value, dict):
        raise RequestError(field, "must be an object", value)
    readers: dict[str, _Read] = {
        "json": _schema, "json_object": _any_object, "regex": _regex, "choice": _choice, "grammar": _grammar,
    }  # fmt: skip
    whitespace = value.get("whitespace_pattern")
    refuse_unknown_keys(field, value, (*readers, "whitespace_pattern"))
    _check_texts(field, value, ("whitespace_pattern",))
    found = [
        output
        for name, read in readers.items()
        if value.get(name) is not None and (output := read(f"{field}.{name}", value[name], whitespace)) is not None
    ]
    if len(found) != 1:
        raise RequestError(field, f"must have exactly one of the keys {', '.join(readers)}")
    if whitespace is not None:
        _check_whitespace(found, f"{field}.whitespace_pattern")
    return found[0]


def _tgi_grammar(field: str, value: Any, whitespace: str | None) -> StructuredOutput | None:
    """Read a grammar in TGI's format: `{"type": "json" | "json_object" | "regex" | "json_schema", "value": ...}`."""
    kind = _kind(field, value, ("json", "json_object", "regex", "json_schema"))
    refuse_unknown_keys(field, value, ("type", "value"))
    field, given = f"{field}.value", value.get("value")
    if kind == "regex":
        return _regex(field, given, whitespace)
    if kind in ("json", "json_object"):
        return _schema(field, given, whitespace)
    if not isinstance(given, dict):
        raise RequestError(field, "must be an object with a `schema`", given)
    refuse_unknown_keys(field, given, ("name", "schema"))
    _check_texts(field, given, ("name",))
    return _schema(f"{field}.schema", given.get("schema"), whitespace)


def _kind(field: str, value: Any, kinds: tuple[str, ...]) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in kinds:
        raise RequestError(f"{field}.type", f"must be one of {', '.join(kinds)}", kind)
    return str(kind)


def _check_texts(field: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(value.get(name), str | None):
            raise RequestError(f"{field}.{name}", "must be text", value[name])


def refuse_unknown_keys(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise RequestError for an unknown key that is neither null nor false, because it might change the response."""
    for name, given in value.items():
        if name not in known and given not in (None, False):
            raise RequestError(f"{field}.{name[:60]}", f"is not supported; the supported keys are {', '.join(known)}")


_READERS: Final[Mapping[str, _Read]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
    "grammar": _tgi_grammar,
}
