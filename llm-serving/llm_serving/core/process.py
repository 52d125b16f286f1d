"""A process of the server: its start, its exit with the parent, its environment, and its memory."""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import psutil

from llm_serving.errors import ConfigError

_PR_SET_PDEATHSIG: Final = 1
DISABLED_KERNELS: Final = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
"""Environment variable with the names of MindSpore's Ascend kernels that the library ATB replaces."""
NEEDED_ATB_KERNELS: Final = ("FlashAttentionScore", "PagedAttention")
"""Kernels that ATB must replace, because MindSpore's PagedAttention accepts no mask with queries [tokens, hidden]."""
COLLECTIVES: Final = {"MS_ENABLE_LCCL": "off", "HCCL_OP_EXPANSION_MODE": "AIV"}
"""Environment variables with which an NPU runs collectives by HCCL on its vector cores, instead of by LCCL."""
DETERMINISTIC: Final = {
    "HCCL_DETERMINISTIC": "strict",
    "LCCL_DETERMINISTIC": "1",
    "CUSTOM_MATMUL_SHUFFLE": "off",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
"""Environment variables with which an NPU adds in a fixed order, and starts sums of matrix products at element 0."""
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 128 * 1024
"""Allocations of at least this many bytes get their own memory mapping: glibc's initial threshold."""
KEPT_BYTES: Final = 2**20
PERIOD_S: Final = 1.0
"""Seconds between two trims. A trim locks the allocator for 0.1 ms, plus 0.3 ms for each MB that it returns."""
_NO_THREAD: Final = "can't start new thread"
ENOUGH_GB: Final = 4
"""Address space in GB that MindSpore and its threads need besides weights and KV blocks."""
_WORDS: Final = ("allocate memory", "bad_alloc", "failed to map", "resource temporarily unavailable")
"""Parts of the messages, in lower case, by which frameworks report a shortage without an errno."""


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package, without the working directory in the search path."""
    return [sys.executable, "-Pm", module, *arguments]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent thread ends. An end before this call has no effect."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_mindspore_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that MindSpore needs on an NPU. Call this before MindSpore is imported."""
    disabled = [name.strip() for name in environment.get(DISABLED_KERNELS, "").split(",") if name.strip()]
    missing = [name for name in NEEDED_ATB_KERNELS if name not in disabled]
    environment[DISABLED_KERNELS] = ",".join([*disabled, *missing])
    for name, value in COLLECTIVES.items():
        environment.setdefault(name, value)
    # Otherwise ranks that wait for each other log two lines a second.
    environment.setdefault("MS_SUBMODULE_LOG_v", "{DISTRIBUTED:3,DEVICE:3}")


def import_optional(module: str, user: str, remedy: str = "") -> ModuleType:
    """Import an optional package. If it is missing, the ConfigError names `user`, which needs it, and the `remedy`."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(f"`{user}` needs the package {package}, which is not installed{remedy}") from None


_NUMBERS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN))
"""Errors that mean a shortage of descriptors or memory. EAGAIN means that there are too many processes or threads."""


def return_large_blocks() -> bool:
    """Let glibc return large allocations to the system when they are freed. Return False for another C library.

    By default, glibc raises its threshold to the size of each freed mapping (mallopt(3), M_MMAP_THRESHOLD). Later
    allocations of this size come from the heap, which cannot shrink below a live allocation.
    """
    mallopt = _of_allocator("mallopt")
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))


def trim_heap() -> None:
    malloc_trim = _of_allocator("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(KEPT_BYTES))


def release_pages(address: int, num_bytes: int) -> None:
    """Release the whole pages in a memory range. Private pages then read as zero; pages of files are read again."""
    madvise = _of_allocator("madvise")
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if madvise is not None and size > 0:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def release_library_pages() -> None:
    """Release unmodified library pages (MindSpore: over 200 MB). A later access reads a page from its file again."""
    start = size = 0
    with suppress(OSError), Path("/proc/self/smaps").open() as mappings:
        for line in mappings:
            name, *values = line.split()
            if not name.endswith(":"):
                start, end = (int(each, 16) for each in name.split("-"))
                is_library = values[0] in ("r-xp", "r--p") and values[3] != "0"
                size = end - start if is_library else 0
            elif name == "Anonymous:" and values[0] == "0" and size:
                release_pages(start, size)


def resident_bytes(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


@contextmanager
def periodic_heap_trim(trim: Callable[[], None] = trim_heap, period_s: float = PERIOD_S) -> Iterator[None]:
    """Return a context in which a thread returns freed memory of the heap to the system every `period_s` seconds."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(period_s):
            trim()

    thread = threading.Thread(target=run, name="heap-trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@cache
def _of_allocator(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


def shortage(error: BaseException) -> str | None:
    """Return the system's text for an error that means a shortage of descriptors, memory or threads, else None."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return _NO_THREAD if isinstance(error, RuntimeError) and str(error) == _NO_THREAD else None


def describe_address_space_limit() -> str | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"a process may map {limit / 1e9:.1f} GB (`ulimit -v`, LimitAS of systemd): a WorkAgent needs {ENOUGH_GB} GB "
        "in addition to weights and blocks: remove the limit (`ulimit -v unlimited`) or raise it"
    )


def explain_address_space_limit(error: BaseException) -> str | None:
    """Return `describe_address_space_limit()` if a limit of the address space may have caused the error, else None."""
    lacks_memory = shortage(error) is not None or any(each in str(error).lower() for each in _WORDS)
    return describe_address_space_limit() if lacks_memory else None
