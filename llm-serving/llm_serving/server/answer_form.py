"""The form that a request asks its answer to have: in the fields of several protocols, one of them at most."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from llm_serving.core.sampling_params import DEFAULTS, NOT_WITH_A_CONSTRAINT
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import CapacityError, RequestError
from llm_serving.server.fair_threads import FairThreads
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
"""Seconds that a form may wait to be compiled, and take."""
_COMPILING: Final = FairThreads(NUM_COMPILERS, "grammar")
"""Threads that compile: other work beside the event loop does not wait with them."""
MAX_TEXTS_OF_CHOICE: Final = 1024
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must be.

    Attributes:
        field: That asks for it, as the client wrote it.
        make: Makes the grammar, given what may stand between the parts of JSON where the request does not say; may take
            long, and raises GrammarError or RequestError.
        size: Bytes or characters of what it is made of, at least; may take long, as `make`.
        is_json: Whether something may stand between its parts.
        parts: What other fields ask for in it; the first that cannot be kept to alone is named.
    """

    field: str
    make: Callable[[str], Grammar]
    parts: Sequence[AnswerForm] = ()
    size: Callable[[], int] = lambda: 0
    is_json: bool = False


def asked_form(request: object, names: Mapping[str, str] | None = None) -> AnswerForm | None:
    """The form that a request asks for; None: any.

    Args:
        request: Struct with some of the fields below.
        names: Parameter -> field, where the protocol calls it something else.

    Raises:
        RequestError: It asks for several, for one of another make, or for what does not go with one.
    """
    forms = [
        form
        for name, read in _READERS.items()
        if (value := getattr(request, name, None)) is not None and (form := read(name, value, request)) is not None
    ]
    if len(forms) > 1:
        raise RequestError(forms[1].field, f"must not be given together with `{forms[0].field}`")
    _check_whitespace(request, forms, "guided_whitespace_pattern")
    if not forms:
        return None
    check_others(request, forms[0].field, names)
    return forms[0]


def check_others(request: object, field: str, names: Mapping[str, str] | None = None) -> None:
    """Raises RequestError where a request that is bound by a field asks for what does not go with that."""
    if getattr(request, "use_beam_search", None):
        raise RequestError(field, "is not supported with use_beam_search")
    for name in NOT_WITH_A_CONSTRAINT:
        other = (names or {}).get(name, name)
        value = getattr(request, other, None)
        if value and value != DEFAULTS[name]:
            raise RequestError(other, f"is not supported with `{field}`")


async def compiled(engine: AsyncEngine, form: AnswerForm | None, source: str) -> TokenConstraint | None:
    """What answers of a form must keep to, made beside the event loop; None: nothing.

    Args:
        engine: Has the tokens.
        form: That is asked for.
        source: Who answers for the request: each has a share of the time there is for this.

    Raises:
        RequestError: The form cannot be kept to; names its field and tells where.
        CapacityError: Other forms take all the time there is.
    """
    if form is None:
        return None
    if not engine.constraints.can_end:
        raise RequestError(form.field, "is not supported: the model has no token that ends an answer")
    try:
        async with asyncio.timeout(MAX_WAIT_S):  # `wait_for` and a name for the work would keep an error for a search
            return await asyncio.wrap_future(_COMPILING.submit(source, partial(_compile, engine, form)))
    except TimeoutError:
        raise CapacityError(
            f"`{form.field}` was not compiled within {MAX_WAIT_S:g} s: too many others are", MAX_WAIT_S
        ) from None


def text_of(constraint: TokenConstraint | None) -> str | None:
    """The parameter of sampling that stands for a constraint."""
    return None if constraint is None else constraint.grammar.text


def _compile(engine: AsyncEngine, form: AnswerForm) -> TokenConstraint:
    compiler = engine.constraints
    try:
        compiler.check_size(form.size())  # before much is made of it
        return compiler.compiled(form.make(json_whitespace(engine)))
    except GrammarError as error:
        for part in form.parts:
            _compile(engine, part)
        raise RequestError(form.field, str(error)) from None


def json_whitespace(engine: AsyncEngine) -> str:
    """What may stand between the parts of JSON where a request does not say."""
    return WHITESPACES[engine.config.serving.json_whitespace]


# --- what each field holds --------------------------------------------------------------------------------------------

_Read = Callable[[str, Any, object], AnswerForm | None]


def _whitespace(request: object) -> str | None:
    return getattr(request, "guided_whitespace_pattern", None)


def _check_whitespace(request: object, forms: Sequence[AnswerForm], field: str) -> None:
    if _whitespace(request) is not None and not any(form.is_json for form in forms):
        raise RequestError(field, "must be given with a form of JSON only")


def _schema(field: str, value: Any, request: object) -> AnswerForm:
    """A JSON schema, as an object or as its text."""
    if not isinstance(value, dict | str):
        raise RequestError(field, "must be a JSON schema, an object", value)
    given = _whitespace(request)

    def make(whitespace: str) -> Grammar:
        return json_grammar(_text(field, value), whitespace if given is None else given)

    return AnswerForm(field, make, size=lambda: _size(value), is_json=True)


def _text(field: str, schema: Any) -> str:
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


def _size(schema: Any) -> int:
    """Of its text, which this writes in a tenth of the time."""
    if isinstance(schema, str):
        return len(schema)
    try:
        return len(msgspec.json.encode(schema))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None


def _any_object(field: str, value: Any, request: object) -> AnswerForm | None:
    if not isinstance(value, bool):
        raise RequestError(field, "must be true or false", value)
    return _schema(field, _ANY_OBJECT, request) if value else None


def _regex(field: str, value: Any, request: object) -> AnswerForm:
    del request
    text = _not_empty(field, value)
    return AnswerForm(field, lambda _: regex_grammar(text), size=lambda: len(text))


def _grammar(field: str, value: Any, request: object) -> AnswerForm:
    del request
    text = _not_empty(field, value)
    return AnswerForm(field, lambda _: any_grammar(text), size=lambda: len(text))


def _choice(field: str, value: Any, request: object) -> AnswerForm:
    del request
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TEXTS_OF_CHOICE:
        raise RequestError(field, f"must hold 1 to {MAX_TEXTS_OF_CHOICE} texts")
    if not all(isinstance(each, str) and each for each in value):
        raise RequestError(field, "must hold texts, none of them empty")
    texts = list(dict.fromkeys(value))
    return AnswerForm(field, lambda _: choice_grammar(texts), size=lambda: sum(map(len, texts)))


def _not_empty(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(field, "must be a text that is not empty", value)
    return value


def _response_format(field: str, value: Any, request: object) -> AnswerForm | None:
    """OpenAI's: `{"type": "text" | "json_object" | "json_schema", ...}`; the schema stands in `json_schema.schema`."""
    kind = _kind(field, value, ("text", "json_object", "json_schema"))
    known = {"text": ("type",), "json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
    refuse_others(field, value, known[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        given = value.get("schema")
        return _any_object(field, True, request) if given is None else _schema(f"{field}.schema", given, request)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise RequestError(f"{field}.json_schema", "must be an object with a `schema`", inner)
    refuse_others(f"{field}.json_schema", inner, ("name", "description", "schema", "strict"))
    _check_texts(f"{field}.json_schema", inner, ("name", "description"))
    if not isinstance(inner.get("strict"), bool | None):
        raise RequestError(f"{field}.json_schema.strict", "must be true or false", inner["strict"])
    return _schema(f"{field}.json_schema.schema", inner.get("schema"), request)


def _structured_outputs(field: str, value: Any, request: object) -> AnswerForm | None:
    """vLLM's: one of the keys below, each as the field `guided_...` of that name."""
    if not isinstance(value, dict):
        raise RequestError(field, "must be an object", value)
    readers: dict[str, _Read] = {
        "json": _schema, "json_object": _any_object, "regex": _regex, "choice": _choice, "grammar": _grammar,
    }  # fmt: skip
    spaces = _WithWhitespace(value.get("whitespace_pattern"))
    refuse_others(field, value, (*readers, "whitespace_pattern"))
    forms = [
        form
        for name, read in readers.items()
        if value.get(name) is not None and (form := read(f"{field}.{name}", value[name], spaces)) is not None
    ]
    if len(forms) != 1:
        raise RequestError(field, f"must have one of {', '.join(readers)}")
    _check_whitespace(spaces, forms, f"{field}.whitespace_pattern")
    return forms[0]


@dataclass(frozen=True)
class _WithWhitespace:
    guided_whitespace_pattern: str | None


def _tgi_grammar(field: str, value: Any, request: object) -> AnswerForm:
    """TGI's: `{"type": "json" | "regex" | "json_schema", "value": ...}`."""
    kind = _kind(field, value, ("json", "regex", "json_schema"))
    refuse_others(field, value, ("type", "value"))
    given = value.get("value")
    if kind == "regex":
        return _regex(f"{field}.value", given, request)
    if kind == "json":
        return _schema(f"{field}.value", given, request)
    if not isinstance(given, dict):
        raise RequestError(f"{field}.value", "must be an object with a `schema`", given)
    refuse_others(f"{field}.value", given, ("name", "schema"))
    _check_texts(f"{field}.value", given, ("name",))
    return _schema(f"{field}.value.schema", given.get("schema"), request)


def _kind(field: str, value: Any, kinds: tuple[str, ...]) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in kinds:
        raise RequestError(f"{field}.type", f"must be one of {', '.join(kinds)}", kind)
    return str(kind)


def _check_texts(field: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(value.get(name), str | None):
            raise RequestError(f"{field}.{name}", "must be text", value[name])


def refuse_others(field: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises RequestError: what is not known and asks for something might change the answer."""
    for name in _others(value, known):
        raise RequestError(f"{field}.{name[:60]}", f"is not supported; known are {', '.join(known)}")


def _others(value: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[str]:
    return (name for name, given in value.items() if name not in known and given not in (None, False))


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
"""Field -> what it asks for."""
