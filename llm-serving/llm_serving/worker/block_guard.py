"""Whose keys and values a block holds, checked in every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import BlockMove, BlockMoveKind, Int32Array, StepInput
from llm_serving.errors import WorkerError
from llm_serving.worker.kv_cache import SOURCE_AND_TARGET, Memory
from llm_serving.worker.model_inputs import first_seen_blocks, somewhere


class Tags(NamedTuple):
    """What is known of each block of a memory."""

    epochs: Int32Array
    """Of who wrote it; says nothing before that."""
    num_written: Int32Array

    @classmethod
    def of_empty(cls, num_blocks: int) -> Tags:
        return cls(np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.int32))


class BlockGuard:
    """Tags every block with the epoch of who wrote it and the number of tokens written.

    A row may read only what was written under the epoch it names, and no further than was written; two rows may not
    write one block. A move may take only what was written under the epoch it names, as many tokens as it names; its
    target is then written so far, under the other epoch it names. A fault of the master (a block given to two, a table
    of an earlier step, a position skipped) so becomes an error before anything is computed, instead of text that is
    quietly wrong.
    """

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        window: int | None = None,
        transfer: Tags | None = None,
    ) -> None:
        """Knows of nothing that was written.

        Args:
            num_blocks: Of the cache.
            num_swap_blocks: Of the host pool.
            block_size: Tokens of a block.
            window: Tokens that a token sees in any layer, its own included; None: all. What is behind is not read.
            transfer: Of the transfer pool, shared by all who hand blocks over by it; None: nobody does.
        """
        self._block_size = block_size
        self._window = window
        self._cache = Tags.of_empty(num_blocks)
        self._memories = {
            Memory.CACHE: self._cache,
            Memory.HOST: Tags.of_empty(num_swap_blocks),
            Memory.TRANSFER: Tags.of_empty(0) if transfer is None else transfer,
        }

    def move(self, block_moves: Int32Array) -> None:
        """Checks and follows moves that name blocks there are, before they are done.

        Raises:
            WorkerError: A move would take what is not its owner's.
        """
        for move in map(BlockMove._make, block_moves.tolist()):
            source, target = SOURCE_AND_TARGET[BlockMoveKind(move.kind)]
            self._check_source(self._memories[source], move)
            self._memories[target].epochs[move.target] = move.target_epoch
            self._memories[target].num_written[move.target] = move.num_tokens

    def begin_exports(self, exports: Int32Array) -> None:
        """Checks moves to the transfer pool before they are done; until `end_exports` nobody may read their targets.

        Raises:
            WorkerError: A move would take what is not its owner's.
        """
        num_written = self._memories[Memory.TRANSFER].num_written
        for move in map(BlockMove._make, exports.tolist()):
            self._check_source(self._cache, move)
            num_written[move.target] = 0

    def end_exports(self, exports: Int32Array) -> None:
        """The moves are done: others find whose these blocks are, and how much of them counts."""
        tags = self._memories[Memory.TRANSFER]
        for move in map(BlockMove._make, exports.tolist()):
            tags.epochs[move.target] = move.target_epoch
            tags.num_written[move.target] = move.num_tokens

    def check_imports(self, block_moves: Int32Array) -> None:
        """Makes sure that nobody has written what has just been read from the transfer pool.

        Raises:
            WorkerError: Somebody has.
        """
        for move in map(BlockMove._make, block_moves.tolist()):
            if move.kind == BlockMoveKind.IMPORT:
                self._check_source(self._memories[Memory.TRANSFER], move)

    def check(self, step: StepInput) -> None:
        """Checks what the rows of a step are about to read and tags what they are about to write.

        Args:
            step: Its arrays have been checked against each other and the cache.

        Raises:
            WorkerError: A row would read what is not its own, or two rows would write one block.
        """
        block_size = self._block_size
        starts = np.arange(0, step.block_tables.shape[1] * block_size, block_size, dtype=np.int32)
        num_before = step.num_computed[:, None] - starts
        num_after = (step.num_computed + step.query_lens)[:, None] - starts
        reads = num_before > 0
        if self._window is not None:
            reads &= starts >= first_seen_blocks(step, block_size, self._window)[:, None] * block_size
        read, owners = step.block_tables[reads], step.block_epochs[reads]
        missing = self._cache.num_written[read] < np.minimum(num_before[reads], block_size)
        if somewhere(missing):
            row = reads.nonzero()[0][missing][0]
            raise WorkerError(f"row {row} would read more of block {read[missing][0]} than was written")
        self._check_owners(read, owners, reads)
        writes = (num_after > 0) & (num_before < block_size)
        blocks = step.block_tables[writes]
        if len(set(blocks.tolist())) != len(blocks):
            raise WorkerError("two rows would write one block")
        self._cache.epochs[blocks] = step.block_epochs[writes]
        self._check_owners(read, owners, reads)  # nor may a row write what another one reads in this step
        self._cache.num_written[blocks] = np.minimum(num_after[writes], block_size)

    def _check_source(self, source: Tags, move: BlockMove) -> None:
        block_id = move.source
        if source.num_written.item(block_id) < move.num_tokens:
            raise WorkerError(f"{BlockMoveKind(move.kind).name} would take more of block {block_id} than was written")
        if source.epochs.item(block_id) != move.source_epoch:
            raise WorkerError(
                f"{BlockMoveKind(move.kind).name} would take block {block_id}, which somebody else has written"
            )

    def _check_owners(self, blocks: Int32Array, owners: Int32Array, reads: NDArray[np.bool_]) -> None:
        """`owners`: epochs that those who read `blocks` name, in the order of `reads` [B, W]."""
        foreign = self._cache.epochs[blocks] != owners
        if somewhere(foreign):
            row = reads.nonzero()[0][foreign][0]
            raise WorkerError(f"row {row} would read block {blocks[foreign][0]}, which somebody else has written")
