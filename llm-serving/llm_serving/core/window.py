"""The sliding window of a model. It determines which part of a sequence the KV cache must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_WINDOW: Final = 2**31
"""A number of tokens that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class Window:
    """The sliding window of a model. Because a block holds all layers, one layer without a window keeps all blocks."""

    num_tokens: int = NO_WINDOW
    """Number of tokens, including itself, to which a token attends in the layer with the largest window."""
    max_chunk: int = 1
    """Maximum number of tokens of one request in a step."""

    @classmethod
    def from_model(cls, num_tokens: int | None, max_chunk: int, max_model_len: int) -> Window:
        """Return the window of a model. `num_tokens`: largest window of its layers; None: some layer attends to all
        tokens. A window of at least `max_model_len` tokens never slides.
        """
        return cls() if num_tokens is None or num_tokens >= max_model_len else cls(num_tokens, max_chunk)

    @property
    def is_sliding(self) -> bool:
        """Whether requests free blocks that the window has passed."""
        return self.num_tokens < NO_WINDOW

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the index of the first block to which the token after the first `num_computed` tokens, or a later one,
        attends.
        """
        return max(0, num_computed + 1 - self.num_tokens) // block_size

    def max_blocks(self, block_size: int, num_blocks: int) -> int:
        """Return the maximum number of blocks that a request holds: for the window before a step's first token, and for
        the step. If a cache of `num_blocks` is too small for both, steps are shorter.
        """
        if not self.is_sliding:
            return NO_WINDOW
        least, most = (_touched(self.num_tokens + beside, block_size) for beside in (0, self.max_chunk - 1))
        return max(least, min(most, num_blocks))

    def max_blocks_of(self, num_tokens: int, block_size: int, num_blocks: int = NO_WINDOW) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` holds at the same time."""
        return min(-(-num_tokens // block_size), self.max_blocks(block_size, num_blocks))

    def max_request_tokens(self, block_size: int, num_blocks: int) -> int:
        """Return the number of tokens of the longest request that fits into a cache of `num_blocks`."""
        return NO_WINDOW if self.max_blocks(block_size, num_blocks) <= num_blocks else num_blocks * block_size

    def min_chunk(self, block_size: int, num_blocks: int) -> int:
        """Return the number of prompt tokens that always fit into a step."""
        if not self.is_sliding:
            return self.max_chunk
        most = self.max_blocks(block_size, num_blocks)
        return max(1, min(self.max_chunk, (most - 1) * block_size + 2 - self.num_tokens))


def _touched(num_tokens: int, block_size: int) -> int:
    """Return the maximum number of blocks that `num_tokens` consecutive tokens occupy."""
    return -(-(num_tokens - 1) // block_size) + 1
