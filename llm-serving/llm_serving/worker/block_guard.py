"""Whose keys and values a block holds, checked in every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import BlockMove, Int32Array, StepInput
from llm_serving.errors import WorkerError
from llm_serving.worker.block_moves import runs

_UNCLAIMED = -1


class BlockGuard:
    """Tags every block with the epoch of who wrote it and the number of tokens written.

    A row may read only what was written under the epoch it names, and no further than was written; two rows may not
    write one block. A fault of the master (a block given to two, a table of an earlier step, a position skipped) so
    becomes an error before anything is computed, instead of text that is quietly wrong.
    """

    def __init__(self, num_blocks: int, num_swap_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._epochs = np.full(num_blocks, _UNCLAIMED, np.int32)
        """A block that something was moved into belongs to the first who reads it."""
        self._num_written = np.zeros(num_blocks, np.int32)
        self._num_written_host = np.zeros(num_swap_blocks, np.int32)

    def move(self, block_moves: Int32Array) -> None:
        """Follows moves that have been checked: what was written moves, the target has a new owner."""
        for kind, pairs in runs(block_moves):
            source = self._num_written_host if kind is BlockMove.SWAP_IN else self._num_written
            target = self._num_written_host if kind is BlockMove.SWAP_OUT else self._num_written
            for source_id, target_id in pairs.tolist():
                target[target_id] = source[source_id]
            if kind is not BlockMove.SWAP_OUT:
                self._epochs[pairs[:, 1]] = _UNCLAIMED

    def check(self, step: StepInput) -> None:
        """Checks what the rows of a step are about to read and tags what they are about to write.

        Args:
            step: Its arrays have been checked against each other and the cache.

        Raises:
            WorkerError: A row would read what is not its own, or two rows would write one block.
        """
        first_tokens = np.arange(step.block_tables.shape[1], dtype=np.int32) * self._block_size
        num_computed = step.num_computed[:, None]
        context_lens = (step.num_computed + step.query_lens)[:, None]
        self._check_read(step, num_computed - first_tokens)
        writes = (first_tokens < context_lens) & (first_tokens + self._block_size > num_computed)
        blocks = step.block_tables[writes]
        if len(set(blocks.tolist())) != len(blocks):
            raise WorkerError("two rows would write one block")
        self._epochs[blocks] = step.block_epochs[writes]
        self._check_owner(step, num_computed > first_tokens)  # nor may a row write what another one reads in this step
        self._num_written[blocks] = np.minimum(context_lens - first_tokens, self._block_size)[writes]

    def _check_read(self, step: StepInput, num_read: Int32Array) -> None:
        """`num_read` [B, W]: tokens each row reads of each of its blocks, as far as it is above 0."""
        reads = num_read > 0
        blocks, epochs = step.block_tables[reads], step.block_epochs[reads]
        unclaimed = self._epochs[blocks] == _UNCLAIMED
        self._epochs[blocks[unclaimed]] = epochs[unclaimed]
        self._check_owner(step, reads)
        missing = self._num_written[blocks] < np.minimum(num_read[reads], self._block_size)
        if np.count_nonzero(missing):
            row = np.nonzero(reads)[0][missing][0]
            raise WorkerError(f"row {row} would read more of block {blocks[missing][0]} than was written")

    def _check_owner(self, step: StepInput, reads: NDArray[np.bool_]) -> None:
        blocks = step.block_tables[reads]
        foreign = self._epochs[blocks] != step.block_epochs[reads]
        if np.count_nonzero(foreign):
            row = np.nonzero(reads)[0][foreign][0]
            raise WorkerError(f"row {row} would read block {blocks[foreign][0]}, which somebody else has written")
