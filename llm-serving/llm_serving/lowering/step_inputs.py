"""The inputs of a network: the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from llm_serving.backends.token_drawing import NUM_PARAMETERS

KVCaches = Sequence[tuple[ms.Parameter, ms.Parameter]]

STEP_INPUTS: Final = (
    ("token_ids", 1),  # [T]
    ("positions", 1),  # [T]
    ("slot_mapping", 1),  # [T]
    ("block_tables", 2),  # [B, W]
    ("q_seq_lens", 1),  # [B], rows of each request
    ("batch_valid_length", 1),  # [B], tokens of its context, those rows included
    ("sample_indices", 1),  # [S]
)
"""(name, number of dimensions) of the int32 arguments of `construct`. Attention kernels find lengths by name."""

STATE_INPUTS: Final = (
    ("state_in", 1),  # [B], slot of the state that a request's rows continue; -1: zeros
    ("state_out", 1),  # [T], slot that gets the state after the row; -1: none
)
"""Further inputs of a program with states. No other request of a step may use a slot that the step writes."""

ADAPTER_INPUT: Final = ("adapter_slots", 1)  # [T]
"""Last input of a network with adapter slots: the slot of each row's adapter, or -1 for a row without one."""

NUM_TOKEN_ARRAYS: Final = 4
NUM_TOKEN_COLUMNS: Final = NUM_TOKEN_ARRAYS + NUM_PARAMETERS
"""Number of columns before the block table in `step` of `SINGLE_TOKEN_INPUTS`."""
SINGLE_TOKEN_INPUTS: Final = (("step", 2), ("previous", 1), ("batch_valid_length", 1))
"""The inputs of steps in which each request has one token, with a result for every token.

`step` [T, 19 + W] has for each token its id, position, KV slot, source, the parameters of drawing its sample
(`TokenDrawing`), and the block table of its request, so that one copy to the device is enough. The source is an index
i. If i < P, the token's id is `previous[i]`, from an array [P] on the device; otherwise it is the id i - P in `step`.
"""
TOKEN_ROW_INPUTS: Final = (*SINGLE_TOKEN_INPUTS, ("q_seq_lens", 1), ("table_rows", 1), ("sample_indices", 1))
"""`SINGLE_TOKEN_INPUTS` and three more inputs, for steps in which some requests have no token, or no sample.
`q_seq_lens` [B]: number of tokens of each request, 0 or 1. `table_rows` [B]: for each request, the index of the row of
`step` that holds its block table. `sample_indices` [S]: indices of the tokens whose results are sampled.
"""


def step_inputs_for_rows(count: int) -> tuple[NDArray[np.int32], ...]:
    """Return step inputs of one request with `count` sampled rows, for networks without attention (the LM head)."""
    rows, nothing = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    whole = np.array([count], np.int32)
    return rows, nothing, nothing - 1, np.zeros((1, 1), np.int32), whole, whole, rows


def dynamic(inputs: Sequence[tuple[str, int]]) -> list[ms.Tensor]:
    return [ms.Tensor(shape=[None] * rank, dtype=ms.int32) for _, rank in inputs]


def dynamic_inputs(num_rows: int | None = None) -> list[ms.Tensor]:
    """Return inputs of dynamic size for `Cell.set_inputs`. `num_rows`: number of requests of each step, if fixed."""
    sizes = {"block_tables": (num_rows, None), "q_seq_lens": (num_rows,), "batch_valid_length": (num_rows,)}
    return [ms.Tensor(shape=list(sizes.get(name, (None,) * rank)), dtype=ms.int32) for name, rank in STEP_INPUTS]
