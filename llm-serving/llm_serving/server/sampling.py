"""From the fields of a request to the engine's `SamplingParams`."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from llm_serving.core.sampling_params import (
    LENGTH_PENALTY,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    RULES,
    ParameterRule,
    SamplingParams,
    Texts,
    Whole,
)
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError, renaming
from llm_serving.server.choices import COUNT, Choices

SEED_STRIDE: Final = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of all choices differ; 2^64 divided by the golden ratio spreads them."""


_BAD_WORDS: Final = Texts(MAX_BAD_WORDS // 2, MAX_STOP_STRING_CHARS)


def sampling_params(
    request: object,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    least_tokens: int = 1,
    **decided: Any,
) -> SamplingParams:
    """Sampling of the first choice.

    A parameter is what its field of the request says. Where that is null or missing, it takes its default; an absent
    seed is drawn.

    Args:
        request: Struct with the fields.
        names: Parameter -> field, where the protocol calls it something else.
        defaults: In place of those of `SamplingParams`.
        least_tokens: Least that `max_tokens` may be.
        decided: Parameters that the route has worked out itself.

    Raises:
        RequestError: A field is outside its range.
    """
    field_of = {name: name for name in RULES} | dict(names or {})
    given = {
        name: value
        for name, field in field_of.items()
        if name not in decided and (value := getattr(request, field, None)) is not None
    }
    with renaming(field_of):
        read = {name: _READERS[name](value) if name in _READERS else value for name, value in given.items()}
        params = SamplingParams(**{"seed": secrets.randbits(64), **(defaults or {}), **read, **decided})
        Whole(least_tokens).checked("max_tokens", params.max_tokens)
        return params


def bad_words(engine: AsyncEngine, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
    """The tokens of texts, as they stand at the beginning of a text and behind a space.

    Raises:
        RequestError: There are too many, or one is empty or too long.
    """
    texts = _BAD_WORDS.checked("bad_words", words or ())
    encode = engine.tokenizer.encode
    sequences = [
        tuple(encode(text, add_special_tokens=False)) for word in texts for text in (word.lstrip(), f" {word.lstrip()}")
    ]
    return tuple(dict.fromkeys(filter(None, sequences)))


def sequences_of(sampling: SamplingParams, choices: Choices) -> list[SamplingParams]:
    """The sampling of each sequence that is generated for a prompt; a beam search is one.

    Args:
        sampling: Of the first choice, as asked for.
        choices: How many answers, and how they are found.
    """
    if choices.beams is not None:
        return [replace(sampling, temperature=0.0)]
    if choices.best_of > choices.n:  # they are compared by their log-probabilities
        sampling = replace(sampling, logprobs=sampling.logprobs or 0)
    return [with_choice_seed(sampling, choice) for choice in range(choices.best_of)]


def with_choice_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of choice 0, 1, ... of the same prompt: its own seed, derived from the request's.

    The prompt is told of once, with the first choice.
    """
    if choice == 0:
        return sampling
    own = copy.copy(sampling)  # all the rest has been checked
    object.__setattr__(own, "seed", (sampling.seed + choice * SEED_STRIDE) & MAX_SEED)
    object.__setattr__(own, "prompt_logprobs", None)
    return own


def _seed(seed: int) -> int:
    """A seed for the engine: negative ones, which some clients send, stand for their two's complement."""
    return int(REQUEST_RULES["seed"].checked("seed", seed)) & MAX_SEED


def _top_k(top_k: int) -> int:
    return 0 if top_k == -1 else top_k


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    """`stop` as a tuple; an empty string means none, as some clients send it."""
    if not stop:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"must hold at most {MAX_STOP_STRINGS} strings", len(strings))
    return tuple(dict.fromkeys(strings))


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError("logit_bias", f"must hold at most {MAX_LOGIT_BIAS} tokens", len(bias))
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError("logit_bias", "must have token ids as keys", key)
    biases = {int(key): value for key, value in bias.items()}
    if len(biases) < len(bias):
        raise RequestError("logit_bias", "must have each token once", len(bias))
    return tuple(biases.items())


REQUEST_RULES: Final[Mapping[str, ParameterRule]] = {
    **RULES,
    "top_k": Whole(-1),
    "seed": Whole(-(2**63), MAX_SEED),
    "n": COUNT,
    "best_of": COUNT,
    "length_penalty": LENGTH_PENALTY,
}
"""What fields of OpenAI requests may be."""
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "seed": _seed,
    "top_k": _top_k,
    "stop": _stop_strings,
    "logit_bias": _logit_bias,
}
"""Parameters whose form in a request is not that of `SamplingParams`."""
