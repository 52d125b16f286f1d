"""What the two OpenAI generation routes share: identity of an answer, model names, usage, ends."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelNotFoundError, RequestError
from llm_serving.server.schemas import GenerationRequest, PromptTokensDetails, Usage

LEGACY_MODEL_NAMES: Final = ("llama2", "internlm")
"""Names of older routes; they mean the served model, whatever it is."""
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True)
class Identity:
    """What every piece of one answer repeats."""

    id: str
    request_id: str
    created: int
    model: str

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id}


def identify(engine: AsyncEngine, http_request: Request, request: GenerationRequest, prefix: str) -> Identity:
    """The answer's id: the client's (`request_id`, or the header `x-request-id` if it is one), otherwise a random one.

    Raises:
        RequestError: `request_id` is malformed.
    """
    request_id = request.request_id
    if request_id is not None and not REQUEST_ID.fullmatch(request_id):
        raise RequestError("request_id", "must be 1 to 128 letters, digits or any of . _ : -", request_id)
    if request_id is None:
        header = http_request.headers.get("x-request-id", "")
        request_id = header if REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
    return Identity(f"{prefix}-{request_id}", request_id, int(time.time()), engine.config.model.model_name)


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raises ModelNotFoundError unless the name is absent or means the served model."""
    served = engine.config.model.model_name
    if name and name != served and name not in LEGACY_MODEL_NAMES:
        raise ModelNotFoundError("model", f"must be {served}, the model that is served", name)


def check_stream_options(request: GenerationRequest) -> tuple[bool, bool]:
    """(usage at the end, usage in every piece)."""
    options = request.stream_options
    if options is None:
        return False, False
    if not request.stream:
        raise RequestError("stream_options", "must be given with stream: true only")
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


class UsageCounter:
    """Tokens of one answer; each prompt counts once, however many choices it has."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompts: dict[int, tuple[int, int]] = {}
        self._outputs: dict[int, int] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        self._prompts[index // self._n] = (output.num_prompt_tokens, output.num_cached_tokens)
        self._outputs[index] = output.num_output_tokens

    def total(self) -> Usage:
        num_prompt = sum(count for count, _ in self._prompts.values())
        return _usage(num_prompt, sum(self._outputs.values()), sum(cached for _, cached in self._prompts.values()))


def usage_so_far(output: RequestOutput) -> Usage:
    """Usage of one choice up to a piece of it."""
    return _usage(output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
