"""The memory in which processes of one machine add up what each computes of a replica."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SEATS_BYTES: Final = 4096
PIECE_BYTES: Final = 2**20
"""As kSeatsBytes and kPieceBytes of kernels/csrc/ranks.h."""


@contextmanager
def rank_memory(num_ranks: int) -> Iterator[int]:
    """The descriptor of a new file without a name, to be inherited; whoever has inherited it keeps it."""
    fd = os.memfd_create("llm_serving_ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, SEATS_BYTES + 2 * num_ranks * PIECE_BYTES)
        yield fd
    finally:
        os.close(fd)
