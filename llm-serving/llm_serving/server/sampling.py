"""From the fields of a request to the engine's `SamplingParams`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Final, TypeVar

from llm_serving.core.sampling_params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_STRINGS, SamplingParams
from llm_serving.errors import RequestError
from llm_serving.server.schemas import GenerationRequest

T = TypeVar("T")

SEED_STRIDE: Final = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of all choices differ; 2^64 divided by the golden ratio spreads them."""


def sampling_params(request: GenerationRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """Sampling of the first choice; absent fields take their defaults, an absent seed is drawn.

    Raises:
        RequestError: A field is outside its range.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_default(request.min_tokens, 0),
        temperature=_default(request.temperature, 1.0),
        top_k=0 if request.top_k == -1 else _default(request.top_k, 0),
        top_p=_default(request.top_p, 1.0),
        min_p=_default(request.min_p, 0.0),
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        presence_penalty=_default(request.presence_penalty, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias),
        seed=seed_or_random(request.seed),
        stop=stop_strings(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        skip_special_tokens=_default(request.skip_special_tokens, True),
    )


def with_choice_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of choice 0, 1, ... of the same prompt: its own seed, derived from the request's."""
    return sampling if choice == 0 else replace(sampling, seed=(sampling.seed + choice * SEED_STRIDE) & MAX_SEED)


def seed_or_random(seed: int | None) -> int:
    """A seed for the engine: negative ones, which some clients send, stand for their two's complement."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed <= MAX_SEED:
        raise RequestError("seed", f"must be an integer from {-(2**63)} to {MAX_SEED}", seed)
    return seed & MAX_SEED


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple; an empty string means none, as some clients send it."""
    if not stop:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"must hold at most {MAX_STOP_STRINGS} strings", len(strings))
    return tuple(dict.fromkeys(strings))


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError("logit_bias", f"must hold at most {MAX_LOGIT_BIAS} tokens", len(bias))
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("logit_bias", "must have token ids as keys", key)
    return tuple((int(key), value) for key, value in bias.items())


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
