"""Chat templates: find them in a model folder, choose one, and render a conversation in a sandboxed process."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import msgspec

from llm_serving.core.files import is_unicode, parse_json, read_regular
from llm_serving.errors import ModelError, RequestError, TransportError, shorten
from llm_serving.log import get_logger
from llm_serving.text.chat_template.sandbox import Answer, Compile, RefusedTemplate, Render, sandbox
from llm_serving.text.sandbox import ConfinedProcess

logger = get_logger(__name__)

MAX_TEMPLATE_CHARS: Final = 2**18
NUM_PROCESSES: Final = 2
"""Two processes, so that one text that uses up its time does not block the others."""
MAX_CPU_S: Final = 2.0
"""CPU seconds for one text; the longest conversations take a tenth of that."""
MODULE: Final = "llm_serving.text.chat_template.sandbox"

TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
"""Folder of templates beside `chat_template.jinja`, each named by its file."""
PROCESSOR_FILE: Final = "chat_template.json"
"""File of folders whose processor accepts more than text: `{"chat_template": ...}`."""
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
"""Template for conversations with tools."""
MAX_FILE_BYTES: Final = 2**22
MAX_TEMPLATES: Final = 64


class ChatTemplate:
    """One template. Its processes are started when they are first needed, and again when one has ended.

    Args:
        source: Jinja text, as in `chat_template` of `tokenizer_config.json`.

    Raises:
        ModelError: The text is no template.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"chat_template must have at most {MAX_TEMPLATE_CHARS} characters. Given: {len(source)}")
        if not is_unicode(source):
            raise ModelError("chat_template must be text that UTF-8 has a form for; it holds half a character")
        try:
            sandbox().parse(source)  # to compile it is to compute what is constant in it: that is for the process
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"chat_template cannot be compiled: {str(error)[:200]}") from None
        self.source = source
        """The text."""
        self._free: queue.SimpleQueue[ConfinedProcess[Answer] | None] = queue.SimpleQueue()
        for _ in range(NUM_PROCESSES):
            self._free.put(None)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """The prompt text of a conversation; waits for a process, so call it off the event loop.

        Raises:
            RequestError: The template refuses the messages, fails on them, writes too much or takes too long.
        """
        process = self._free.get()
        try:
            question = Render([dict(message) for message in messages], variables)
            try:
                process = process if process is not None and process.lives else _started(self.source)
                answer = process.ask(question)
            except TransportError as error:
                logger.warning("a chat template used up its time or memory, its process ends: %s", error)
                if process is not None:
                    process.end()
                process = None
                raise RequestError("messages", "take the model's chat template too much time or memory") from None
            except OverflowError:
                raise RequestError(_overflowing(question), "must hold integers of 64 bits only") from None
        finally:
            self._free.put(process)
        if isinstance(answer, RefusedTemplate):
            raise RequestError("messages", answer.rule)
        return answer.text


def _overflowing(question: Render) -> str:
    """The field with an integer that no frame holds."""
    for field, value in (("messages", question.messages), ("tools", question.variables.get("tools"))):
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return field
    return "chat_template_kwargs"


def _started(source: str) -> ConfinedProcess[Answer]:
    """A process that has compiled the template.

    Raises:
        RequestError: It cannot be compiled.
        TransportError: To compile it takes too much.
    """
    process: ConfinedProcess[Answer] = ConfinedProcess(MODULE, MAX_CPU_S, Answer)  # type: ignore[arg-type]
    try:
        answer = process.ask(Compile(source))
    except TransportError:
        process.end()
        raise
    if isinstance(answer, RefusedTemplate):
        process.end()
        raise RequestError("messages", answer.rule)
    return process


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by name; one alone is `default`.

    A `default` in a file of its own takes the place of all that `tokenizer_config.json` has.

    Args:
        folder: The model folder.
        config: Content of its `tokenizer_config.json`.

    Raises:
        ModelError: A file cannot be read, or holds no templates.
    """
    files = _of_files(folder)
    if DEFAULT in files:
        return files
    given = templates_of(config.get("chat_template")) | files
    if not given and (path := folder / PROCESSOR_FILE).exists():
        return _of_processor(path)
    return given


def templates_of(value: Any) -> dict[str, str]:
    """`chat_template` of a config: a text, or a list of `{"name": ..., "template": ...}`."""
    if isinstance(value, str):
        return {DEFAULT: value}
    named = value if isinstance(value, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def _of_files(folder: Path) -> dict[str, str]:
    paths = {DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).exists() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    if len(more) > MAX_TEMPLATES:
        raise ModelError(f"{folder / MORE_TEMPLATES}: must hold at most {MAX_TEMPLATES} templates. Given: {len(more)}")
    paths |= {path.stem: path for path in more}
    return {name: read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace") for name, path in paths.items()}


def _of_processor(path: Path) -> dict[str, str]:
    try:
        content = parse_json(read_regular(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    templates = templates_of(content.get("chat_template") if isinstance(content, dict) else None)
    if not templates:
        raise ModelError(f"{path}: must be a JSON object with `chat_template`. Given: {shorten(content)}")
    return templates


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
