"""`llm-serving chat`: a conversation with a running server in the terminal, over its OpenAI route.
Ctrl-C ends the response that is being written, not the program. Ctrl-D or /quit ends the program.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from llm_serving.errors import ConfigError, LLMServingError, UnavailableError, shorten

from llm_serving_tools.server_client import ServerRefusal, add_server_arguments, api_key_of, opened, url_of

Message = dict[str, str]
PROMPT: Final = "> "
MORE: Final = ". "
DIM, PLAIN = "\033[2m", "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--model", metavar="NAME", default="", help="model name to send; default: none")
    parser.add_argument("--system", metavar="TEXT", default="", help="system message")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="parameters",
        help="set a request parameter, for example temperature=0",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    parameters = {}
    for given in arguments.parameters:
        name, found, value = given.partition("=")
        if not found:
            raise ConfigError(f"--set must be NAME=VALUE. Given: {given}")
        parameters[name] = read_value(value)
    chat(ChatClient(url_of(arguments), api_key_of(arguments), arguments.model, arguments.system, parameters))
    return 0


class Piece(NamedTuple):
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass
class ChatClient:
    """The client side of one conversation. `key`, `model` and `system` are not sent if they are empty."""

    url: str
    key: str = ""
    model: str = ""
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Send a message and yield the answer as it arrives. Append both to `messages`, unless the answer is empty."""
        asked = {"role": "user", "content": text}
        answer: list[str] = []
        ended = False
        try:
            for piece in self._ask([*self.messages, asked]):
                answer.append(piece.text)
                ended = ended or piece.finish_reason is not None
                yield piece
        finally:
            if ended or any(answer):
                self.messages += [asked, {"role": "assistant", "content": "".join(answer)}]

    def remove_last_turn(self) -> str | None:
        if not self.messages:
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        return text

    def served_models(self) -> list[str]:
        with self._open("/v1/models") as response:
            try:
                return [str(card["id"]) for card in json.loads(response.read())["data"]]
            except (ValueError, KeyError, TypeError):
                raise ServerRefusal(f"{self.url} does not answer like an OpenAI-compatible server") from None

    def _ask(self, messages: list[Message]) -> Iterator[Piece]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"messages": system + messages, "stream": True, **self.parameters}
        body["stream_options"] = {"include_usage": True}
        if self.model:
            body["model"] = self.model
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                yield _piece(data)
        raise UnavailableError(f"{self.url} closed the connection before the answer was complete")

    def _open(self, path: str, body: object = None) -> AbstractContextManager[HTTPResponse]:
        return opened(self.url, path, self.key, body)


def _piece(data: bytes) -> Piece:
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerRefusal(str(event["error"]["message"]))
        usage = event.get("usage")
        if not event["choices"]:
            return Piece(usage=usage)
        choice = event["choices"][0]
        delta = choice["delta"]
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        return Piece(text, reasoning, choice.get("finish_reason"), usage)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerRefusal(
            f"the server sent an event that is not a chat completion: {shorten(data.decode('utf-8', 'replace'))}"
        ) from None


_CONTROL: Final = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control character -> its replacement. In a model's output it could move the cursor or change colours."""


class Command(NamedTuple):
    run: Callable[[Chat, str], None]
    takes: str
    help: str


@dataclass(eq=False)
class Chat:
    """The terminal side of a conversation. `read` shows a prompt and returns a line, or raises EOFError at the end."""

    client: ChatClient
    read: Callable[[str], str]
    out: TextIO
    clock: Callable[[], float] = time.monotonic
    has_ended: bool = False
    _is_dim: bool = False

    def run(self) -> None:
        while not self.has_ended:
            try:
                line = self._line()
            except EOFError:
                self.say("")
                return
            except KeyboardInterrupt:
                self.say("\n(Ctrl-D or /quit ends)")
                continue
            try:
                self._process(line)
            except LLMServingError as error:
                self.say(f"error: {error}")
            except KeyboardInterrupt:
                self.say("\n(ended)")

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def answer(self, text: str) -> None:
        began = self.clock()
        first: float | None = None
        last = Piece()
        pieces = self.client.say(text)
        try:
            with closing(pieces):
                for piece in pieces:
                    if first is None and (piece.text or piece.reasoning):
                        first = self.clock()
                    self._write(piece.reasoning, dim=True)
                    self._write(piece.text, dim=False)
                    last = Piece(finish_reason=piece.finish_reason or last.finish_reason, usage=piece.usage)
        except KeyboardInterrupt:
            self._write("", dim=False)
            self.say("\n(ended)")
            return
        finally:
            self._write("", dim=False)
        self.say("")
        self._summarise(last, began, first)

    def _line(self) -> str:
        lines = [self.read(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self.read(MORE))
        return "\n".join(lines)

    def _process(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        if line.startswith("/") and name in COMMANDS:
            COMMANDS[name].run(self, rest.strip())
        elif line.startswith("/"):
            self.say(f"/{name} is unknown; /help lists the commands. Put a space before a message that starts with /")
        elif line.strip():
            self.answer(line)

    def _write(self, text: str, *, dim: bool) -> None:
        if self._is_dim and not dim:
            self.out.write(PLAIN if self.out.isatty() else "\n")
            self._is_dim = False
        if not text:
            return
        if dim and not self._is_dim:
            self.out.write(DIM if self.out.isatty() else "")
            self._is_dim = True
        self.out.write(text.translate(_CONTROL))
        self.out.flush()

    def _summarise(self, last: Piece, began: float, first: float | None) -> None:
        if last.usage is None:
            return
        count, seconds = int(last.usage["completion_tokens"]), self.clock() - began
        parts = [f"{count} tokens in {seconds:.1f} s"]
        if first is not None:
            parts.append(f"the first after {first - began:.2f} s")
        if last.finish_reason == "length":
            parts.append("stopped at the maximum length")
        self.say(f"{DIM}({', '.join(parts)}){PLAIN}" if self.out.isatty() else f"({', '.join(parts)})")


def _help(chat: Chat, rest: str) -> None:
    for name, command in COMMANDS.items():
        chat.say(f"  /{name} {command.takes}".ljust(22) + command.help)
    chat.say("  a line that ends with \\ continues on the next; Ctrl-C ends an answer, Ctrl-D the program")


def _reset(chat: Chat, rest: str) -> None:
    chat.client.messages.clear()
    chat.say("(a new conversation)")


def _system(chat: Chat, rest: str) -> None:
    chat.client.system = rest
    _reset(chat, "")


def _set(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    parameters = chat.client.parameters
    if name and value:
        parameters[name] = read_value(value)
    elif name:
        parameters.pop(name, None)
    chat.say(json.dumps(parameters) if parameters else "(no parameters)")


def _retry(chat: Chat, rest: str) -> None:
    messages = chat.client.messages
    before = [*messages]
    text = chat.client.remove_last_turn()
    if text is None:
        chat.say("(no message yet)")
        return
    try:
        chat.answer(text)
    finally:
        if len(messages) < len(before):  # no answer arrived: restore the last turn
            messages[:] = before


def _undo(chat: Chat, rest: str) -> None:
    text = chat.client.remove_last_turn()
    chat.say("(no message yet)" if text is None else "(the last turn is removed)")


def _history(chat: Chat, rest: str) -> None:
    for message in chat.client.messages:
        chat.say(f"{message['role']}: {message['content'].translate(_CONTROL)}")


def _save(chat: Chat, rest: str) -> None:
    if not rest:
        chat.say("/save needs the name of a file")
        return
    content = {"system": chat.client.system, "messages": chat.client.messages}
    try:
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        # A surrogate, which UTF-8 cannot encode, is written as a JSON escape.
        Path(rest).expanduser().write_text(text, encoding="utf-8", errors="backslashreplace")
    # RuntimeError: the user of `~user` has no home folder. ValueError: the name contains a null character.
    except (OSError, RuntimeError, ValueError) as error:
        chat.say(f"error: {rest}: {getattr(error, 'strerror', None) or error}")


def _models(chat: Chat, rest: str) -> None:
    chat.say("\n".join(chat.client.served_models()))


def _quit(chat: Chat, rest: str) -> None:
    chat.has_ended = True


COMMANDS: Final[dict[str, Command]] = {
    "help": Command(_help, "", "list the commands"),
    "reset": Command(_reset, "", "start a new conversation"),
    "system": Command(_system, "[TEXT]", "start a new conversation with this system message"),
    "set": Command(_set, "[NAME [VALUE]]", "set a request parameter, such as temperature 0; without VALUE: unset it"),
    "retry": Command(_retry, "", "send the last message again"),
    "undo": Command(_undo, "", "remove the last turn"),
    "history": Command(_history, "", "show the conversation"),
    "save": Command(_save, "FILE", "write the conversation as JSON"),
    "models": Command(_models, "", "list the served models"),
    "quit": Command(_quit, "", "end"),
}


def read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def chat(client: ChatClient) -> None:
    """Chat in the terminal. Raise LLMServingError if the server does not answer the first time or refuses the key."""
    if sys.stdin is None:
        raise ConfigError("chat reads messages from standard input, which is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    models = client.served_models()
    with suppress(ImportError):  # line editing and history, where Python has readline
        import readline  # noqa: F401
    talk = Chat(client, input, sys.stdout)
    talk.say(f"{client.model or ', '.join(models)} at {client.url}; /help lists the commands")
    talk.run()
