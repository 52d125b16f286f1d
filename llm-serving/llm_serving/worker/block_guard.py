"""Checks of each step: copies of KV blocks must name existing blocks, and requests may read only the KV blocks and
recurrent states that were written for them.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import STATE_BEFORE, BlockMove, BlockMoveKind, Int32Array, StateAccess, StepInput
from llm_serving.core.window import ONE_GROUP, CacheGroups
from llm_serving.errors import WorkerError
from llm_serving.transport.shared_memory import MAX_TOKENS_PER_BLOCK
from llm_serving.worker.model_inputs import all_in_range, any_true, first_visible_blocks


class BlockLocation(enum.StrEnum):
    CACHE = "cache"
    HOST = "host pool"
    TRANSFER = "transfer pool"
    STATES = "states"


SOURCE_AND_TARGET: Final = {
    BlockMoveKind.COPY: (BlockLocation.CACHE, BlockLocation.CACHE),
    BlockMoveKind.SWAP_OUT: (BlockLocation.CACHE, BlockLocation.HOST),
    BlockMoveKind.SWAP_IN: (BlockLocation.HOST, BlockLocation.CACHE),
    BlockMoveKind.EXPORT: (BlockLocation.CACHE, BlockLocation.TRANSFER),
    BlockMoveKind.IMPORT: (BlockLocation.TRANSFER, BlockLocation.CACHE),
    BlockMoveKind.EXPORT_STATE: (BlockLocation.STATES, BlockLocation.TRANSFER),
    BlockMoveKind.IMPORT_STATE: (BlockLocation.TRANSFER, BlockLocation.STATES),
}
_SIZES: Final = {
    BlockLocation.CACHE: "num_blocks",
    BlockLocation.HOST: "num_swap_blocks",
    BlockLocation.TRANSFER: "num_transfer_blocks",
    BlockLocation.STATES: "num_state_slots",
}
_EXPORTS: Final = (BlockMoveKind.EXPORT, BlockMoveKind.EXPORT_STATE)


class BlockTags(NamedTuple):
    epochs: Int32Array
    num_written: Int32Array

    @classmethod
    def of_empty(cls, num_blocks: int) -> BlockTags:
        return cls(np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.int32))


class BlockGuard:
    """Checks that rows read only blocks written for them. The tag of a block is its epoch (the number that the master
    gave its allocation) and the number of tokens written to it.

    A row may read a block only if the block has the epoch in the row's block table, and only tokens that were written.
    Two rows may not write one block. The source of a block move, such as a swap-in, must have the epoch and the number
    of tokens that the move names. So the guard detects a bug in the master before it causes wrong text, for example a
    block allocated twice, an outdated block table or a skipped position.
    """

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        groups: CacheGroups = ONE_GROUP,
        transfer: BlockTags | None = None,
        states: BlockTags | None = None,
    ) -> None:
        """`transfer`: tags of the blocks in memory that WorkAgents share. `states`: tags of recurrent-state slots."""
        self._block_size = block_size
        self._groups = groups
        self._num_groups = len(self._groups.windows)
        self._cache = BlockTags.of_empty(num_blocks)
        self._memories = {
            BlockLocation.CACHE: self._cache,
            BlockLocation.HOST: BlockTags.of_empty(num_swap_blocks),
            BlockLocation.TRANSFER: BlockTags.of_empty(0) if transfer is None else transfer,
            BlockLocation.STATES: BlockTags.of_empty(0) if states is None else states,
        }

    def check_ids(self, block_moves: Int32Array, *, exports: bool = False) -> None:
        """Raise WorkerError if a block move (a copy of a KV block or recurrent state) has an unknown kind, or an id
        that its source or target memory lacks (see `SOURCE_AND_TARGET`). If `exports`, each move must copy to the
        transfer pool, the memory that WorkAgents share. Otherwise, no move may copy to it.
        """
        if block_moves.ndim != 2 or block_moves.shape[1] != len(BlockMove._fields):
            raise WorkerError(f"block_moves must be [N, {len(BlockMove._fields)}]. Given: {list(block_moves.shape)}")
        if not len(block_moves):
            return
        kinds = block_moves[:, 0]
        allowed = [kind for kind in BlockMoveKind if (kind in _EXPORTS) == exports]
        if (unknown := ~np.isin(kinds, allowed)).any():
            known = ", ".join(f"{kind.value} {kind.name}" for kind in allowed)
            raise WorkerError(f"block_moves must be of the kinds {known}. Given: {kinds[unknown][0]}")
        for kind in sorted(set(map(BlockMoveKind, kinds.tolist()))):
            moves = block_moves[kinds == kind]
            for column, end, memory in zip((1, 2), ("source", "target"), SOURCE_AND_TARGET[kind], strict=True):
                ids, size = moves[:, column], len(self._memories[memory].epochs)
                outside = (ids < 0) | (ids >= size)
                if outside.any():
                    raise WorkerError(
                        f"block_moves: the {end} of {kind.name} must be a block of the {memory} with an id below "
                        f"`{_SIZES[memory]}` = {size}. Given: {ids[outside][0]}"
                    )

    def move(self, block_moves: Int32Array) -> None:
        """Check the source of each copy before it starts, and tag its target. Raise WorkerError for a wrong source."""
        for move in map(BlockMove._make, block_moves.tolist()):
            source, target = SOURCE_AND_TARGET[BlockMoveKind(move.kind)]
            self._check_source(self._memories[source], move)
            self._memories[target].epochs[move.target] = move.target_epoch
            self._memories[target].num_written[move.target] = move.num_tokens

    def start_exports(self, exports: Int32Array) -> None:
        """Check the sources of the next copies to shared memory. Tag targets unreadable until `finish_exports`."""
        num_written = self._memories[BlockLocation.TRANSFER].num_written
        for move in map(BlockMove._make, exports.tolist()):
            self._check_source(self._memories[SOURCE_AND_TARGET[BlockMoveKind(move.kind)][0]], move)
            num_written[move.target] = 0

    def finish_exports(self, exports: Int32Array) -> None:
        """Tag the blocks that were copied to the transfer pool, so that other WorkAgents can read them from now on."""
        tags = self._memories[BlockLocation.TRANSFER]
        for move in map(BlockMove._make, exports.tolist()):
            tags.epochs[move.target] = move.target_epoch
            tags.num_written[move.target] = min(move.num_tokens, MAX_TOKENS_PER_BLOCK)

    def check_imports(self, block_moves: Int32Array) -> None:
        """After copies from the transfer pool, raise WorkerError if a source was overwritten while it was copied."""
        for move in map(BlockMove._make, block_moves.tolist()):
            if move.kind in (BlockMoveKind.IMPORT, BlockMoveKind.IMPORT_STATE):
                self._check_source(self._memories[BlockLocation.TRANSFER], move)

    def check(self, step: StepInput) -> None:
        """Check the blocks that rows read, and tag the blocks that they write. Raise WorkerError on a mismatch."""
        block_size, num_computed = self._block_size, step.num_computed
        num_tokens = num_computed + step.query_lens
        if self._num_groups > 1:
            num_computed, num_tokens = np.tile(num_computed, self._num_groups), np.tile(num_tokens, self._num_groups)
        starts = np.arange(0, step.block_tables.shape[1] * block_size, block_size, dtype=np.int32)
        num_before = num_computed[:, None] - starts
        num_after = num_tokens[:, None] - starts
        reads = num_before > 0
        if self._groups.is_sliding:
            reads &= starts >= first_visible_blocks(step, block_size, self._groups)[:, None] * block_size
        read, owners = step.block_tables[reads], step.block_epochs[reads]
        missing = self._cache.num_written[read] < np.minimum(num_before[reads], block_size)
        if any_true(missing):
            row = reads.nonzero()[0][missing][0] % step.num_rows
            raise WorkerError(f"row {row} would read more of block {read[missing][0]} than was written")
        self._check_owners(read, owners, reads)
        writes = (num_after > 0) & (num_before < block_size)
        blocks = step.block_tables[writes]
        if len(set(blocks.tolist())) != len(blocks):
            raise WorkerError("two rows would write one block")
        self._cache.epochs[blocks] = step.block_epochs[writes]
        self._check_owners(read, owners, reads)  # again: no row may write what another row reads in this step
        self._cache.num_written[blocks] = np.minimum(num_after[writes], block_size)

    def _check_source(self, source: BlockTags, move: BlockMove) -> None:
        block_id = move.source
        if source.num_written.item(block_id) < min(move.num_tokens, MAX_TOKENS_PER_BLOCK):
            raise WorkerError(f"{BlockMoveKind(move.kind).name} would read more of block {block_id} than was written")
        if source.epochs.item(block_id) != move.source_epoch:
            raise WorkerError(
                f"{BlockMoveKind(move.kind).name} would read block {block_id}, which another owner has written"
            )

    def _check_owners(self, blocks: Int32Array, owners: Int32Array, reads: NDArray[np.bool_]) -> None:
        """Raise WorkerError if a block's epoch differs from the one that the step names in `owners`: another request
        may have written the block. `reads`: mask of the block table entries that hold `blocks`.
        """
        foreign = self._cache.epochs[blocks] != owners
        if any_true(foreign):
            row = reads.nonzero()[0][foreign][0] % (len(reads) // self._num_groups)
            raise WorkerError(f"row {row} would read block {blocks[foreign][0]}, which another owner has written")


NO_SLOT = -1
"""Stands for no slot: the row then starts from a zero state, or the state after the token is not stored."""


class StateGuard:
    """Tags each slot for recurrent states with the epoch (number of its allocation) and the number of tokens of the
    state in it. A row may read a slot only if both are those that the step states for the row.
    """

    def __init__(self, num_slots: int) -> None:
        self.tags = BlockTags.of_empty(num_slots)
        self._epochs, self._num_tokens = self.tags

    def check(self, step: StepInput) -> tuple[Int32Array, Int32Array]:
        """Check which state slots a step reads and writes, and tag the written ones. Raise WorkerError on a mismatch.
        Return the slot that each row reads, [B], and the slot for the state after each token, [T], or `NO_SLOT`.
        """
        accesses = step.states
        if accesses.ndim != 2 or accesses.shape[1] != len(StateAccess._fields):
            raise WorkerError(
                f"the array `states` must have the shape [N, {len(StateAccess._fields)}]. Given: {list(accesses.shape)}"
            )
        rows, tokens, slots, epochs = accesses.T
        if not (all_in_range(rows, step.num_rows) and all_in_range(slots, len(self._epochs))):
            rule = f"states must be of rows below {step.num_rows} and slots below {len(self._epochs)}"
            raise WorkerError(f"{rule}. Given: rows up to {rows.max()}, slots {slots.min()} to {slots.max()}")
        if any_true((tokens < STATE_BEFORE) | (tokens >= step.query_lens[rows])):
            raise WorkerError("a row may store states only after tokens that it computes")
        is_read = tokens == STATE_BEFORE
        state_in = np.full(step.num_rows, NO_SLOT, np.int32)
        state_in[rows[is_read]] = slots[is_read]
        if any_true((state_in == NO_SLOT) != (step.num_computed == 0)):
            raise WorkerError("a row must read a state if, and only if, it has computed tokens")
        self._check_reads(step, rows[is_read], slots[is_read], epochs[is_read])
        written, of_rows = slots[~is_read], rows[~is_read]
        if len(set(written.tolist())) != len(written):
            raise WorkerError("two tokens would store their states in one slot")
        if len(set(zip(rows.tolist(), tokens.tolist(), strict=True))) != len(rows):
            raise WorkerError("a row would read two slots, or store the state after one token in two slots")
        num_readers = np.bincount(slots[is_read], minlength=len(self._epochs))
        disturbs = num_readers[written] > (state_in[of_rows] == written)
        if any_true(disturbs):
            row, slot = of_rows[disturbs][0], written[disturbs][0]
            raise WorkerError(f"row {row} would overwrite slot {slot}, which another row reads")
        ends = np.cumsum(step.query_lens, dtype=np.int32)
        state_out = np.full(step.num_tokens, NO_SLOT, np.int32)
        stored = tokens[~is_read]
        state_out[(ends - step.query_lens)[of_rows] + stored] = written
        self._epochs[written] = epochs[~is_read]
        self._num_tokens[written] = step.num_computed[of_rows] + stored + 1
        return state_in, state_out

    def _check_reads(self, step: StepInput, rows: Int32Array, slots: Int32Array, epochs: Int32Array) -> None:
        foreign = self._epochs[slots] != epochs
        if any_true(foreign):
            row, slot = rows[foreign][0], slots[foreign][0]
            raise WorkerError(f"row {row} would read slot {slot}, which another owner has written")
        others = self._num_tokens[slots] != step.num_computed[rows]
        if any_true(others):
            row, slot = rows[others][0], slots[others][0]
            found, expected = self._num_tokens[slot], step.num_computed[row]
            raise WorkerError(
                f"row {row} would read slot {slot}, whose state covers {found} tokens instead of {expected}"
            )
