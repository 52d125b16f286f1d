"""From logits to tokens: NumPy, and every row for itself.

The same row of logits with the same sampling parameters gives the same token whatever else is in the batch: reductions
run along contiguous rows only, and random numbers depend on (seed, position) alone.

Order of the steps for one row: penalties, bias, temperature, min_p, top_k, top_p, choice. Log-probabilities are those
of the model's own logits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import SamplingInput, StepOutput
from llm_serving.errors import WorkerError
from llm_serving.worker.logprobs import log_normalizers, most_likely
from llm_serving.worker.model_inputs import resolve_token_ids
from llm_serving.worker.philox import uniform

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]
IntArray = NDArray[np.intp]

# Tokens ranked at first for top_p, and the factor by which a ranking grows that does not reach it: a full sort of the
# vocabulary costs twenty times as much as the ranking most distributions need.
_FIRST_RANKING = 256
_RANKING_GROWTH = 8
# Tokens whose weights are summed to one number in the first of the two levels of `_choose_from_all`.
_WEIGHTS_PER_SUM = 128


def check_sampling(sampling: SamplingInput, vocab_size: int) -> None:
    """Refuses what would reach outside the logits, before anything of the step is computed.

    Raises:
        WorkerError: Offsets do not cut their lists, or a token id lies outside the vocabulary.
    """
    for name, offsets, token_ids in (
        ("history", sampling.history_offsets, sampling.history_token_ids),
        ("bias", sampling.bias_offsets, sampling.bias_token_ids),
    ):
        if len(offsets) != sampling.num_samples + 1 or offsets[0] != 0 or offsets[-1] != len(token_ids):
            raise WorkerError(
                f"{name}_offsets must cut {len(token_ids)} ids into {sampling.num_samples} parts. "
                f"Given: {offsets.tolist()[:8]}"
            )
        if token_ids.size and ((offsets[1:] < offsets[:-1]).any() or token_ids.max() >= vocab_size):
            raise WorkerError(f"{name}_offsets must not fall and {name}_token_ids must be below {vocab_size}")
    if sampling.bias_token_ids.size and sampling.bias_token_ids.min() < 0:
        raise WorkerError(f"bias_token_ids must be at least 0. Given: {sampling.bias_token_ids.min()}")


def sample(step: int, logits: Float32Array, sampling: SamplingInput, previous: Int32Array) -> StepOutput:
    """Chooses one token for each row of logits.

    Args:
        step: Number of the step, for the output.
        logits: [S, V] C-contiguous; read only.
        sampling: How to choose; passed `check_sampling`.
        previous: Tokens of the previous step, for histories that end in a reference to it.

    Returns:
        The tokens; rows whose logits allow no choice are in `row_errors`.
    """
    num_samples = sampling.num_samples
    all_rows = np.arange(num_samples)
    chosen = logits.argmax(axis=1)  # the first NaN, if there is one; among equals the lowest id
    best = logits[all_rows, chosen]
    row_errors: dict[int, str] = {}
    if not np.isfinite(best).all():
        for row in np.flatnonzero(~np.isfinite(best)):
            row_errors[int(row)] = f"the model's logits allow no choice: the largest is {best[row]}"

    adjusted: dict[int, Float32Array] = {}
    if sampling.history_token_ids.size or sampling.bias_token_ids.size:
        adjusted = _adjusted_rows(logits, sampling, previous, row_errors)
        for row, values in adjusted.items():
            chosen[row] = values.argmax()
            if not np.isfinite(values[chosen[row]]):
                row_errors[row] = "penalties and bias leave no token to choose"

    # top_k of 1 leaves nothing to chance.
    random = (sampling.temperature > 0) & (sampling.top_k != 1)
    if random.any():
        rows = np.array([row for row in np.flatnonzero(random) if row not in row_errors], np.intp)
        if rows.size:
            chosen[rows] = _choose_randomly(rows, logits, adjusted, sampling)

    token_ids = chosen.astype(np.int32)
    for row in row_errors:
        token_ids[row] = -1
    logprobs, top_token_ids, top_logprobs = _logprobs(logits, token_ids, sampling.num_logprobs)
    return StepOutput(step, token_ids, logprobs, top_token_ids, top_logprobs, row_errors)


def _adjusted_rows(
    logits: Float32Array, sampling: SamplingInput, previous: Int32Array, row_errors: dict[int, str]
) -> dict[int, Float32Array]:
    """Copies of the rows that penalties or bias change, changed."""
    history = resolve_token_ids(sampling.history_token_ids, previous)
    has_change = (np.diff(sampling.history_offsets) > 0) | (np.diff(sampling.bias_offsets) > 0)
    adjusted: dict[int, Float32Array] = {}
    for row in np.flatnonzero(has_change).tolist():
        if row in row_errors:
            continue
        values = logits[row].copy()
        tokens = history[sampling.history_offsets[row] : sampling.history_offsets[row + 1]]
        _penalize(
            values,
            tokens,
            tokens[sampling.history_prompt_lens[row] :],
            sampling.repetition_penalty[row],
            sampling.presence_penalty[row],
            sampling.frequency_penalty[row],
        )
        biased = slice(sampling.bias_offsets[row], sampling.bias_offsets[row + 1])
        np.add.at(values, sampling.bias_token_ids[biased], sampling.bias_values[biased])
        adjusted[row] = values
    return adjusted


def _penalize(
    values: Float32Array,
    tokens: Int32Array,
    output: Int32Array,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    """Lowers in place the logits of tokens that were there before.

    Repetition (Keskar et al. 2019, section 4.1, with the sign rule of later practice) looks at prompt and output,
    presence and frequency at the output alone.
    """
    if repetition != 1:
        seen = np.unique(tokens)
        before = values[seen]
        values[seen] = np.where(before > 0, before / repetition, before * repetition)
    if presence != 0 or frequency != 0:
        generated, counts = np.unique(output, return_counts=True)
        values[generated] -= presence + frequency * counts.astype(np.float32)


def _choose_randomly(
    rows: IntArray, logits: Float32Array, adjusted: dict[int, Float32Array], sampling: SamplingInput
) -> IntArray:
    """One draw for each of `rows`, by inverting the cumulative distribution at a number of (seed, position)."""
    vocab_size = logits.shape[1]
    draws = uniform(sampling.seed[rows], sampling.position[rows])
    # Zeros after the vocabulary make every row a whole number of sums.
    padded_size = -(-vocab_size // _WEIGHTS_PER_SUM) * _WEIGHTS_PER_SUM
    padded = np.zeros((len(rows), padded_size), np.float32)
    weights = padded[:, :vocab_size]
    for index, row in enumerate(rows.tolist()):
        values = adjusted.get(row)
        if values is None:
            values = logits[row]
        # weight = exp((logit - largest) / temperature): 1 for the most likely token, never overflowing.
        target = weights[index]
        np.subtract(values, values.max(), out=target)
        np.divide(target, sampling.temperature[row], out=target)
        np.exp(target, out=target)

    top_k, top_p, min_p = sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
    if not filtered.any():
        return _choose_from_all(padded, draws)
    chosen = np.empty(len(rows), np.intp)
    for index in np.flatnonzero(filtered).tolist():
        ranked, cumulative = _keep(weights[index], int(top_k[index]), float(top_p[index]), float(min_p[index]))
        place = np.searchsorted(cumulative, draws[index] * cumulative[-1], side="right")
        chosen[index] = ranked[min(int(place), len(ranked) - 1)]
    free = np.flatnonzero(~filtered)
    if free.size:
        chosen[free] = _choose_from_all(padded[free], draws[free])
    return chosen


def _choose_from_all(weights: Float32Array, draws: Float64Array) -> IntArray:
    """Inverts the cumulative weights of whole rows in two levels: sums of a few weights, then within one such sum.

    Args:
        weights: [rows, n * _WEIGHTS_PER_SUM]
        draws: [rows] in [0, 1)
    """
    num_rows = len(weights)
    all_rows = np.arange(num_rows)
    groups = weights.reshape(num_rows, -1, _WEIGHTS_PER_SUM)
    cumulative = groups.sum(axis=2).cumsum(axis=1, dtype=np.float64)
    targets = draws * cumulative[:, -1]
    # A draw just below 1 may round up to the whole: that means the last group with any weight.
    last_group = (cumulative < cumulative[:, -1:]).sum(axis=1)
    group = np.minimum((cumulative <= targets[:, None]).sum(axis=1), last_group)
    within = groups[all_rows, group].cumsum(axis=1, dtype=np.float64)
    before = np.where(group > 0, cumulative[all_rows, group - 1], 0.0)
    offset = (within <= (targets - before)[:, None]).sum(axis=1)
    # The two levels round differently: a target past the end of its group means the last token with any weight.
    last = (within < within[:, -1:]).sum(axis=1)
    chosen: IntArray = group * _WEIGHTS_PER_SUM + np.minimum(offset, last)
    return chosen


def _keep(weights: Float32Array, top_k: int, top_p: float, min_p: float) -> tuple[IntArray, Float64Array]:
    """The tokens that pass the filters.

    Args:
        weights: [V] relative probabilities, the largest is 1.
        top_k, top_p, min_p: As in `SamplingInput`.

    Returns:
        Token ids, heaviest first (among equals the lowest id), and their cumulative weights; at least one.
    """
    # Both limits keep a prefix of the ranking, so they meet in one number.
    passing = weights >= min_p if min_p > 0 else weights > 0
    limit = int(np.count_nonzero(passing))
    if 0 < top_k < limit:
        limit = top_k
        total = None
    else:
        passed = weights[passing] if min_p > 0 else weights
        total = float(passed.sum(dtype=np.float64))
    if top_p >= 1:
        ranked = most_likely(weights, limit)
        return ranked, weights[ranked].cumsum(dtype=np.float64)
    size = limit if total is None else min(_FIRST_RANKING, limit)
    while True:
        ranked = most_likely(weights, size)
        cumulative = weights[ranked].cumsum(dtype=np.float64)
        wanted = top_p * (cumulative[-1] if total is None else total)
        if cumulative[-1] >= wanted or size == limit:
            break
        size = min(size * _RANKING_GROWTH, limit)
    num_kept = min(int(np.searchsorted(cumulative, wanted, side="left")) + 1, size)
    return ranked[:num_kept], cumulative[:num_kept]


def _logprobs(
    logits: Float32Array, token_ids: Int32Array, num_logprobs: Int32Array
) -> tuple[Float32Array, Int32Array, Float32Array]:
    """Log-probabilities of the chosen tokens and of the most likely ones, as `StepOutput` wants them.

    Places past a row's own `num_logprobs` hold -1 and -inf.
    """
    num_samples = len(token_ids)
    width = max(int(num_logprobs.max(initial=0)), 0)
    logprobs = np.zeros(num_samples, np.float32)
    top_token_ids = np.full((num_samples, width), -1, np.int32)
    top_logprobs = np.full((num_samples, width), -np.inf, np.float32)
    rows = np.flatnonzero((num_logprobs >= 0) & (token_ids >= 0))
    if rows.size:
        normalizers = log_normalizers(logits[rows])
        logprobs[rows] = logits[rows, token_ids[rows]] - normalizers
        for row, normalizer in zip(rows.tolist(), normalizers.tolist(), strict=True):
            count = min(int(num_logprobs[row]), logits.shape[1])
            if count:
                ids = most_likely(logits[row], count)
                top_token_ids[row, :count] = ids
                top_logprobs[row, :count] = logits[row, ids].astype(np.float64) - normalizer
    return logprobs, top_token_ids, top_logprobs
