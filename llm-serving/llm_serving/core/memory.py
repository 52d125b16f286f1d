"""How the process gives memory that was freed back to the system: glibc keeps most of it unless it is told.

What a system may have none of for the moment: descriptors, memory, processes, threads.

How much memory the system lets a process map, and errors that come of too little.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

M_MMAP_THRESHOLD: Final = -3
"""Of glibc's `malloc.h`."""
LARGE_BYTES: Final = 128 * 1024
"""Blocks of as many bytes are mappings of their own; glibc's own first choice."""
KEPT_BYTES: Final = 2**20
"""Free bytes that are left at the top of the heap."""
PERIOD_S: Final = 1.0
"""Seconds between two times that free pages are given back: the allocator is locked meanwhile, for some 0.3 ms for each
MB there is to give back, and for 0.1 ms where there is none, so often means little at a time."""


def return_large_blocks() -> bool:
    """Has large blocks returned to the system as soon as they are freed; whether the allocator knows how.

    glibc raises its threshold to the size of each mapping that is freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD):
    after the first body of 4 MiB, and the first connection with TLS, whose layer takes 256 KiB, such blocks come from
    the heap, which a small one above them keeps from shrinking. A threshold that was set stays.
    """
    mallopt = _of_allocator("mallopt")
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))


def trim_heap() -> None:
    """Returns all pages of the heap that hold nothing, also those below what lives (malloc_trim(3))."""
    malloc_trim = _of_allocator("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(KEPT_BYTES))


@contextmanager
def periodic_heap_trim(give: Callable[[], None] = trim_heap, period_s: float = PERIOD_S) -> Iterator[None]:
    """Inside, pages that hold nothing are given back again and again, by a thread that holds no lock of Python's."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s):
            give()

    thread = threading.Thread(target=run, name="giving-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _of_allocator(name: str) -> Any:
    """A function of glibc's; None: the C library has none of this name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


_NUMBERS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN))
"""The last one is that of processes."""
_NO_THREAD: Final = "can't start new thread"
"""Python says it by no number."""


def shortage(error: BaseException) -> str | None:
    """What there was too little of, in the words of the system; None: it was something else."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return _NO_THREAD if isinstance(error, RuntimeError) and str(error) == _NO_THREAD else None


ENOUGH_GB: Final = 4
"""For MindSpore and its threads, beside the weights and the blocks."""
_WORDS: Final = ("allocate memory", "bad_alloc", "failed to map", "resource temporarily unavailable")
"""Of errors of frameworks, which have no numbers; small letters."""


def describe_address_space_limit() -> str | None:
    """What a process may map and what to do, where the system sets a limit (`ulimit -v`); None: it sets none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"a process may map {limit / 1e9:.1f} GB (`ulimit -v`, LimitAS of systemd): a WorkAgent needs {ENOUGH_GB} GB "
        "beside its weights and blocks; take the limit away (`ulimit -v unlimited`) or raise it"
    )


def explain_address_space_limit(error: BaseException) -> str | None:
    """The same, where an error that somebody else raised may come of that limit."""
    lacks_memory = shortage(error) is not None or any(each in str(error).lower() for each in _WORDS)
    return describe_address_space_limit() if lacks_memory else None
