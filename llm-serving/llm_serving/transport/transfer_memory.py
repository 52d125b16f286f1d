"""The memory by which WorkAgents hand blocks of the key/value cache over: those of one machine share it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def transfer_memory() -> Iterator[int]:
    """The descriptor of a new empty file without a name, to be inherited; who has inherited it says how long it is."""
    fd = os.memfd_create("llm_serving_transfer", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
