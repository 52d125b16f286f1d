"""Log-probabilities of the model's own distribution: before penalties, bias and temperature."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import TopTokens, no_top_tokens
from llm_serving.worker.array_checks import are_zero
from llm_serving.worker.token_weights import token_weights, weight_scale

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]

_SCALE = weight_scale(np.float32(1))


def total_weight(logits: Float32Array) -> float:
    """sum(exp(logits - the largest)) of one row ([V], the largest finite), as its weights give it."""
    return float(token_weights(logits, logits.max(), _SCALE).sum(dtype=np.float64))


def log_normalizers(largest: Float32Array, totals: Float64Array) -> Float64Array:
    """log(sum(exp(logits))) of rows, from the largest logit and `total_weight` of each; all [rows].

    One logarithm after the other: those NumPy computes together may differ in the last bit.
    """
    logarithms = np.array([math.log(total) for total in totals.tolist()])
    normalizers: Float64Array = largest.astype(np.float64) + logarithms
    return normalizers


def most_likely(values: Float32Array, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest of `values` ([V], no NaN), largest first, among equals the lowest index first."""
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
    """Log-probabilities of chosen and of most likely tokens, as `StepOutput` wants them.

    Args:
        logits: [S, V]
        chosen: [S]
        top: [S, K], -1 in places without a token.
        largest: [S] the largest logit; read where `totals` is not 0.
        totals: [S] `total_weight`; 0 for samples without a token and those that want no log-probabilities.

    Returns:
        [S], 0 where there is none; the most likely ones.
    """
    logprobs = np.zeros(len(chosen), np.float32)
    if are_zero(totals):
        return logprobs, no_top_tokens(len(chosen))
    rows = np.flatnonzero(totals)
    normalizers = np.zeros(len(chosen))
    normalizers[rows] = log_normalizers(largest[rows], totals[rows])
    kept = top >= 0
    token_ids, rows_of_top = top[kept], np.nonzero(kept)[0]
    with np.errstate(over="ignore"):  # what float32 does not hold becomes -inf
        logprobs[rows] = logits[rows, chosen[rows]] - normalizers[rows]
        top_logprobs = (logits[rows_of_top, token_ids] - normalizers[rows_of_top]).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return logprobs, TopTokens(offsets, token_ids, top_logprobs)
