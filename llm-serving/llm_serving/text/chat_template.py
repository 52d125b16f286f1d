"""Chat templates: finds them in a model folder, selects one, and renders a conversation in a confined process.

A template is an untrusted program: `'%1000000000d' | format(1)` allocates a gigabyte, and loops may never end. This
module is also the program of the confined process; `text.sandbox` sets its limits.
"""

from __future__ import annotations

import datetime
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm_serving.core.files import escape_surrogates, is_unicode, parse_json, read_json, read_regular
from llm_serving.errors import ModelError, RequestError, TransportError, shorten
from llm_serving.text.sandbox import ConfinedPool, ConfinedProcess, serve

MAX_RENDERED_CHARS: Final = 3 * 2**20
"""Maximum length of a rendered text. Its UTF-8 fits into one message to the master."""
MAX_MEMORY_BYTES: Final = 2**30


class Compile(msgspec.Struct, tag="compile"):
    source: str


class Render(msgspec.Struct, tag="render"):
    messages: list[Any]
    variables: dict[str, Any]


class Rendered(msgspec.Struct, tag="rendered"):
    text: str


class RefusedTemplate(msgspec.Struct, tag="refused"):
    rule: str
    """The violated rule, as the end of a sentence that begins with a field's name."""


Question = Compile | Render
Answer = Rendered | RefusedTemplate


class GenerationBlock(Extension):
    """The block `{% generation %}...{% endgeneration %}`, which marks answers for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def sandbox() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment in which templates see copies of plain data and no Python internals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


# --- in the confined process ------------------------------------------------------------------------------------------


class _Renderer:
    """Answers the master's messages: the first has the template, each later one has a conversation to render."""

    _template: jinja2.Template | None = None

    def answer(self, question: Question) -> Answer:
        if isinstance(question, Compile):
            self._template, answer = _compile(question.source)
            return answer
        assert self._template is not None
        return _render(self._template, question)


def main(argv: Sequence[str] | None = None) -> int:
    return serve(MODULE, Question, _Renderer().answer, argv, MAX_MEMORY_BYTES)


def _compile(source: str) -> tuple[jinja2.Template | None, Answer]:
    try:
        return sandbox().from_string(source), Rendered("")
    except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        why = escape_surrogates(str(error)[:200])
        return None, RefusedTemplate(f"cannot be rendered: the model's chat template cannot be compiled: {why}")


def _render(template: jinja2.Template, question: Render) -> Answer:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(messages=question.messages, **question.variables):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                return RefusedTemplate(f"must render to at most {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # raises for lone surrogates, which UTF-8 cannot encode
    except jinja2.TemplateError as error:
        return RefusedTemplate(f"do not fit the model's chat template: {escape_surrogates(str(error)[:200])}")
    except Exception as error:  # noqa: BLE001  a template may raise anything
        return RefusedTemplate(f"do not fit the model's chat template: {type(error).__name__}")
    return Rendered(text)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- in the master ----------------------------------------------------------------------------------------------------

MAX_TEMPLATE_CHARS: Final = 2**18
NUM_PROCESSES: Final = 2
"""With two processes, one slow conversation does not block all others."""
MAX_CPU_S: Final = 2.0
"""Maximum CPU seconds for rendering one conversation. The longest conversations take a tenth of this time."""
MODULE: Final = "llm_serving.text.chat_template"

TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
PROCESSOR_FILE: Final = "chat_template.json"
"""File with `{"chat_template": ...}` in the folders of multimodal models."""
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
MAX_FILE_BYTES: Final = 2**22
MAX_TEMPLATES: Final = 64


class ChatTemplate:
    """A chat template and the processes that render it. Raise ModelError if `source`, in Jinja, is not valid."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"chat_template must have at most {MAX_TEMPLATE_CHARS} characters. Given: {len(source)}")
        if not is_unicode(source):
            raise ModelError("chat_template must be valid Unicode. Given: a text with a lone surrogate")
        try:
            sandbox().parse(source)  # only parse: compiling evaluates constant expressions, which may be expensive
        except (jinja2.TemplateError, ValueError, RecursionError) as error:  # ValueError: a number with too many digits
            raise ModelError(f"chat_template cannot be compiled: {str(error)[:200]}") from None
        self.source = source
        self._processes = ConfinedPool(NUM_PROCESSES, partial(_started, source), "of a chat template")

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """Return the prompt text of a conversation. This waits for a process, so it must not run on the event loop."""
        question = Render([dict(message) for message in messages], variables)
        try:
            answer = self._processes.ask(question)
        except TransportError:
            raise RequestError("messages", "need too much time or memory in the model's chat template") from None
        except OverflowError:
            raise RequestError(_overflowing(question), "must contain only integers of at most 64 bits") from None
        if isinstance(answer, RefusedTemplate):
            raise RequestError("messages", answer.rule)
        return answer.text


def _overflowing(question: Render) -> str:
    for field, value in (("messages", question.messages), ("tools", question.variables.get("tools"))):
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            return field
    return "chat_template_kwargs"


def _started(source: str) -> ConfinedProcess[Answer]:
    """Start a process with the template. Raise RequestError if it is invalid, TransportError if the process fails."""
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
    """Return the chat templates of a model folder, by name. `config`: content of `tokenizer_config.json`. The templates
    in files are added to those in `config`. If a file, such as `chat_template.jinja`, has the default template, the
    templates in `config` are ignored. Raise ModelError if a file cannot be read, or if a `chat_template.json` has no
    template.
    """
    files = _read_template_files(folder)
    if DEFAULT in files:
        return files
    given = templates_of(config.get("chat_template")) | files
    if not given and (path := folder / PROCESSOR_FILE).exists():
        return _read_processor_file(path)
    return given


def templates_of(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    named = value if isinstance(value, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }


def _read_template_files(folder: Path) -> dict[str, str]:
    paths = {DEFAULT: folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).exists() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    if len(more) > MAX_TEMPLATES:
        raise ModelError(f"{folder / MORE_TEMPLATES}: must hold at most {MAX_TEMPLATES} templates. Given: {len(more)}")
    paths |= {path.stem: path for path in more}
    return {name: read_regular(path, MAX_FILE_BYTES).decode("utf-8", "replace") for name, path in paths.items()}


def _read_processor_file(path: Path) -> dict[str, str]:
    content = read_json(path, MAX_FILE_BYTES, parse_json)
    templates = templates_of(content.get("chat_template") if isinstance(content, dict) else None)
    if not templates:
        raise ModelError(f"{path}: must be a JSON object with `chat_template`. Given: {shorten(content)}")
    return templates


class Conversations:
    """The chat templates `default` and, for conversations with tools, `tool_use`. Raise ModelError for invalid ones."""

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
        """Return the prompt text, like `apply_chat_template` of transformers. Raise RequestError if the template fails.
        `add_generation_prompt`: end the text with the start of an assistant's answer. `continue_final_message`: end the
        text with the last message, so that the model continues this message. It needs at least one message, and cannot
        be combined with `add_generation_prompt`.
        """
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        template, given = self._choose(with_tools=tools is not None), self._special_tokens | given | variables
        if not continue_final_message:
            return template.render(messages, **given)
        sentinel = secrets.token_hex(16)  # The template cannot change it, so it marks the text's end.
        last, changed = _with_sentinel(messages[-1], sentinel + " ")
        text = template.render([*messages[:-1], changed], **given)
        if sentinel not in text or last.strip() not in text:
            raise RequestError(
                "continue_final_message", "must be false, because the chat template drops the last message"
            )
        end = text.rindex(sentinel)
        keeps_spaces = text.startswith(" ", end + len(sentinel))
        return text[:end] if keeps_spaces else text[:end].rstrip()

    def source(self, *, with_tools: bool) -> str:
        """Return the text of the template for conversations with or without tools, or "" if there is none."""
        template = self._template(with_tools)
        return "" if template is None else template.source

    def _template(self, with_tools: bool) -> ChatTemplate | None:
        default = self._templates.get(DEFAULT)
        return self._templates.get(TOOL_USE, default) if with_tools else default

    def _choose(self, with_tools: bool) -> ChatTemplate:
        if (template := self._template(with_tools)) is not None:
            return template
        if not self._names:
            raise RequestError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
        known = ", ".join(self._names)
        rule = f"cannot be rendered: none of the model's chat templates ({known}) is named `default`"
        raise RequestError("messages", rule)


def _with_sentinel(message: Mapping[str, Any], sentinel: str) -> tuple[str, dict[str, Any]]:
    """Return the last text of a message, unchanged, and a copy of the message with `sentinel` after this text."""
    content = message.get("content")
    if isinstance(content, str):
        return content, dict(message) | {"content": content + sentinel}
    parts = list(content) if isinstance(content, list | tuple) else []
    for i, part in reversed(list(enumerate(parts))):
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            parts[i] = dict(part) | {"text": text + sentinel}
            return text, dict(message) | {"content": parts}
    raise RequestError("continue_final_message", "must be false, because the last message has no text")


if __name__ == "__main__":
    sys.exit(main())
