"""Pooling of hidden states: which of them the network returns, and their means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llm_serving.core.step import Float32Array, Int32Array, ResultKind
from llm_serving.network.weights import PositionEmbedding
from llm_serving.worker.model_inputs import ModelInputs


def num_states_per_result(result_tokens: Int32Array) -> Int32Array | None:
    """Return how many hidden states each result of a step needs; None: each needs one."""
    of_means = result_tokens[:, 2] == ResultKind.MEAN
    return np.where(of_means, result_tokens[:, 1] + 1, 1).astype(np.int32) if of_means.any() else None


def with_all_states(inputs: ModelInputs, counts: Int32Array) -> ModelInputs:
    """Return a copy of inputs that selects, for each result, the last `counts` tokens up to its selected token."""
    ends = np.cumsum(counts, dtype=np.int32)
    before = np.repeat(ends - counts, counts)
    first = np.repeat(inputs.sample_indices - counts + np.int32(1), counts)
    return replace(inputs, sample_indices=first + np.arange(ends[-1], dtype=np.int32) - before)


def means(states: Float32Array, counts: Int32Array) -> Float32Array:
    """Return the mean of each result's hidden states, [len(counts), H]. Float64 sums are in the order of tokens."""
    ends = np.cumsum(counts)
    pooled = [states[end - count : end].mean(axis=0, dtype=np.float64) for end, count in zip(ends, counts, strict=True)]
    return np.array(pooled, np.float32)


def with_token_types(inputs: ModelInputs, vocab: int, embedding: PositionEmbedding | None) -> ModelInputs:
    """Return inputs for a model with token types.

    An id includes the type as id // `vocab`. The result has plain ids, and positions that index a table by type and
    position.
    """
    if embedding is None or embedding.num_types == 1:
        return inputs
    types, token_ids = np.divmod(inputs.token_ids, np.int32(vocab))
    return replace(inputs, token_ids=token_ids, positions=inputs.positions + types * np.int32(embedding.num_positions))
