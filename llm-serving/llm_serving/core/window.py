"""How much of a sequence the cache must hold: all of it, or what the model's windows see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_WINDOW: Final = 2**31
"""Tokens: more than any sequence has."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a request needs of the cache.

    A block is needed as long as any layer sees a token of it. So where one layer sees everything, nothing can be given
    back: blocks hold the keys and values of all layers.
    """

    num_tokens: int = NO_WINDOW
    """Tokens that a token sees in the layer that sees farthest, its own included."""
    max_chunk: int = 1
    """Tokens of one request that a step computes, at most."""

    @classmethod
    def from_model(cls, num_tokens: int | None, max_chunk: int, max_model_len: int) -> Window:
        """That of a model, None where a layer sees everything; a window as long as the longest request is none."""
        return cls() if num_tokens is None or num_tokens >= max_model_len else cls(num_tokens, max_chunk)

    @property
    def is_sliding(self) -> bool:
        """Whether anything is ever given back."""
        return self.num_tokens < NO_WINDOW

    def first_block(self, num_computed: int, block_size: int) -> int:
        """The first block that the token behind `num_computed` others sees; those behind it do not see more."""
        return max(0, num_computed + 1 - self.num_tokens) // block_size

    def max_blocks(self, block_size: int, num_blocks: int) -> int:
        """Blocks that a request holds at once, at most: the window of a step's first token, and the step.

        A cache of `num_blocks` that has no room for so many gets shorter steps, as long as it holds the window.
        """
        if not self.is_sliding:
            return NO_WINDOW
        least, most = (_touched(self.num_tokens + beside, block_size) for beside in (0, self.max_chunk - 1))
        return max(least, min(most, num_blocks))

    def max_blocks_of(self, num_tokens: int, block_size: int, num_blocks: int = NO_WINDOW) -> int:
        """Blocks that a request of so many tokens holds at once, at most."""
        return min(-(-num_tokens // block_size), self.max_blocks(block_size, num_blocks))

    def max_request_tokens(self, block_size: int, num_blocks: int) -> int:
        """Tokens of the longest request that a cache of `num_blocks` has room for."""
        return NO_WINDOW if self.max_blocks(block_size, num_blocks) <= num_blocks else num_blocks * block_size

    def min_chunk(self, block_size: int, num_blocks: int) -> int:
        """Tokens of a prompt that a step has room for wherever the window begins, at least."""
        if not self.is_sliding:
            return self.max_chunk
        most = self.max_blocks(block_size, num_blocks)
        return max(1, min(self.max_chunk, (most - 1) * block_size + 2 - self.num_tokens))


def _touched(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens in a row lie in, wherever they begin, at most."""
    return -(-(num_tokens - 1) // block_size) + 1
