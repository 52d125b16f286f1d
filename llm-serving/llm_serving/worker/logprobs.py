"""Log-probabilities before penalties, bias and temperature, and token weights whose sums are exact.

Because sums are exact, the order of additions (threads, vector width, filters) cannot change which token is sampled.
The weight of a token is 2^y with y = (value - largest) * log2(e) / temperature, computed in float32 by additions and
multiplications that every IEEE 754 machine rounds alike, and rounded to a multiple of 2^-33. Float64 holds every sum of
up to 2^20 such weights exactly. A token 2^34 times less likely than the best one has weight 0 and is never drawn.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array, TopTokens, no_top_tokens
from llm_serving.worker.model_inputs import all_zero

Float64Array = NDArray[np.float64]

_LARGEST = np.finfo(np.float32).max
_LOG2_E = np.float32(1 / math.log(2))
# Smaller exponents are raised to this one, whose weight is rounded to 0.
_LOWEST = np.float32(-64)
# Adding and then subtracting this number rounds a float32 between -2^22 and 2^22 to an integer.
_ROUND_TO_INTEGER = np.float32(1.5 * 2**23)
# Adding and then subtracting this number rounds a float32 from 0 to 2^-10 to a multiple of 2^-33. Larger ones are such
# multiples already.
_ROUND_TO_QUANTUM = np.float32(2.0**-10)
# Taylor's polynomial of 2^f, highest degree first; for |f| <= 1/2 the rest is below 2^-27.
_COEFFICIENTS = [np.float32(math.log(2) ** k / math.factorial(k)) for k in range(7, 0, -1)]
_MANTISSA_BITS = 23


def weight_scale(temperature: np.float32) -> np.float32:
    """Return the factor that converts a difference of logits into the exponent of a weight. It is always finite."""
    with np.errstate(over="ignore"):
        return min(np.float32(_LOG2_E / temperature), _LARGEST)


def weight_scales(temperatures: Float32Array) -> Float32Array:
    with np.errstate(over="ignore", divide="ignore"):
        return np.minimum(_LOG2_E / temperatures, _LARGEST)


def token_weights(values: Float32Array, largest: np.float32, scale: np.float32) -> Float32Array:
    """Return the weights 2^((`values` - `largest`) * `scale`) [V], as multiples of 2^-33. `values` must not have NaN,
    and `largest`, their maximum, must be finite.
    """
    with np.errstate(over="ignore", under="ignore"):
        y = values - largest
        y *= scale
    np.maximum(y, _LOWEST, out=y)
    rounded = y + _ROUND_TO_INTEGER
    # The low bits of the sum hold the integer. Added to the exponent bits of a float32, it multiplies by 2^integer.
    exponent = rounded.view(np.int32) << _MANTISSA_BITS
    rounded -= _ROUND_TO_INTEGER
    f = np.subtract(y, rounded, out=y)
    power = np.multiply(f, _COEFFICIENTS[0], out=rounded)
    for coefficient in _COEFFICIENTS[1:]:
        power += coefficient
        power *= f
    power += np.float32(1)
    power.view(np.int32)[:] += exponent
    small = np.minimum(power, _ROUND_TO_QUANTUM, out=f)
    power -= small
    small += _ROUND_TO_QUANTUM
    small -= _ROUND_TO_QUANTUM
    power += small
    return power


def keep_heaviest(weights: Float32Array, count: int, descending: Float32Array | None = None) -> Float32Array:
    """Return `weights` with 0 for all but the `count` largest (ties: lowest ids). `descending`: sorted `weights`."""
    if count >= len(weights):
        return weights
    if descending is None:
        descending = np.sort(weights)[::-1]
    threshold = descending[count - 1]
    kept = weights > threshold
    equal = np.flatnonzero(weights == threshold)
    kept[equal[: count - np.count_nonzero(kept)]] = True
    heaviest: Float32Array = weights * kept
    return heaviest


def filter_weights(weights: Float32Array, top_k: int, top_p: float, min_p: np.float32) -> Float32Array:
    """Apply min_p, top_k and top_p, in this order: set the weights of removed tokens to 0, but never the largest."""
    if min_p > 0:
        weights = np.where(weights >= min_p, weights, np.float32(0))
    if top_k > 0:
        weights = keep_heaviest(weights, top_k)
    if top_p < 1:
        descending = np.sort(weights)[::-1]
        cumulative = descending.astype(np.float64).cumsum()
        count = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
        weights = keep_heaviest(weights, count, descending)
    return weights


def keep_typical(weights: Float32Array, exponents: Float32Array, share: float) -> Float32Array:
    """Keep the most typical tokens that have at least the fraction `share` < 1 of the total weight. Set others to 0. A
    token is the more typical, the closer its exponent is to the mean exponent (Meister et al. 2022, section 4). Of
    equally typical tokens, those with the lowest ids are kept. `exponents` [V] holds the logarithm to base 2 of each
    weight before it was rounded.
    """
    (ids,) = np.nonzero(weights > 0)
    kept, logarithms = weights[ids].astype(np.float64), exponents[ids].astype(np.float64)
    # `accumulate` adds one by one; another order of these sums, which are not exact, might choose another token.
    total, moment = np.add.accumulate(kept)[-1], np.add.accumulate(kept * logarithms)[-1]
    distances = np.abs(logarithms - moment / total).astype(np.float32)
    order = np.argsort(distances, kind="stable")
    count = int(np.searchsorted(np.add.accumulate(kept[order]), share * total, side="left")) + 1
    typical: Float32Array = np.zeros_like(weights)
    typical[ids[order[:count]]] = weights[ids[order[:count]]]
    return typical


def draw_token(weights: Float32Array, number: float) -> int:
    """Return the first token whose cumulative weight exceeds `number` (0 to 1 - 2^-53) times the total."""
    cumulative = weights.astype(np.float64).cumsum()
    return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))


_SCALE = weight_scale(np.float32(1))


def total_weight(logits: Float32Array) -> float:
    """Return sum(exp(logits - max(logits))) of one row [V], whose maximum must be finite, from its token weights."""
    return float(token_weights(logits, logits.max(), _SCALE).sum(dtype=np.float64))


def log_normalizers(largest: Float32Array, totals: Float64Array) -> Float64Array:
    """Return log(sum(exp(logits))) of each row from its largest logit and `total_weight`."""
    logarithms = np.array([math.log(total) for total in totals.tolist()])
    normalizers: Float64Array = largest.astype(np.float64) + logarithms
    return normalizers


def most_likely(values: Float32Array, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest values [V], largest first, equal ones by index. No value may be NaN."""
    size = len(values)
    count = min(count, size)
    if count == 1:
        return np.array([values.argmax()])
    if count < size:
        threshold = np.partition(values, size - count)[size - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(size)
    order = np.argsort(-values[candidates], kind="stable")
    ranked: NDArray[np.intp] = candidates[order[:count]]
    return ranked


def logprobs_of(
    logits: Float32Array, chosen: Int32Array, top: Int32Array, largest: Float32Array, totals: Float64Array
) -> tuple[Float32Array, TopTokens]:
    """Return log-probabilities of the sampled tokens, [S], and of the most likely ones, or 0 where `totals` is 0.

    Args:
        logits: [S, V]
        chosen: [S], sampled tokens.
        top: [S, K], most likely tokens. Unused entries are -1.
        largest: [S], largest logits. They are read only where `totals` is not 0.
        totals: [S], `total_weight`, or 0 for samples without a token or without requested log-probabilities.
    """
    logprobs = np.zeros(len(chosen), np.float32)
    if all_zero(totals):
        return logprobs, no_top_tokens(len(chosen))
    rows = np.flatnonzero(totals)
    normalizers = np.zeros(len(chosen))
    normalizers[rows] = log_normalizers(largest[rows], totals[rows])
    kept = top >= 0
    token_ids, rows_of_top = top[kept], np.nonzero(kept)[0]
    with np.errstate(over="ignore"):  # values below the range of float32 become -inf
        logprobs[rows] = logits[rows, chosen[rows]] - normalizers[rows]
        top_logprobs = (logits[rows_of_top, token_ids] - normalizers[rows_of_top]).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return logprobs, TopTokens(offsets, token_ids, top_logprobs)
