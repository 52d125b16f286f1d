"""Chat templates of model folders, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm_serving.errors import ModelError, RequestError

MAX_RENDERED_CHARS: Final = 16 * 2**20
MAX_TEMPLATE_CHARS: Final = 2**20


class ChatTemplate:
    """One compiled template. It sees copies of plain data, cannot change them and reaches no Python internals.

    Args:
        source: Jinja text, as in `chat_template` of `tokenizer_config.json`.

    Raises:
        ModelError: The text is no template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"chat_template must have at most {MAX_TEMPLATE_CHARS} characters. Given: {len(source)}")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"chat_template cannot be compiled: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """The prompt text of a conversation.

        Raises:
            RequestError: The template refuses the messages, fails on them or writes too much.
        """
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(messages=messages, **variables):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RequestError("messages", f"must render to at most {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"do not fit the model's chat template: {str(error)[:200]}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            rule = f"do not fit the model's chat template: {type(error).__name__}"
            raise RequestError("messages", rule) from None
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
