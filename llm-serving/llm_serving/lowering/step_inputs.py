"""The inputs of a network: the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

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
"""(name, number of dimensions) of the arguments of `construct`, all int32. Ascend's attention kernels find the lengths
by the names.
"""

STATE_INPUTS: Final = (
    ("state_in", 1),  # [B], slot of the state that a request's rows continue; -1: zeros
    ("state_out", 1),  # [T], slot that gets the state after the row; -1: none
)
"""Further inputs of a program whose network has states. If a step stores a state of one request in a slot, no other
request may use that slot in the same step.
"""

ADAPTER_INPUT: Final = ("adapter_slots", 1)  # [T]
"""Last input of a network with adapter slots: the slot of each row's adapter; -1: the row has none."""

NUM_TOKEN_ARRAYS: Final = 4
"""Number of arrays in `tokens` of `SINGLE_TOKEN_INPUTS`: the first three of `STEP_INPUTS`, and the
sources of tokens.
"""
SINGLE_TOKEN_INPUTS: Final = (("tokens", 2), ("previous", 1), ("block_tables", 2), ("batch_valid_length", 1))
"""The inputs of steps in which each request has one token, with a result for every token.

`tokens` is [4, T]. Its last row, the source of each token, is an index i. If i < P, the token's id is `previous[i]`,
from an array [P] on the device; otherwise it is i - P.
"""
TOKEN_ROW_INPUTS: Final = (*SINGLE_TOKEN_INPUTS, ("q_seq_lens", 1), ("sample_indices", 1))
"""`SINGLE_TOKEN_INPUTS` and two more, for steps in which some rows have no token and some tokens have no result."""


def step_inputs_for_rows(count: int) -> tuple[NDArray[np.int32], ...]:
    """Return the inputs of a step of one request whose `count` rows are all sampled. The network has no attention."""
    rows, nothing = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    whole = np.array([count], np.int32)
    return rows, nothing, nothing - 1, np.zeros((1, 1), np.int32), whole, whole, rows


def dynamic(inputs: Sequence[tuple[str, int]]) -> list[ms.Tensor]:
    """Return int32 tensors of which every dimension is dynamic."""
    return [ms.Tensor(shape=[None] * rank, dtype=ms.int32) for _, rank in inputs]


def dynamic_inputs(num_rows: int | None = None) -> list[ms.Tensor]:
    """Return inputs with dynamic shapes for `Cell.set_inputs`, so that the graph is compiled once. `num_rows`: fixed B;
    None: B is dynamic too.
    """
    sizes = {"block_tables": (num_rows, None), "q_seq_lens": (num_rows,), "batch_valid_length": (num_rows,)}
    return [ms.Tensor(shape=list(sizes.get(name, (None,) * rank)), dtype=ms.int32) for name, rank in STEP_INPUTS]
