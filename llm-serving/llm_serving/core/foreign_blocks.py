"""Blocks of a request that another replica or the disk cache has computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class DiskPrefix(NamedTuple):
    """The blocks of a request's prompt that the disk cache holds (`kvcache.disk_prefixes`)."""

    num_stored: int
    """Number of the prompt's first blocks that are on the disk."""
    start: int = 0
    """Index in the prompt of the first block of `blocks`."""
    blocks: tuple[tuple[int, int], ...] = ()
    """(block id, epoch) of blocks that were read from the disk into the transfer pool, in token order."""


@dataclass(frozen=True)
class Transfer:
    """The KV blocks of a migrating request's first tokens in the transfer pool, and its history. The blocks do not
    change until the importing replica releases them; the reader checks their epochs.
    """

    block_ids: tuple[int, ...] = ()
    """In token order; empty: everything is recomputed."""
    epochs: tuple[int, ...] = ()
    start: int = 0
    """Number of earlier blocks that are left out, because later tokens do not attend to them."""
    num_tokens: int = 0
    """Number of computed tokens, including those before `start`."""
    num_waited: int = 0
    """Number of steps that the request waited for its first admission."""
    num_preemptions: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(block id, epoch) of each block."""
        return list(zip(self.block_ids, self.epochs, strict=True))

    def without_blocks(self) -> Transfer:
        """Return a copy without blocks, so that everything is recomputed."""
        return replace(self, block_ids=(), epochs=(), start=0, num_tokens=0)
