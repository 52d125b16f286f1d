"""One conversation with a running server, over its OpenAI route."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any, NamedTuple

from llm_serving.commands.server_call import Refusal, opened
from llm_serving.errors import UnavailableError, shorten

Message = dict[str, str]


class Piece(NamedTuple):
    """What one event tells."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass
class ChatClient:
    """What is said, and where.

    Attributes:
        url: Of the server, without a path.
        key: API key; empty: none is shown.
        model: Name; empty: whatever is served.
        system: Said before the conversation; empty: nothing.
        parameters: Further fields of every request, such as `temperature`.
        messages: Of the user and the assistant, in turns.
    """

    url: str
    key: str = ""
    model: str = ""
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def say(self, text: str) -> Generator[Piece, None, None]:
        """Says something, and yields what is answered as it comes.

        Both become part of the conversation, the answer as far as it came, when this ends or is closed; neither does
        where nothing was answered.

        Raises:
            Refusal: The server refuses, or its answer breaks off with an error.
            UnavailableError: It cannot be reached, or is gone.
        """
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

    def take_back(self) -> str | None:
        """Forgets the last turn; what the user had said in it, or None where there was none."""
        if not self.messages:
            return None
        said = self.messages[-2]["content"]
        del self.messages[-2:]
        return said

    def served_models(self) -> list[str]:
        """Raises: as `say`."""
        with self._open("/v1/models") as response:
            try:
                return [str(card["id"]) for card in json.loads(response.read())["data"]]
            except (ValueError, KeyError, TypeError):
                raise Refusal(f"{self.url} does not answer as a server of language models") from None

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
        raise UnavailableError(f"{self.url} broke off its answer")

    def _open(self, path: str, body: object = None) -> AbstractContextManager[HTTPResponse]:
        return opened(self.url, path, self.key, body)


def _piece(data: bytes) -> Piece:
    try:
        event = json.loads(data)
        if "error" in event:
            raise Refusal(str(event["error"]["message"]))
        usage = event.get("usage")
        if not event["choices"]:
            return Piece(usage=usage)
        choice = event["choices"][0]
        delta = choice["delta"]
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        return Piece(text, reasoning, choice.get("finish_reason"), usage)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Refusal(f"the server answers with something else: {shorten(data.decode('utf-8', 'replace'))}") from None
