"""A client of the server under test: one request in, one answer out, over the legacy or the OpenAI route."""

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from http_client import HttpClient, HttpResponse
from records import Attempt
from streams import Answer, AnswerError, error_text, parse_legacy_stream, parse_openai_stream

Api = Literal["legacy", "openai"]
LEGACY_MODEL_NAMES = ("llama2", "internlm")
"""Names under which the legacy routes answer for any served model."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

RETRIES_HEADER = "x-stainless-retry-count"
"""By which the libraries of OpenAI and Anthropic say how often they have tried a request before."""

_MAX_RETRY_AFTER_S = 120.0


class PreflightError(Exception):
    """The run cannot begin, and what to do about it."""


@dataclass(frozen=True)
class GenerationOptions:
    """What all requests of a run have in common.

    Attributes:
        ignore_eos: Generate exactly `max_tokens`; the OpenAI route only.
        priority: Smaller runs first; None sends none; the OpenAI route only.
        max_retries: How often a request is sent again that was refused with 429 or 503 and `Retry-After`.
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
        """The request body; greedy, so that an answer can be compared. `own_fields` go beside the common ones."""
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
        # Booleans as strings: what the clients of these routes send.
        parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": max_tokens}
        return {"inputs": prompt, "parameters": parameters, "stream": True}


@dataclass(frozen=True)
class GenerationResult:
    """In `time.perf_counter` seconds."""

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
    """Sends one prompt and returns its complete answer, timed in `time.perf_counter` seconds.

    `own_fields` are those of the body that belong to this request alone.

    Raises:
        HttpError: The exchange broke.
        AnswerError: The server refused, or its answer is not complete.
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
    """Seconds the server asks to wait before the request is sent again; None where it does not ask.

    To the millisecond where it says so, as libraries do that tell how often they have tried.
    """
    if response.status not in (429, 503):
        return None
    try:
        milliseconds = response.headers.get("retry-after-ms")
        seconds = float(response.headers["retry-after"]) if milliseconds is None else float(milliseconds) / 1000
    except (KeyError, ValueError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None


def predicted_ttft_s(response: HttpResponse) -> float | None:
    """Seconds to the first token that the server expects; None where it does not tell."""
    try:
        return float(response.headers["x-predicted-ttft-ms"]) / 1000
    except (KeyError, ValueError):
        return None


async def resolve_model(http: HttpClient, api: Api, model: str | None) -> str:
    """Checks that the server serves `model`; without one, asks which it serves.

    Raises:
        HttpError: The server cannot be reached.
        PreflightError: It is not ready, or serves other models.
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
    """CPU seconds that the serving process itself has taken, its WorkAgents aside; None where it does not tell."""
    response = await http.request("GET", "/metrics")
    for line in response.body.decode(errors="replace").splitlines() if response.status == 200 else []:
        if line.startswith("process_cpu_seconds_total "):
            return float(line.split()[1])
    return None


async def count_tokens(http: HttpClient, text: str) -> int | None:
    """Tokens of `text` alone, without a beginning-of-text token; None where the server has no such route."""
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    response = await http.request("POST", "/tokenize", body)
    try:
        return int(json.loads(response.body)["count"]) if response.status == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
