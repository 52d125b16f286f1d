"""Sampling of tokens in NumPy: the reference, and the fallback without the operator library.

Steps for one row: penalties, bias, allowed tokens, temperature, min_p, top_k, top_p, typical_p, draw. Random numbers
come from a counter-based generator: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011), section 3.3. The same (seed, position) always gives the same number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array, SamplingInput
from llm_serving.worker.logprobs import (
    draw_token,
    filter_weights,
    keep_typical,
    most_likely,
    token_weights,
    total_weight,
    weight_scale,
)

UInt64Array = NDArray[np.uint64]

_LARGEST = np.finfo(np.float32).max
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: tuple[UInt64Array, ...], key: tuple[UInt64Array, UInt64Array]) -> tuple[UInt64Array, ...]:
    """Compute ten rounds of Philox on n counters and keys. Each 32-bit word is stored in 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 -> 64 bit products: the reason to hold words in 64 bits.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_WORD
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def uniform(seeds: UInt64Array, positions: NDArray[Any]) -> NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each (seed, position), the key and counter of Philox."""
    zero = np.zeros(len(seeds), np.uint64)
    counter = (positions.astype(np.uint64), zero, zero, zero)
    high, low, _, _ = philox4x32(counter, (seeds & _LOW_WORD, seeds >> _WORD_BITS))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))  # 32 + 21 bits
    return bits.astype(np.float64) * 2.0**-53


class SamplingFailure(enum.IntEnum):
    NONE = 0
    LOGITS = 1
    """The largest logit is NaN or infinite."""
    ADJUSTED = 2
    """The largest logit is infinite or NaN after penalties and bias."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens sampled for S rows, and the values from which their log-probabilities are computed."""

    token_ids: Int32Array  # [S], -1 after a failure
    failures: Int32Array  # [S] of `SamplingFailure`
    largest: Float32Array  # [S], the largest logit; NaN if any is
    total_weights: NDArray[np.float64]  # [S], `logprobs.total_weight`; 0 where no log-probabilities are wanted
    top_token_ids: Int32Array  # [S, K], K = the largest num_logprobs, most likely first; -1 past a row's own number

    @classmethod
    def unset(cls, sampling: SamplingInput) -> SampledTokens:
        num_samples = sampling.num_samples
        width = max(int(sampling.num_logprobs.max(initial=0)), 0)
        return cls(
            np.empty(num_samples, np.int32),
            np.empty(num_samples, np.int32),
            np.empty(num_samples, np.float32),
            np.empty(num_samples, np.float64),
            np.empty((num_samples, width), np.int32),
        )


def choose_tokens(logits: Float32Array, sampling: SamplingInput, history: Int32Array) -> SampledTokens:
    """Sample one token for each row of logits ([S, V], not changed). `history` must hold only known token ids."""
    choices = SampledTokens.unset(sampling)
    choices.token_ids.fill(-1)
    choices.failures.fill(SamplingFailure.NONE)
    choices.total_weights.fill(0)
    choices.top_token_ids.fill(-1)
    best = logits.argmax(axis=1)  # the first NaN, if there is one; among equals the lowest id
    draws = uniform(sampling.seed, sampling.position)
    for row in range(sampling.num_samples):
        choices.largest[row] = logits[row, best[row]]
        if not np.isfinite(choices.largest[row]):
            choices.failures[row] = SamplingFailure.LOGITS
            continue
        token = _choose(logits[row], int(best[row]), row, sampling, history, float(draws[row]))
        if token is None:
            choices.failures[row] = SamplingFailure.ADJUSTED
            continue
        choices.token_ids[row] = token
        if sampling.num_logprobs[row] >= 0:
            choices.total_weights[row] = total_weight(logits[row])
            count = min(int(sampling.num_logprobs[row]), logits.shape[1])
            if count:
                choices.top_token_ids[row, :count] = most_likely(logits[row], count)
    return choices


def _choose(
    values: Float32Array, best: int, row: int, sampling: SamplingInput, history: Int32Array, number: float
) -> int | None:
    """Return the token sampled from the logits `values` [V] by the random `number`, or None if penalties, bias and
    allowed tokens leave none. `best`: index of the largest logit, which must be finite.
    """
    tokens = history[sampling.history_offsets[row] : sampling.history_offsets[row + 1]]
    biased = slice(sampling.bias_offsets[row], sampling.bias_offsets[row + 1])
    allowed = sampling.allowed_words[sampling.allowed_offsets[row] : sampling.allowed_offsets[row + 1]]
    if tokens.size or biased.start < biased.stop or allowed.size:
        values = values.copy()
        # A row with infinities or NaN fails; no warning is needed.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            _penalize(
                values,
                tokens,
                tokens[sampling.history_prompt_lens[row] :],
                sampling.repetition_penalty[row],
                sampling.presence_penalty[row],
                sampling.frequency_penalty[row],
            )
            np.add.at(values, sampling.bias_token_ids[biased], sampling.bias_values[biased])
        if allowed.size:
            _forbid_others(values, allowed)
        best = int(values.argmax())
        if not np.isfinite(values[best]):
            return None
    temperature, top_k = sampling.temperature[row], int(sampling.top_k[row])
    # top_k of 1 is greedy.
    if not temperature > 0 or top_k == 1:
        return best
    scale = weight_scale(temperature)
    weights = token_weights(values, values[best], scale)
    weights = filter_weights(weights, top_k, float(sampling.top_p[row]), sampling.min_p[row])
    if sampling.typical_p[row] < 1:
        with np.errstate(over="ignore"):  # the exponents of forbidden tokens
            exponents = (values - values[best]) * scale
        weights = keep_typical(weights, exponents, float(sampling.typical_p[row]))
    return draw_token(weights, number)


def _forbid_others(values: Float32Array, allowed: Int32Array) -> None:
    bits = np.unpackbits(allowed.astype("<i4").view(np.uint8), count=len(values), bitorder="little")
    values[bits == 0] = -np.inf


def _penalize(
    values: Float32Array,
    tokens: Int32Array,
    output: Int32Array,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    """Apply the penalties to the logits `values`, in place. Presence and frequency penalties apply to the tokens in
    `output`. The repetition penalty (Keskar et al. 2019, section 4.1) applies to all `tokens`. As in later
    implementations, it divides positive logits and multiplies negative ones; the paper divides all.
    """
    if repetition != 1:
        seen = np.unique(tokens)
        before = values[seen]
        after = np.where(before > 0, before / repetition, before * repetition)
        # A finite logit stays finite.
        values[seen] = np.where(np.isinf(before), before, np.clip(after, -_LARGEST, _LARGEST))
    if presence != 0 or frequency != 0:
        generated, counts = np.unique(output, return_counts=True)
        values[generated] -= presence + frequency * counts.astype(np.float32)
