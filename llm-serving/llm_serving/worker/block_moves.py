"""The block moves of a step: what may be asked for, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llm_serving.core.step import BlockMove, Int32Array, Move
from llm_serving.errors import WorkerError


def check_block_moves(block_moves: Int32Array, num_blocks: int, num_swap_blocks: int) -> None:
    """Makes sure that every move stays inside cache and host pool.

    Raises:
        WorkerError: One does not, or is of no known kind.
    """
    if block_moves.ndim != 2 or block_moves.shape[1] != len(Move._fields):
        raise WorkerError(f"block_moves must be [N, {len(Move._fields)}]. Given: {list(block_moves.shape)}")
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    if (unknown := ~np.isin(kinds, list(BlockMove))).any():
        known = ", ".join(f"{kind.value} {kind.name}" for kind in BlockMove)
        raise WorkerError(f"block_moves must be of the kinds {known}. Given: {kinds[unknown][0]}")
    for column, end, host_kind in ((1, "from", BlockMove.SWAP_IN), (2, "to", BlockMove.SWAP_OUT)):
        ids = block_moves[:, column]
        in_host = kinds == host_kind
        outside = (ids < 0) | (ids >= np.where(in_host, num_swap_blocks, num_blocks))
        if outside.any():
            kind, given = BlockMove(kinds[outside][0]).name, ids[outside][0]
            if in_host[outside][0]:
                place, size, field = "host pool", num_swap_blocks, "num_swap_blocks"
            else:
                place, size, field = "cache", num_blocks, "num_blocks"
            raise WorkerError(
                f"block_moves: {kind} {end} a block of the {place} must name one below `{field}` {size}. Given: {given}"
            )


def runs(block_moves: Int32Array) -> Iterator[tuple[BlockMove, Int32Array]]:
    """Neighbours of one kind, in the order given: (kind, [n, 2] of source and target)."""
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    for run in np.split(block_moves, np.flatnonzero(np.diff(kinds)) + 1):
        yield BlockMove(run[0, 0]), run[:, 1:3]
