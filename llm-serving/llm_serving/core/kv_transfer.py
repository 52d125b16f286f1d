"""What a request takes along from the replica that computed its prompt to the one that goes on with it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transfer:
    """Blocks of the transfer pool that hold keys and values of its first tokens, and what it has met so far.

    They stay what they are until who took them over gives them back. Each is told from what stood there before by its
    epoch, which is beside it in the memory itself and is looked at again when the block is read.
    """

    block_ids: tuple[int, ...] = ()
    """In the order of its tokens, as all replicas of the master call them; none: everything is to be computed again."""
    epochs: tuple[int, ...] = ()
    """Of each of them."""
    start: int = 0
    """Blocks of its tokens before these, which no token to come sees."""
    num_tokens: int = 0
    """Whose keys and values are there, those before `start` included."""
    num_waited: int = 0
    """Steps that it has waited for its first place."""
    num_preemptions: int = 0

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Each with its epoch."""
        return list(zip(self.block_ids, self.epochs, strict=True))

    def without_blocks(self) -> Transfer:
        """The same with everything to be computed again."""
        return replace(self, block_ids=(), epochs=(), start=0, num_tokens=0)
