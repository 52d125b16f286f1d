"""Conversations as prompt texts: which of a model's chat templates is taken, and what it is given."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from llm_serving.errors import RequestError
from llm_serving.text.chat_template import ChatTemplate
from llm_serving.text.template_files import DEFAULT, TOOL_USE


class Conversations:
    """The chat templates of one model.

    Args:
        templates: Text of each by name. Of several, `tool_use` is for conversations with tools, `default` for others.
        special_tokens: What every template gets besides its arguments, such as `bos_token`.

    Raises:
        ModelError: A text is no template.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._names = sorted(templates)
        self._templates = {name: ChatTemplate(templates[name]) for name in (DEFAULT, TOOL_USE) if name in templates}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt text, as `apply_chat_template` of the transformers library makes it.

        Args:
            messages: At least one.
            tools: JSON schemas of functions.
            documents: Texts to answer from.
            add_generation_prompt: Open an answer of the assistant.
            continue_final_message: End where the text of the last message does; not with `add_generation_prompt`.
            variables: More of what the template knows.

        Raises:
            RequestError: The model has no such template, or it refuses the messages.
        """
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        template, given = self._choose(with_tools=tools is not None), self._special_tokens | given | variables
        if not continue_final_message:
            return template.render(messages, **given)
        mark = secrets.token_hex(16)  # no template knows it, so that it ends up right behind the text
        last, marked = _marked(messages[-1], mark + " ")
        text = template.render([*messages[:-1], marked], **given)
        if mark not in text or last.strip() not in text:
            raise RequestError("continue_final_message", "must be false, as the chat template drops the last message")
        end = text.rindex(mark)
        keeps_spaces = text.startswith(" ", end + len(mark))
        return text[:end] if keeps_spaces else text[:end].rstrip()

    def source(self, *, with_tools: bool) -> str:
        """The text of the template that such a conversation gets; empty: there is none."""
        names = (TOOL_USE, DEFAULT) if with_tools else (DEFAULT,)
        return next((self._templates[name].source for name in names if name in self._templates), "")

    def _choose(self, with_tools: bool) -> ChatTemplate:
        for name in (TOOL_USE, DEFAULT) if with_tools else (DEFAULT,):
            if name in self._templates:
                return self._templates[name]
        if not self._names:
            raise RequestError("messages", "cannot be used: the model has no chat template; use /v1/completions")
        known = ", ".join(self._names)
        raise RequestError("messages", f"cannot be used: of the model's chat templates ({known}) none is the default")


def _marked(message: Mapping[str, Any], mark: str) -> tuple[str, dict[str, Any]]:
    """The text of a message, of several parts the last; and the message with `mark` behind it."""
    content = message.get("content")
    if isinstance(content, str):
        return content, dict(message) | {"content": content + mark}
    parts = list(content) if isinstance(content, list | tuple) else []
    for i, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[i] = dict(part) | {"text": text + mark}
            return text, dict(message) | {"content": parts}
    raise RequestError("continue_final_message", "must be false, as the last message has no text")
