"""Blocks of a request that another replica has computed, or that were read from the disk cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class DiskPrefix(NamedTuple):
    """The blocks of a request's prompt that are in the disk cache."""

    num_stored: int
    """Number of blocks from the start of the prompt that are on disk."""
    start: int = 0
    """Position of the first of `blocks` in the prompt, in blocks."""
    blocks: tuple[tuple[int, int], ...] = ()
    """(block id, epoch) of the blocks that were read from disk into the transfer pool, in token order."""


@dataclass(frozen=True)
class Transfer:
    """The KV blocks of a migrating request in the transfer pool, and the request's history.

    The blocks do not change until the importing replica releases them. The importing WorkAgent checks their epochs.
    """

    block_ids: tuple[int, ...] = ()
    """Ids in token order. Empty: the importing replica recomputes all tokens."""
    epochs: tuple[int, ...] = ()
    start: int = 0
    """Number of blocks before `block_ids` that are not transferred, because later tokens do not attend to them."""
    num_tokens: int = 0
    """Number of computed tokens, including those before `start`."""
    num_waited: int = 0
    """Number of steps that the request waited for its first admission."""
    num_preemptions: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        return list(zip(self.block_ids, self.epochs, strict=True))

    def without_blocks(self) -> Transfer:
        """Return a copy without blocks. The importing replica then recomputes all tokens."""
        return replace(self, block_ids=(), epochs=(), start=0, num_tokens=0)
