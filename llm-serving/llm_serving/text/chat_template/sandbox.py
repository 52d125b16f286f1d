"""A confined process that renders one chat template. A template is an untrusted program of the model folder.

One call such as `'%1000000000d' | format(1)` allocates a gigabyte, and nested loops may never end. `text.sandbox` sets
the limits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llm_serving.core.files import escape_surrogates
from llm_serving.errors import ChannelClosedError, TransportError
from llm_serving.text.sandbox import confine, within
from llm_serving.transport.channel import Channel

MAX_RENDERED_CHARS: Final = 3 * 2**20
"""Maximum length of a rendered text. Its UTF-8 fits into one message to the master."""
MAX_MEMORY_BYTES: Final = 2**30
"""Maximum address space of the process, in addition to what it has mapped when idle."""


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
    """`{% generation %}...{% endgeneration %}`, which marks answers for training. It is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def sandbox() -> ImmutableSandboxedEnvironment:
    """Return an environment in which templates see copies of plain data and no Python internals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m llm_serving.text.chat_template.sandbox", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="one end of a pair of sockets, inherited")
    parser.add_argument("--cpu-seconds", type=float, required=True, help="most time for one text")
    arguments = parser.parse_args(argv)
    confine(MAX_MEMORY_BYTES)
    try:
        serve(Channel(socket.socket(fileno=arguments.socket_fd), Question), arguments.cpu_seconds)  # type: ignore[arg-type]
    except ChannelClosedError:
        return 0
    except (TransportError, MemoryError):
        return 1
    return 0


def serve(channel: Channel[Question], cpu_seconds: float) -> None:
    """Compile one template, then render it for each request until the master closes the channel."""
    template: jinja2.Template | None = None
    while True:
        question = channel.receive()
        with within(cpu_seconds):
            if isinstance(question, Compile):
                template, answer = _compile(question.source)
            else:
                assert template is not None
                answer = _render(template, question)
        channel.send(answer)


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


if __name__ == "__main__":
    sys.exit(main())
