"""Groups of layers of the KV cache. All layers of a group attend to the same window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

NO_WINDOW: Final = 2**31


class LayerWindow(NamedTuple):
    num_tokens: int = 0
    """Number of tokens that a token attends to, including itself. 0 means all earlier tokens."""
    is_chunked: bool = False
    """Whether windows do not overlap (Llama 4): they begin at multiples of `num_tokens`."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which tokens the layers of a group attend to. A KV block of a group holds keys and values of all its layers."""

    num_tokens: int = NO_WINDOW
    """Maximum number of tokens, including itself, that a token attends to."""
    max_chunk: int = 1
    is_chunked: bool = False

    @property
    def is_sliding(self) -> bool:
        return self.num_tokens < NO_WINDOW

    def first_block(self, num_computed: int, block_size: int) -> int:
        """Return the index of the first block that any token after the first `num_computed` tokens attends to."""
        if self.is_chunked:
            return num_computed // self.num_tokens * self.num_tokens // block_size
        return max(0, num_computed + 1 - self.num_tokens) // block_size

    def max_blocks(self, block_size: int, num_blocks: int) -> int:
        """Return the maximum number of blocks that a request holds: those of its window, and those of one step's new
        tokens. Without a window, return `NO_WINDOW`. `num_blocks`: the group's share of the cache. A request holds more
        only if its window alone needs more.
        """
        if not self.is_sliding:
            return NO_WINDOW
        least, most = (_touched(self.num_tokens + beside, block_size) for beside in (0, self.max_chunk - 1))
        return max(least, min(most, num_blocks))


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of layers of a KV cache, largest window first. All their block tables use blocks of one pool."""

    windows: tuple[Window, ...] = (Window(),)

    @classmethod
    def of(cls, windows: Sequence[LayerWindow], max_chunk: int, max_model_len: int) -> CacheGroups:
        """Return a group per window. Windows of >= `max_model_len` tokens never slide. `max_chunk`: tokens per step."""
        return cls(
            tuple(
                Window(each.num_tokens, max_chunk, each.is_chunked) if 0 < each.num_tokens < max_model_len else Window()
                for each in windows
            )
        )

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def is_sliding(self) -> bool:
        return any(each.is_sliding for each in self.windows)

    def max_blocks(self, block_size: int, num_blocks: int) -> list[int]:
        """Return the maximum number of blocks of a request, for each group. `NO_WINDOW` means no limit."""
        return [each.max_blocks(block_size, num_blocks // len(self)) for each in self.windows]

    def max_blocks_of(self, num_tokens: int, block_size: int, num_blocks: int = NO_WINDOW) -> int:
        """Return the most blocks a request of `num_tokens` holds in a cache of `num_blocks`, summed over the groups."""
        return self._held(-(-num_tokens // block_size), self.max_blocks(block_size, num_blocks))

    def max_request_tokens(self, block_size: int, num_blocks: int) -> int:
        """Return the length in tokens of the longest request that fits into a cache of `num_blocks`."""
        most = self.max_blocks(block_size, num_blocks)
        if sum(most) <= num_blocks:
            return NO_WINDOW
        low, high = 0, num_blocks
        while low < high:  # the largest number of entries of a table
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._held(middle, most) <= num_blocks else (low, middle - 1)
        return low * block_size

    def min_chunk(self, block_size: int, num_blocks: int) -> int:
        """Return the length in tokens of a prompt chunk that always fits into the blocks that a request may hold."""
        chunks = [
            min(window.max_chunk, (most - 1) * block_size + 2 - window.num_tokens)
            for window, most in zip(self.windows, self.max_blocks(block_size, num_blocks), strict=True)
            if window.is_sliding
        ]
        return max(1, min(chunks, default=1))

    @staticmethod
    def _held(num_entries: int, most: Sequence[int]) -> int:
        return sum(min(num_entries, each) for each in most)


ONE_GROUP: Final = CacheGroups()


def _touched(num_tokens: int, block_size: int) -> int:
    return -(-(num_tokens - 1) // block_size) + 1
