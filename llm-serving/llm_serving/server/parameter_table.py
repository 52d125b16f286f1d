"""What a request may say: the table of parameters with their rules and defaults, and the classes there are."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from llm_serving.config.tables import ApiKey
from llm_serving.core import sampling_params
from llm_serving.core.request_class import class_of
from llm_serving.core.sampling_params import (
    DEFAULTS,
    RULES,
    Flag,
    ParameterRule,
    Real,
    SomeTokenIds,
    Texts,
    TokenIds,
    Whole,
)
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.caller import ceiling_of
from llm_serving.server.sampling import REQUEST_RULES
from llm_serving.server.schemas import ChatCompletionRequest, CompletionRequest


class Parameter(Struct, kw_only=True):
    """A parameter of sampling, as completions and conversations call it."""

    name: str
    kind: str
    """`integer`, `number`, `boolean`, `strings`, `token_ids`, or `other`."""
    default: Any
    """What a completion has that says nothing; null: nothing, or, of `seed`, one that is drawn."""
    chat_default: Any
    """The same of a conversation; null of `max_tokens`: as many as fit."""
    rule: str
    meaning: str
    minimum: float | int | None = None
    maximum: float | int | None = None
    completions: bool
    """Whether completions have it; the next one, whether conversations do."""
    chat: bool

    @property
    def is_sent(self) -> bool:
        """Whether a request may have it; what follows from other fields it has not."""
        return self.completions or self.chat


class ClassCard(Struct, kw_only=True):
    name: str
    rank: int
    ttft_slo_s: float | None
    """Seconds to the first token that are promised."""
    tpot_slo_s: float | None
    """Seconds a token after the first that are promised."""
    allowed: bool
    """Whether who asks may ask for it."""
    default: bool
    """Whether a request is of it that says nothing."""


class ParameterTable(Struct, kw_only=True):
    model: str
    max_model_len: int
    """Tokens of prompt and answer together."""
    parameters: list[Parameter]
    classes: list[ClassCard]


def parameter_table(engine: AsyncEngine, key: ApiKey | None) -> ParameterTable:
    """As it is for who asks with this key, or without one."""
    return ParameterTable(
        model=engine.config.model.model_name,
        max_model_len=engine.max_model_len,
        parameters=[each for name in RULES if (each := _parameter(name, engine.sampling_defaults)).is_sent],
        classes=_classes(engine, key),
    )


@functools.cache
def meanings() -> Mapping[str, str]:
    """Parameter -> the docstring below its field of `SamplingParams`."""
    (body,) = [
        node.body for node in ast.parse(inspect.getsource(sampling_params)).body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    ]  # fmt: skip
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _parameter(name: str, of_model: Mapping[str, Any]) -> Parameter:
    rule = REQUEST_RULES[name]
    kind, low, high = _kind(rule)
    default = chat_default = None if name == "seed" else of_model.get(name, DEFAULTS[name])
    if name == "max_tokens":
        default, chat_default = DEFAULTS[name], of_model.get(name)
    bodies = (CompletionRequest, ChatCompletionRequest)
    in_completions, in_chat = (name in {each.encode_name for each in msgspec.structs.fields(body)} for body in bodies)
    return Parameter(
        name=name,
        kind=kind,
        default=default,
        chat_default=chat_default,
        rule=rule.text,
        meaning=meanings()[name],
        minimum=low,
        maximum=high,
        completions=in_completions,
        chat=in_chat,
    )


def _kind(rule: ParameterRule) -> tuple[str, float | int | None, float | int | None]:
    """The kind of values a rule lets pass, the least and the largest."""
    match rule:
        case Whole(low, high):
            return "integer", low, high
        case Real(low, high):
            return "number", low, high
        case Flag():
            return "boolean", None, None
        case Texts():
            return "strings", None, None
        case TokenIds() | SomeTokenIds():
            return "token_ids", None, None
    return "other", None, None


def _classes(engine: AsyncEngine, key: ApiKey | None) -> list[ClassCard]:
    config, ceiling = engine.config, ceiling_of(engine.config, key)
    default = class_of(0 if ceiling is None else max(0, ceiling.rank), config.request_classes)
    return [
        ClassCard(
            name=each.name,
            rank=each.rank,
            ttft_slo_s=each.ttft_slo_s,
            tpot_slo_s=each.tpot_slo_s,
            allowed=ceiling is None or each.rank >= ceiling.rank,
            default=each is default,
        )
        for each in config.request_classes
    ]
