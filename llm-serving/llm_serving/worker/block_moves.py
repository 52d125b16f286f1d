"""The block moves of a step: what may be asked for, and which of them belong together."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

import numpy as np

from llm_serving.core.step import BlockMove, Int32Array, Move
from llm_serving.errors import WorkerError


class Memory(enum.StrEnum):
    """Where blocks lie."""

    CACHE = "cache"
    HOST = "host pool"
    TRANSFER = "transfer pool"


SOURCE_AND_TARGET: Final = {
    BlockMove.COPY: (Memory.CACHE, Memory.CACHE),
    BlockMove.SWAP_OUT: (Memory.CACHE, Memory.HOST),
    BlockMove.SWAP_IN: (Memory.HOST, Memory.CACHE),
    BlockMove.EXPORT: (Memory.CACHE, Memory.TRANSFER),
    BlockMove.IMPORT: (Memory.TRANSFER, Memory.CACHE),
}
_SIZES: Final = {
    Memory.CACHE: "num_blocks",
    Memory.HOST: "num_swap_blocks",
    Memory.TRANSFER: "num_transfer_blocks",
}


def check_block_moves(
    block_moves: Int32Array,
    num_blocks: int,
    num_swap_blocks: int,
    num_transfer_blocks: int = 0,
    *,
    exports: bool = False,
) -> None:
    """Makes sure that every move stays inside cache, host pool and transfer pool.

    With `exports`, all must be of the kind EXPORT; otherwise none may be.

    Raises:
        WorkerError: One does not, or is of no known kind.
    """
    if block_moves.ndim != 2 or block_moves.shape[1] != len(Move._fields):
        raise WorkerError(f"block_moves must be [N, {len(Move._fields)}]. Given: {list(block_moves.shape)}")
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    allowed = [kind for kind in BlockMove if (kind is BlockMove.EXPORT) == exports]
    if (unknown := ~np.isin(kinds, allowed)).any():
        known = ", ".join(f"{kind.value} {kind.name}" for kind in allowed)
        raise WorkerError(f"block_moves must be of the kinds {known}. Given: {kinds[unknown][0]}")
    sizes = {Memory.CACHE: num_blocks, Memory.HOST: num_swap_blocks, Memory.TRANSFER: num_transfer_blocks}
    for kind in sorted(set(map(BlockMove, kinds.tolist()))):
        moves = block_moves[kinds == kind]
        for column, end, memory in zip((1, 2), ("from", "to"), SOURCE_AND_TARGET[kind], strict=True):
            ids, size = moves[:, column], sizes[memory]
            outside = (ids < 0) | (ids >= size)
            if outside.any():
                raise WorkerError(
                    f"block_moves: {kind.name} {end} a block of the {memory} must name one below `{_SIZES[memory]}` "
                    f"{size}. Given: {ids[outside][0]}"
                )


def runs(block_moves: Int32Array) -> Iterator[tuple[BlockMove, Int32Array]]:
    """Neighbours of one kind, in the order given: (kind, [n, 2] of source and target)."""
    if not len(block_moves):
        return
    kinds = block_moves[:, 0]
    for run in np.split(block_moves, np.flatnonzero(np.diff(kinds)) + 1):
        yield BlockMove(run[0, 0]), run[:, 1:3]
