"""The state that a migrating request takes from the replica of its prefill to the replica of its decode."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transfer:
    """Blocks of the transfer pool with the KV cache of the first tokens of a request, and its history.

    The blocks stay unchanged until the importing replica lets them be reclaimed. The memory holds the epoch of each
    block, and the reader checks it.
    """

    block_ids: tuple[int, ...] = ()
    """In token order; empty: everything is computed again."""
    epochs: tuple[int, ...] = ()
    start: int = 0
    """Number of blocks before these, which later tokens do not see."""
    num_tokens: int = 0
    """Number of computed tokens, including those before `start`."""
    num_waited: int = 0
    """Steps that it waited for its first admission."""
    num_preemptions: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(block id, epoch) of each block."""
        return list(zip(self.block_ids, self.epochs, strict=True))

    def without_blocks(self) -> Transfer:
        """Return a copy with which everything is computed again."""
        return replace(self, block_ids=(), epochs=(), start=0, num_tokens=0)
