"""Results other than sampled tokens: log-probabilities of given tokens, and pooled hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llm_serving.core.step import Float32Array, Int32Array, ResultKind, SamplingInput, Scores, ScoringInput, TopTokens
from llm_serving.errors import WorkerError
from llm_serving.models.memory import LOGITS_BYTES
from llm_serving.network.weights import PositionEmbedding
from llm_serving.worker.logprobs import log_normalizers, logprobs_of
from llm_serving.worker.model_inputs import NO_TOKENS, ModelInputs, all_in_range, is_partition
from llm_serving.worker.sampler import ChooseTokens
from llm_serving.worker.sampling_reference import SamplingFailure

Head = Callable[[Float32Array], Float32Array]
"""(states [P, H]) -> logits [P, V], C-contiguous."""


class Scored(NamedTuple):
    scores: Scores
    errors: dict[int, str]
    """Index of a result -> error. The entries of `scores` for this result are undefined."""


def check_scoring(scoring: ScoringInput, vocab_size: int) -> None:
    token_ids, count = scoring.token_ids, scoring.num_results
    if not is_partition(scoring.offsets, len(token_ids), count):
        raise WorkerError(f"offsets of scoring must divide {len(token_ids)} ids into {count} parts")
    if not all_in_range(token_ids, vocab_size):
        raise WorkerError(f"token_ids of scoring must be from 0 to {vocab_size - 1}")
    if count and scoring.num_logprobs.min() < 0:
        raise WorkerError(f"num_logprobs of scoring must be at least 0. Given: {scoring.num_logprobs.min()}")


def score(
    states: Float32Array, scoring: ScoringInput, head: Head, vocab_size: int, choose_tokens: ChooseTokens
) -> Scored:
    """Return, for each row of hidden states [P, H], log-probabilities and ranks of the tokens that `scoring` lists for
    it. `head` computes logits, `choose_tokens` the most likely tokens. No row depends on other rows.
    """
    count = scoring.num_results
    logprobs, ranks = np.zeros(len(scoring.token_ids), np.float32), np.zeros(len(scoring.token_ids), np.int32)
    tops: list[TopTokens] = []
    errors: dict[int, str] = {}
    rows_at_once = max(1, LOGITS_BYTES // (4 * vocab_size))
    for start in range(0, count, rows_at_once):
        end = min(count, start + rows_at_once)
        logits = head(states[start:end])
        sampling = SamplingInput.plain(end - start, num_logprobs=scoring.num_logprobs[start:end])
        choices = choose_tokens(logits, sampling, NO_TOKENS)
        for index in np.flatnonzero(choices.failures != SamplingFailure.NONE).tolist():
            largest = choices.largest[index]
            errors[start + index] = f"log-probabilities cannot be computed: the largest logit is {largest}"
        _, top = logprobs_of(logits, choices.token_ids, choices.top_token_ids, choices.largest, choices.total_weights)
        tops.append(top)
        given = slice(scoring.offsets[start], scoring.offsets[end])
        rows = np.repeat(np.arange(end - start), np.diff(scoring.offsets[start : end + 1]))
        fine = choices.total_weights > 0
        normalizers = np.zeros(end - start)
        normalizers[fine] = log_normalizers(choices.largest[fine], choices.total_weights[fine])
        with np.errstate(over="ignore", invalid="ignore"):  # values below the range of float32 become -inf
            logprobs[given] = logits[rows, scoring.token_ids[given]] - normalizers[rows]
        ranks[given] = [
            _rank(logits[row], token_id)
            for row, token_id in zip(rows.tolist(), scoring.token_ids[given].tolist(), strict=True)
        ]
    return Scored(Scores(logprobs, ranks, _concatenate(tops)), errors)


def _concatenate(parts: Sequence[TopTokens]) -> TopTokens:
    lengths = np.concatenate([np.empty(0, np.int32), *(np.diff(part.offsets) for part in parts)])
    return TopTokens(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
    )


def _rank(logits: Float32Array, token_id: int) -> int:
    value = logits[token_id]
    return 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))


def num_states_per_result(result_tokens: Int32Array) -> Int32Array | None:
    """Return how many hidden states each result needs, several for mean pooling, or None if each needs one."""
    of_means = result_tokens[:, 2] == ResultKind.MEAN
    return np.where(of_means, result_tokens[:, 1] + 1, 1).astype(np.int32) if of_means.any() else None


def with_all_states(inputs: ModelInputs, counts: Int32Array) -> ModelInputs:
    """Return a copy that selects, for each result, the last `counts` tokens up to and including its own token."""
    ends = np.cumsum(counts, dtype=np.int32)
    before = np.repeat(ends - counts, counts)
    first = np.repeat(inputs.sample_indices - counts + np.int32(1), counts)
    return replace(inputs, sample_indices=first + np.arange(ends[-1], dtype=np.int32) - before)


def means(states: Float32Array, counts: Int32Array) -> Float32Array:
    """Return the mean of each result's `counts` hidden states, [len(counts), H], summed in float64 in token order."""
    ends = np.cumsum(counts)
    pooled = [states[end - count : end].mean(axis=0, dtype=np.float64) for end, count in zip(ends, counts, strict=True)]
    return np.array(pooled, np.float32)


def with_token_types(inputs: ModelInputs, vocab: int, embedding: PositionEmbedding | None) -> ModelInputs:
    """Split each input id, `token + type * vocab`, into token and type (in BERT: first or second text), and move its
    position to that type's rows of `PositionEmbedding.table`. Without several types, return `inputs` unchanged.
    """
    if embedding is None or embedding.num_types == 1:
        return inputs
    types, token_ids = np.divmod(inputs.token_ids, np.int32(vocab))
    return replace(inputs, token_ids=token_ids, positions=inputs.positions + types * np.int32(embedding.num_positions))
