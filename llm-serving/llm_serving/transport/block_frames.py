"""How many blocks of a transfer pool one frame takes, and how many frames are under way."""

from __future__ import annotations

from typing import Final

PIECE_BYTES: Final = 2**20
"""Of a frame with several blocks, at most."""
FRAMES_UNDER_WAY: Final = 2
"""On each connection, before the first of them is answered: while one is on its way the next one is too."""
MAX_BLOCKS: Final = 256
MAX_TOKENS: Final = 2**16
"""Written of one block; far more than any has."""
_NAMES_BYTES: Final = 2**14
"""Room for the numbers of so many blocks."""


def blocks_a_frame(block_bytes: int) -> int:
    """At least one, however large it is."""
    return min(max(1, PIECE_BYTES // max(block_bytes, 1)), MAX_BLOCKS)


def max_frame_bytes(block_bytes: int) -> int:
    """Longest frame by which blocks travel."""
    return blocks_a_frame(block_bytes) * block_bytes + _NAMES_BYTES
