"""Requests to the server under test over the legacy and the OpenAI route, and the parsers of their streams.

The parsers are pure functions. Bytes may be split anywhere; a line has arrived when its last byte has.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from load_test.http_client import HttpClient, HttpResponse, TimedPiece
from load_test.metrics import Attempt

_LEGACY_ERROR = re.compile(r"\s*(Error20[23]|error304)\s*:")


class AnswerError(Exception):
    """The server responded with an error, or with an incomplete answer."""


@dataclass(frozen=True)
class Answer:
    """A complete answer. `token_times_s` has one arrival time for each token event, in the clock of the parts."""

    text: str
    token_times_s: tuple[float, ...]
    num_output_tokens: int
    finish_reason: str | None


def split_lines(pieces: Iterable[TimedPiece]) -> Iterator[tuple[float, bytes]]:
    """Yield (arrival time, line without its end) of all lines that are not empty; the last may lack a line end."""
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
    """Parse `generate_stream` with `return_full_text`: one JSON line a token, then one with the whole text.

    Lines of protocols other than "sse" start with `data:`; both forms are accepted.

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
    """Return a count of tokens; some servers send the list of tokens as `generated_tokens`."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) else default


def parse_openai_stream(pieces: Iterable[TimedPiece]) -> Answer:
    """Parse streamed `/v1/completions`: `data:` events up to `[DONE]`; `usage`, if sent, has the token count.

    Raises:
        AnswerError: An error event, an event of another form, or no `[DONE]`.
    """
    texts: list[str] = []
    token_times: list[float] = []
    finish_reason: str | None = None
    num_tokens: int | None = None
    for time_s, line in split_lines(pieces):
        if not line.startswith(b"data:"):  # `event:`, `id:`, `retry:` and comments are ignored
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
        if not isinstance(text, str):
            raise TypeError
        # An event without text still has a token (half a character), unless it only has the finish reason.
        return _Event(text, finish_reason, bool(text) or not finish_reason, count)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AnswerError(f"not a completion event: {data[:300].decode(errors='replace')}") from None


def error_text(body: bytes) -> str:
    """Return the message of an error: OpenAI's `{"error": {"message"}}`, `{"error"}`, `{"detail"}`, or the body."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed.get("detail", parsed))
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[:300]
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace").strip()


Api = Literal["legacy", "openai"]
LEGACY_MODEL_NAMES = ("llama2", "internlm")
"""Model names that the legacy routes accept for any served model."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

RETRIES_HEADER = "x-stainless-retry-count"
"""Header in which the libraries of OpenAI and Anthropic send the number of earlier attempts."""

_MAX_RETRY_AFTER_S = 120.0


class PreflightError(Exception):
    """The run cannot start; the message says what to do."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of all requests of a run.

    Attributes:
        ignore_eos: Generate exactly `max_tokens`; the OpenAI route only.
        priority: Smaller runs first; None sends none; the OpenAI route only.
        max_retries: Most retries of a request that was refused with 429 or 503 and `Retry-After`.
    """

    api: Api
    model: str
    ignore_eos: bool = False
    priority: int | None = None
    max_retries: int = 0

    @property
    def path(self) -> str:
        return "/v1/completions" if self.api == "openai" else f"/models/{self.model}/generate_stream"

    def body(self, prompt: str, max_tokens: int, own_fields: Mapping[str, Any] = NO_FIELDS) -> bytes:
        """Return the request body with `own_fields`; greedy, so that answers can be compared."""
        openai = self.api == "openai"
        fields = self._openai_fields(prompt, max_tokens) if openai else self._legacy_fields(prompt, max_tokens)
        return json.dumps({**fields, **own_fields}).encode()

    def _openai_fields(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.priority is not None:
            fields["priority"] = self.priority
        return fields

    def _legacy_fields(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        # Booleans are strings, as the clients of these routes send them.
        parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": max_tokens}
        return {"inputs": prompt, "parameters": parameters, "stream": True}


@dataclass(frozen=True)
class GenerationResult:
    """A complete answer with its times, in `time.perf_counter` seconds."""

    answer: Answer
    end_s: float
    attempts: tuple[Attempt, ...]

    @property
    def num_retries(self) -> int:
        return len(self.attempts) - 1


async def generate(
    http: HttpClient,
    options: GenerationOptions,
    prompt: str,
    max_tokens: int,
    own_fields: Mapping[str, Any] = NO_FIELDS,
) -> GenerationResult:
    """Send one prompt and return its complete answer, timed in `time.perf_counter` seconds.

    `own_fields` are fields of the body that only this request has.

    Raises:
        HttpError: The connection broke.
        AnswerError: The server refused the request, or its answer is not complete.
    """
    body = options.body(prompt, max_tokens, own_fields)
    attempts: list[Attempt] = []
    while True:
        sent_s = time.perf_counter()
        response = await http.request("POST", options.path, body, {RETRIES_HEADER: str(len(attempts))})
        delay_s = retry_after_s(response)
        request_id = response.headers.get("x-request-id", "")
        attempts.append(Attempt(sent_s, delay_s, predicted_ttft_s(response), request_id))
        if delay_s is None or len(attempts) > options.max_retries:
            break
        await asyncio.sleep(delay_s)
    if response.status != 200:
        raise AnswerError(f"HTTP {response.status}: {error_text(response.body)}")
    parse = parse_openai_stream if options.api == "openai" else parse_legacy_stream
    return GenerationResult(parse(response.pieces), response.pieces[-1].time_s, tuple(attempts))


def retry_after_s(response: HttpResponse) -> float | None:
    """Return the seconds of `Retry-After`, None without it; `retry-after-ms` is preferred, as in client libraries."""
    if response.status not in (429, 503):
        return None
    try:
        milliseconds = response.headers.get("retry-after-ms")
        seconds = float(response.headers["retry-after"]) if milliseconds is None else float(milliseconds) / 1000
    except (KeyError, ValueError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def predicted_ttft_s(response: HttpResponse) -> float | None:
    """Return the predicted seconds to the first token; None if the server sends no prediction."""
    try:
        return float(response.headers["x-predicted-ttft-ms"]) / 1000
    except (KeyError, ValueError):
        return None


async def resolve_model(http: HttpClient, api: Api, model: str | None) -> str:
    """Return `model` if the server serves it; without `model`, return the first one that it serves.

    Raises:
        HttpError: The server cannot be reached.
        PreflightError: The server is not ready, or serves other models.
    """
    response = await http.request("GET", "/v1/models")
    if response.status == 503:
        raise PreflightError(f"the server at {http.host}:{http.port} is not ready yet: {error_text(response.body)}")
    if response.status == 404 and api == "legacy":  # older servers have no such route
        return model or LEGACY_MODEL_NAMES[0]
    try:
        served = [entry["id"] for entry in json.loads(response.body)["data"]]
    except (ValueError, LookupError, TypeError):
        raise PreflightError(f"GET /v1/models answered HTTP {response.status}: {error_text(response.body)}") from None
    known = [*served, *LEGACY_MODEL_NAMES] if api == "legacy" else served
    if model is None and known:
        return str(known[0])
    if model is None or model not in known:
        raise PreflightError(f"`--model` must be one of {', '.join(known) or '(none served)'}. Given: {model}")
    return model


async def server_cpu_s(http: HttpClient) -> float | None:
    """Return the CPU seconds of the master process without its WorkAgents; None if `/metrics` has no such line."""
    response = await http.request("GET", "/metrics")
    for line in response.body.decode(errors="replace").splitlines() if response.status == 200 else []:
        if line.startswith("process_cpu_seconds_total "):
            return float(line.split()[1])
    return None


async def count_tokens(http: HttpClient, text: str) -> int | None:
    """Return the number of tokens of `text` without a beginning-of-text token; None if the server has no such route."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    response = await http.request("POST", "/tokenize", body)
    try:
        return int(json.loads(response.body)["count"]) if response.status == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
