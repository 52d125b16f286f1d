"""From the timed bytes of a response to an answer: the legacy JSON lines and OpenAI's server-sent events.

Pure functions. Bytes may be split anywhere; a line has arrived when its last byte has.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from http_client import TimedPiece

_LEGACY_ERROR = re.compile(r"\s*(Error20[23]|error304)\s*:")


class AnswerError(Exception):
    """The server answered with an error, or with something that is not a complete answer."""


@dataclass(frozen=True)
class Answer:
    """A complete answer. `token_times_s` are in the clock of the pieces, one per token event."""

    text: str
    token_times_s: tuple[float, ...]
    num_output_tokens: int
    finish_reason: str | None


def split_lines(pieces: Iterable[TimedPiece]) -> Iterator[tuple[float, bytes]]:
    """Yields (arrival time, line without its end) of all lines that are not empty; the last may lack a line end."""
    rest = b""
    time_s = 0.0
    for piece in pieces:
        time_s = piece.time_s
        *lines, rest = (rest + piece.data).split(b"\n")
        for line in lines:
            if line.strip():
                yield time_s, line.strip()
    if rest.strip():
        yield time_s, rest.strip()


def parse_legacy_stream(pieces: Iterable[TimedPiece]) -> Answer:
    """Reads `generate_stream` with `return_full_text`: one JSON line a token, then one with the whole text.

    Lines of protocols other than "sse" start with `data:`; both forms are read.

    Raises:
        AnswerError: An error text (they come with HTTP 200), a line of another form, or no last line.
    """
    token_times: list[float] = []
    for time_s, line in split_lines(pieces):
        message = _legacy_message(line.removeprefix(b"data:"))
        text = message["generated_text"]
        if _LEGACY_ERROR.match(text):
            raise AnswerError(text.strip())
        if message.get("finish_reason") is None:
            token_times.append(time_s)
            continue
        count = _token_count(message.get("generated_tokens"), len(token_times))
        return Answer(text, tuple(token_times), count, message["finish_reason"])
    raise AnswerError(f"the stream ended after {len(token_times)} tokens without its last line (`finish_reason`)")


def _legacy_message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)["data"][0]
        if isinstance(message["generated_text"], str):
            return dict(message)
    except (ValueError, LookupError, TypeError):
        pass
    raise AnswerError(line[:300].decode(errors="replace"))


def _token_count(value: Any, default: int) -> int:
    """`generated_tokens` is a count; some servers send the tokens themselves."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) else default


def parse_openai_stream(pieces: Iterable[TimedPiece]) -> Answer:
    """Reads streamed `/v1/completions`: `data:` events up to `[DONE]`; tokens are counted from `usage` if it is sent.

    Raises:
        AnswerError: An error event, an event of another form, or no `[DONE]`.
    """
    texts: list[str] = []
    token_times: list[float] = []
    finish_reason: str | None = None
    num_tokens: int | None = None
    for time_s, line in split_lines(pieces):
        if not line.startswith(b"data:"):  # `event:`, `id:`, `retry:` and comments carry nothing for us
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return Answer("".join(texts), tuple(token_times), num_tokens or len(token_times), finish_reason)
        event = _openai_event(data)
        if event.has_token:
            token_times.append(time_s)
        texts.append(event.text)
        finish_reason = event.finish_reason or finish_reason
        num_tokens = event.num_output_tokens or num_tokens
    raise AnswerError(f"the stream ended after {len(token_times)} tokens without `[DONE]`")


class _Event(NamedTuple):
    text: str
    finish_reason: str | None
    has_token: bool
    num_output_tokens: int | None


def _openai_event(data: bytes) -> _Event:
    try:
        event = json.loads(data)
        if event.get("error"):
            raise AnswerError(error_text(data))
        count = (event.get("usage") or {}).get("completion_tokens")
        if not event["choices"]:  # the last event, which carries only the usage
            return _Event("", None, False, count)
        text, finish_reason = event["choices"][0]["text"], event["choices"][0].get("finish_reason")
        # An event without text still carries a token (half a character), unless it only tells the finish reason.
        return _Event(text, finish_reason, bool(text) or not finish_reason, count)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AnswerError(f"not a completion event: {data[:300].decode(errors='replace')}") from None


def error_text(body: bytes) -> str:
    """The message inside an error body: OpenAI's `{"error": {"message"}}`, `{"error"}`, `{"detail"}`, or the body."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed.get("detail", parsed))
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[:300]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace").strip()
