"""Request fields as `SamplingParams`, and the choices of a response: samples, the best of several samples, or beams."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import (
    DEFAULTS,
    LENGTH_PENALTY,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    RULES,
    BeamSearchParams,
    ParameterRule,
    SamplingParams,
    Texts,
    Whole,
)
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.protocols.openai.schemas import GenerationRequest

MAX_N: Final = 128
MAX_CHOICES: Final = 512
"""Maximum number of sequences of one HTTP request: prompts times `best_of`."""
COUNT: Final = Whole(1, MAX_N)


class Choices(NamedTuple):
    n: int = 1
    best_of: int = 1
    beams: BeamSearchParams | None = None

    @property
    def counted_by(self) -> str:
        return "best_of" if self.best_of > self.n else "n"


ONE_CHOICE: Final = Choices()


class ChoiceOutput(NamedTuple):
    choice: int
    """Index of the prompt times `n`, plus index of the choice for that prompt."""
    output: RequestOutput


SEED_STRIDE: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, which spreads the seeds of choices. It is odd, so that all seeds differ."""
SAME_NAMES: Final = {name: name for name in RULES}
"""Parameter -> field of the request, for protocols whose fields have the names of `SamplingParams`."""
_BAD_WORDS: Final = Texts(MAX_BAD_WORDS // 2, MAX_STOP_STRING_CHARS)
_NEUTRAL: Final = {
    "temperature": 0.0,
    **{name: DEFAULTS[name] for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
}
"""Field -> its only value, besides null, that beam search allows, because it ranks by unmodified logprobs."""


def sampling_params(
    request: object,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    least_tokens: int = 1,
    **decided: Any,
) -> SamplingParams:
    """Return the sampling parameters of a request's first choice. A missing seed is drawn at random. `names` maps
    parameters to request fields with other names. `defaults` replace the defaults of `SamplingParams`. `least_tokens`
    is the minimum of `max_tokens`. The route sets the parameters `decided`; the request's fields for them are not read.
    Raise RequestError if a field is outside its range.
    """
    field_of = SAME_NAMES if names is None else {**SAME_NAMES, **names}
    values: dict[str, Any] = {"seed": None, **(defaults or {})}
    try:
        for name, field in field_of.items():
            if name not in decided and (value := getattr(request, field, None)) is not None:
                values[name] = _READERS[name](value) if name in _READERS else value
        if values["seed"] is None:
            values["seed"] = secrets.randbits(64)
        params = SamplingParams(**{**values, **decided})
        Whole(least_tokens).checked("max_tokens", params.max_tokens)
    except RequestError as error:
        raise error.renamed_by(field_of) from None
    return params


def choices_of(request: GenerationRequest, num_prompts: int) -> Choices:
    """Return how many choices a request wants, and how to select them. Raise RequestError for invalid fields."""
    n = 1 if request.n is None else request.n
    best_of = n if request.best_of is None else request.best_of
    for name, value in (("n", n), ("best_of", best_of)):
        COUNT.checked(name, value)
        if num_prompts * value > MAX_CHOICES:
            rule = f"times the number of prompts must be at most {MAX_CHOICES}"
            raise RequestError(name, rule, num_prompts * value)
    if best_of < n:
        raise RequestError("best_of", f"must be at least `n`, which is {n}", best_of)
    if request.use_beam_search:
        return Choices(n, best_of, _beam_search(request, n, best_of))
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        value = getattr(request, name)
        if value not in (None, neutral):
            raise RequestError(name, "requires use_beam_search: true", value)
    if request.stream and best_of > n:
        raise RequestError("best_of", f"must equal `n`, which is {n}, if `stream` is true", best_of)
    return Choices(n, best_of)


def _beam_search(request: GenerationRequest, n: int, width: int) -> BeamSearchParams:
    if request.stream:
        raise RequestError("stream", "must be false with use_beam_search", True)
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        if value not in (None, neutral):
            raise RequestError(name, f"must be {neutral:g} with use_beam_search", value)
    return BeamSearchParams(
        width=width,
        num_returned=n,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=bool(request.early_stopping),
    )


async def bad_words(engine: AsyncEngine, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each text, with and without a space before it. Raise RequestError if a text is empty."""
    return await asyncio.to_thread(_encode_words, engine, words) if words else ()


def _encode_words(engine: AsyncEngine, words: list[str]) -> tuple[tuple[int, ...], ...]:
    texts = _BAD_WORDS.checked("bad_words", words)
    encode = engine.tokenizer.encode
    sequences = [
        tuple(encode(text, add_special_tokens=False)) for word in texts for text in (word.lstrip(), f" {word.lstrip()}")
    ]
    return tuple(dict.fromkeys(filter(None, sequences)))


def sequences_of(sampling: SamplingParams, choices: Choices) -> list[SamplingParams]:
    if choices.beams is not None:
        return [replace(sampling, temperature=0.0)]
    if choices.best_of > choices.n:  # sequences are ranked by their logprobs
        sampling = replace(sampling, logprobs=sampling.logprobs or 0)
    return [with_choice_seed(sampling, choice) for choice in range(choices.best_of)]


def with_choice_seed(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of choice 0, 1, ... of a prompt. Each choice has a seed derived from the request's."""
    if choice == 0:
        return sampling
    own = copy.copy(sampling)  # no second validation: the original parameters have passed it
    object.__setattr__(own, "seed", (sampling.seed + choice * SEED_STRIDE) & MAX_SEED)
    object.__setattr__(own, "prompt_logprobs", None)
    return own


def _seed(seed: int) -> int:
    """Convert a negative seed, which some clients send, to the unsigned 64-bit integer with the same bits."""
    return int(REQUEST_RULES["seed"].checked("seed", seed)) & MAX_SEED


def _top_k(top_k: int) -> int:
    return 0 if top_k == -1 else top_k


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
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
        raise RequestError("logit_bias", "must name each token only once", len(bias))
    return tuple(biases.items())


REQUEST_RULES: Final[Mapping[str, ParameterRule]] = {
    **RULES,
    "top_k": Whole(-1),
    "seed": Whole(-(2**63), MAX_SEED),
    "n": COUNT,
    "best_of": COUNT,
    "length_penalty": LENGTH_PENALTY,
}
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "seed": _seed,
    "top_k": _top_k,
    "stop": _stop_strings,
    "logit_bias": _logit_bias,
}


async def select_best(
    outputs: AsyncIterator[ChoiceOutput], choices: Choices, *, with_logprobs: bool
) -> AsyncIterator[ChoiceOutput]:
    """For each prompt, yield the `n` of `best_of` sequences with the highest mean logprob per token, best first."""
    by_sequence: dict[int, list[RequestOutput]] = {}
    async for index, output in outputs:
        if output.failed:
            yield ChoiceOutput(index // choices.best_of * choices.n, output)
        by_sequence.setdefault(index, []).append(output)
    whole, means = [], []
    for index in sorted(by_sequence):
        whole.append(join_pieces(by_sequence[index]))
        logprobs = whole[-1].logprobs
        means.append(sum(token.logprob for token in logprobs) / max(len(logprobs), 1))
        await asyncio.sleep(0)  # a sequence may have thousands of outputs: let other requests run
    for start in range(0, len(whole), choices.best_of):
        prompt_logprobs = whole[start].prompt_logprobs
        ranked = sorted(range(start, start + choices.best_of), key=lambda index: -means[index])
        for rank, output in enumerate([whole[index] for index in ranked[: choices.n]]):
            selected = msgspec.structs.replace(
                output,
                logprobs=output.logprobs if with_logprobs else (),
                prompt_logprobs=None if rank else prompt_logprobs,
            )
            yield ChoiceOutput(start // choices.best_of * choices.n + rank, selected)


async def select_beams(outputs: AsyncIterator[ChoiceOutput], choices: Choices) -> AsyncIterator[ChoiceOutput]:
    """Yield the `n` best sequences of each prompt, best first, from the final output of its beam search."""
    async for prompt, output in outputs:
        if output.finished:
            for rank, beam in enumerate(output.beams or (output,)):  # a failed search has no beams
                yield ChoiceOutput(prompt * choices.n + rank, beam)
