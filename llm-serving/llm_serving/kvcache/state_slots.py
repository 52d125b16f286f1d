"""State slots, for models whose layers keep a recurrent state of fixed size instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from llm_serving.core.request import Request
from llm_serving.core.step import STATE_BEFORE, BlockMove, BlockMoveKind, StateAccess
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.transfer_pool import TransferBlock


class StateSlots:
    """Allocates state slots. A slot holds the states of all layers after the computed tokens of a request.

    `max_running` slots are reserved, one for each running request. The spare slots hold checkpoints, states after draft
    tokens, and states of swapped requests. A checkpoint is the state after a full block. It is found by the block's
    hash until its slot is allocated again, and is never overwritten: a request that continues from one stores its next
    state in its own slot.

    A WorkAgent runs steps in order, so the next step may use a freed slot. The requests of a step run concurrently, so
    a slot that one of them reads is freed only after the whole step is planned.
    """

    def __init__(self, num_slots: int, max_running: int, block_size: int, num_pieces: int = 1) -> None:
        assert num_slots >= max_running, f"{num_slots} slots cannot hold the states of {max_running} requests"
        self.pool = BlockPool(num_slots)
        self.max_running = max_running
        self.num_pieces = num_pieces
        self._block_size = block_size
        self._own: dict[str, int] = {}
        self._swapped: set[str] = set()
        self._sources: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        """Request id -> slots of the states after each draft token of its step in flight."""
        self._checkpoint_ends: dict[str, list[int]] = {}
        """Request id -> prompt lengths, in tokens, at which checkpoints are stored, if there are any."""
        self._latest: dict[str, tuple[int, int]] = {}
        self._unconfirmed: dict[str, list[tuple[int, int]]] = {}
        """Request id -> (number of tokens, slot) of checkpoints that a step in flight stores."""
        self._accesses: list[StateAccess] = []
        self._read: list[int] = []

    @property
    def num_spare(self) -> int:
        """Number of free slots that are not reserved for requests that may start to run."""
        return self.pool.num_free_blocks - (self.max_running - len(self._own) + len(self._swapped))

    def is_checkpoint(self, block_hash: bytes) -> bool:
        """Return whether a request can continue from a state stored after the block with this hash. If no request uses
        the state's slot, that slot counts as spare, so at least one slot must be spare (`num_spare`).
        """
        slot = self.pool.find_cached(block_hash)
        return slot is not None and (self.pool.ref_count(slot) > 0 or self.num_spare > 0)

    def num_common_tokens(self, other: Request, num_tokens: int) -> int:
        """Return how many of `num_tokens` common prefix tokens are reusable after `other` computes its prompt."""
        checkpoint = self._prompt_checkpoint(other)
        return checkpoint if checkpoint <= num_tokens else 0

    def admit(
        self, request: Request, hashes: Sequence[bytes] | None, num_shared: int, is_cached: Callable[[bytes], bool]
    ) -> None:
        """Give a request its own slot. The request continues from the checkpoint after its first `num_shared` blocks.

        Plan to store checkpoints after two prefixes that later requests probably share: the prompt's cached KV blocks,
        and all its full blocks. `hashes`: hashes of all blocks that the request may share; None: no checkpoints.
        """
        request_id = request.request_id
        if num_shared and hashes is not None:
            source = self.pool.find_cached(hashes[num_shared - 1])
            assert source is not None, f"request {request_id} would continue from a lost checkpoint"
            self.pool.add_references([source])
            self._sources[request_id] = source
        (self._own[request_id],) = self.pool.allocate(1)
        if hashes is not None:
            num_cached = next((at for at, each in enumerate(hashes) if not is_cached(each)), len(hashes))
            ends = {num_cached * self._block_size, self._prompt_checkpoint(request)}
            self._checkpoint_ends[request_id] = [each for each in sorted(ends) if each > num_shared * self._block_size]

    def admit_import(self, request_id: str, pieces: Iterable[TransferBlock], num_tokens: int) -> list[BlockMove]:
        """Give an imported request a slot. Return the copies that fill it from `pieces`, the blocks with its state."""
        (slot,) = self.pool.allocate(1)
        self._own[request_id] = slot
        kind, epoch = int(BlockMoveKind.IMPORT_STATE), self.pool.epoch(slot)
        return [BlockMove(kind, block_id, slot, each, epoch, num_tokens) for block_id, each in pieces]

    def export(self, request_id: str, pieces: Iterable[TransferBlock], num_tokens: int) -> list[BlockMove]:
        slot = self._sources.get(request_id, self._own[request_id])
        kind, epoch = int(BlockMoveKind.EXPORT_STATE), self.pool.epoch(slot)
        return [BlockMove(kind, slot, block_id, epoch, each, num_tokens) for block_id, each in pieces]

    def swap_in(self, request_id: str) -> None:
        self._swapped.remove(request_id)

    @property
    def can_swap_out(self) -> bool:
        """Whether a request can be swapped out: it keeps its slot, so another one must be spare for a new request."""
        return self.num_spare > 1

    def swap_out(self, request_id: str) -> None:
        self._swapped.add(request_id)
        self.pool.free(self._drafts.pop(request_id, ()))
        self.pool.free(slot for _, slot in self._unconfirmed.pop(request_id, ()))

    def free(self, request_id: str) -> None:
        if request_id not in self._own:
            return
        slots = [self._own.pop(request_id), *self._drafts.pop(request_id, ())]
        slots += [slot for _, slot in self._unconfirmed.pop(request_id, ())]
        if request_id in self._sources:
            slots.append(self._sources.pop(request_id))
        self._swapped.discard(request_id)
        self._checkpoint_ends.pop(request_id, None)
        self._latest.pop(request_id, None)
        self.pool.free(slots)

    def reset(self) -> None:
        """Drop all checkpoints and planned reads and writes of states, because the WorkAgent has lost the states."""
        assert not self._own, "a request without blocks has a state"
        self._accesses.clear()
        self.pool.free(self._read)
        self._read.clear()
        self.pool.clear_hashes()

    # --- steps ------------------------------------------------------------------------------------------------------

    def add_drafts(self, request_id: str, num_drafts: int) -> None:
        """Allocate slots for the states after draft tokens. Call this before `add_row`."""
        self._drafts[request_id] = self.pool.allocate(num_drafts)

    def add_row(self, row: int, request_id: str, start: int, query_len: int) -> None:
        """Plan the state reads and writes of a step's request number `row`, for `query_len` tokens, drafts last."""
        own, source, drafts = self._own[request_id], self._sources.pop(request_id, None), self._drafts.get(request_id)
        if start:
            self._access(row, STATE_BEFORE, own if source is None else source)
        if source is not None:
            self._read.append(source)
        if request_id in self._checkpoint_ends:
            self._add_checkpoints(row, request_id, start, query_len)
        last = query_len - 1
        if drafts is not None:
            last -= len(drafts)
            for token, slot in enumerate(drafts, last + 1):
                self._access(row, token, slot)
        if request_id not in self._sources:
            self._access(row, last, own)

    def pop_accesses(self) -> list[StateAccess]:
        """Return the state reads and writes planned since the last call, and release the checkpoints that they read."""
        accesses, self._accesses = self._accesses, []
        self.pool.free(self._read)
        self._read.clear()
        return accesses

    def accept_drafts(self, request_id: str, num_accepted: int) -> None:
        """Continue from the state after the first `num_accepted` draft tokens. Free the slots of later ones."""
        slots = self._drafts.pop(request_id, None)
        if slots is None:
            return
        if num_accepted:
            own = self._own[request_id]
            self._own[request_id], slots[num_accepted - 1] = slots[num_accepted - 1], own
        self.pool.free(slots)

    def confirm(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Let other requests find the request's stored checkpoints. `hashes`: hashes of its computed blocks."""
        for num_tokens, slot in self._unconfirmed.pop(request_id, ()):
            if num_tokens <= len(hashes) * self._block_size:
                self.pool.register_hash(slot, self.pool.epoch(slot), hashes[num_tokens // self._block_size - 1])
                self.pool.free([slot])
            else:
                self._unconfirmed.setdefault(request_id, []).append((num_tokens, slot))

    def check_integrity(self, with_table: Iterable[str], swapped: Iterable[str]) -> None:
        assert self._swapped == set(swapped), "the requests with swapped states are not the swapped requests"
        assert self._own.keys() == {*with_table, *self._swapped}, (
            "a request has blocks and no state, or a state and no blocks"
        )
        assert self.num_spare >= 0, "too few slots are free for the states of further running requests"
        unconfirmed = (slot for each in self._unconfirmed.values() for _, slot in each)
        drafts = chain.from_iterable(self._drafts.values())
        self.pool.check_integrity([*self._own.values(), *self._sources.values(), *drafts, *unconfirmed, *self._read])

    def _add_checkpoints(self, row: int, request_id: str, start: int, query_len: int) -> None:
        """Plan the checkpoints that request number `row` of a step stores.

        In the prompt, it stores one after each length in `_checkpoint_ends`. In the output, it stores one when a
        decoded token completes a block, and drops the output's previous checkpoint.
        """
        ends = self._checkpoint_ends[request_id]
        is_output = query_len == 1 and (start + 1) % self._block_size == 0 and start + 1 not in ends
        if is_output:
            ends = [start + 1]
            slot, epoch = self._latest.pop(request_id, (0, 0))
            if self.pool.epoch(slot) == epoch and self.pool.ref_count(slot) == 0:
                self.pool.forget_hash(slot)
        for end in ends:
            if not start < end <= start + query_len or self.num_spare < 1:
                continue
            (slot,) = self.pool.allocate(1)
            self._unconfirmed.setdefault(request_id, []).append((end, slot))
            self._access(row, end - start - 1, slot)
            if end == start + query_len:
                self.pool.add_references([slot])
                self._sources[request_id] = slot
            if is_output:
                self._latest[request_id] = slot, self.pool.epoch(slot)

    def _prompt_checkpoint(self, request: Request) -> int:
        return (request.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _access(self, row: int, token: int, slot: int) -> None:
        access = (row, token, slot, self.pool.epoch(slot))
        self._accesses.append(tuple.__new__(StateAccess, access))  # half the cost of calling StateAccess
