"""Which tokens of a step the network returns, and their means."""

from __future__ import annotations

import numpy as np
from llm_serving.core.step import ResultKind
from llm_serving.network.weights import PositionEmbedding
from llm_serving.worker.model_inputs import ModelInputs
from llm_serving.worker.scoring import means, num_states_per_result, with_all_states, with_token_types

RESULTS = np.array([[0, 1, ResultKind.VECTOR], [1, 3, ResultKind.MEAN], [2, 0, ResultKind.MEAN]], np.int32)


def inputs_of(token_ids: list[int], sample_indices: list[int]) -> ModelInputs:
    ids = np.array(token_ids, np.int32)
    positions, rows = np.arange(len(ids), dtype=np.int32), np.zeros(1, np.int32)
    samples = np.array(sample_indices, np.int32)
    return ModelInputs(ids, positions, positions, np.zeros((1, 1), np.int32), rows, rows, samples)


def test_pooling_of_single_tokens_needs_one_state_each():
    assert num_states_per_result(RESULTS[:1]) is None


def test_mean_of_a_row_takes_all_its_tokens():
    counts = num_states_per_result(RESULTS)
    assert counts is not None and counts.tolist() == [1, 4, 1]
    inputs = with_all_states(inputs_of([0] * 7, [1, 5, 6]), counts)
    assert inputs.sample_indices.tolist() == [1, 2, 3, 4, 5, 6]
    states = np.array([[9, 9], [1, 2], [3, 4], [5, 6], [7, 8], [1, 0]], np.float32)
    assert means(states, counts).tolist() == [[9, 9], [4, 5], [1, 0]]


def test_token_types_select_the_position():
    embedding = PositionEmbedding("p", "t", num_positions=40, num_types=2)
    inputs = with_token_types(inputs_of([5, 99, 100, 107], [3]), 100, embedding)
    assert inputs.token_ids.tolist() == [5, 99, 0, 7]
    assert inputs.positions.tolist() == [0, 1, 42, 43]
    whole = inputs_of([5], [0])
    assert with_token_types(whole, 100, None) is whole


def test_position_embedding_adds_the_embedding_of_each_type():
    embedding = PositionEmbedding("p", "t", num_positions=2, num_types=2, first=1)
    stack = np.array([[9], [1], [2], [10], [20]], np.float32)
    assert embedding.sums(stack).tolist() == [[11], [12], [21], [22]]
