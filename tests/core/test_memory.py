"""Memory of a process: return of freed memory, shortages, and address space limits."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from llm_serving.core.process import (
    describe_address_space_limit,
    explain_address_space_limit,
    periodic_heap_trim,
    resident_bytes,
    shortage,
)

MEBI = 2**20
HELPERS = """
import ctypes
from pathlib import Path
from llm_serving.core.process import return_large_blocks, trim_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def take(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

def free_all_but_the_last(blocks):
    for block in blocks[:-1]:
        libc.free(block)
"""

pytestmark = pytest.mark.skipif(
    not (hasattr(ctypes.CDLL(None), "malloc_trim") and Path("/proc/self/statm").exists()),
    reason="the C library is not glibc",
)


def growth(program: str) -> int:
    """Run a program and return the bytes that it prints; it has its own allocator, as a server has."""
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", HELPERS + program]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def test_large_allocations_stay_mappings_after_a_larger_one_was_freed():
    """A body of 4 MiB, then a hundred connections that take 256 KiB each, of which the last stays."""
    kept = growth("""
assert return_large_blocks()
libc.free(take(4 * 2**20))
before = resident()
free_all_but_the_last([take(2**18) for _ in range(100)])
print(resident() - before)
""")
    assert kept < 4 * MEBI


def test_free_pages_below_live_allocations_are_returned():
    kept = growth("""
before = resident()
free_all_but_the_last([take(30_000) for _ in range(1000)])
trim_heap()
print(resident() - before)
""")
    assert kept < 4 * MEBI


def test_library_pages_are_unmapped_and_reloaded_on_access():
    kept = growth("""
from llm_serving.core.process import release_library_pages
before = resident()
release_library_pages()
import json, decimal
assert json.loads("[1.5]") == [1.5] and decimal.Decimal(1) / 8 == decimal.Decimal("0.125")
print(resident() - before)
""")
    assert kept < 0


def test_release_of_a_range_frees_whole_pages_only():
    released = growth("""
import mmap
from llm_serving.core.process import release_pages
memory = mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * len(memory))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
release_pages(address + 1, 3 * mmap.PAGESIZE)
print(memory[:].count(0) // mmap.PAGESIZE)
release_pages(address + 1, mmap.PAGESIZE)
""")
    assert released == 2


def test_resident_bytes_sums_processes_and_ignores_ended_ones():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    own = resident_bytes([os.getpid()])
    assert own > MEBI
    assert resident_bytes([os.getpid(), child.pid]) < 2 * own
    assert resident_bytes([child.pid]) == 0


def test_heap_is_trimmed_periodically():
    given, times = threading.Event(), []

    def give():
        times.append(threading.current_thread())
        if len(times) == 3:
            given.set()

    with periodic_heap_trim(give, period_s=0.001):
        assert given.wait(30)
    assert times[0] is not threading.current_thread()
    assert not times[0].is_alive()


@pytest.fixture
def limit(monkeypatch):
    limit = [3_000_000_000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit[0], resource.RLIM_INFINITY))
    return limit


def test_address_space_limit_error_contains_the_remedy(limit):
    assert describe_address_space_limit() == (
        "a process may map 3.0 GB (`ulimit -v`, LimitAS of systemd): a WorkAgent needs 4 GB in addition to weights and "
        "blocks: remove the limit (`ulimit -v unlimited`) or raise it"
    )


@pytest.mark.parametrize(
    ("error", "may_come_of_it"),
    [
        (RuntimeError("Allocate memory failed"), True),
        (RuntimeError("std::bad_alloc"), True),
        (ImportError("x.so: failed to map segment from shared object"), True),
        (RuntimeError("Resource temporarily unavailable"), True),
        (OSError(errno.ENOMEM, "x"), True),
        (MemoryError(), True),
        (RuntimeError("compile failed"), False),
    ],
)
def test_address_space_limit_explains_the_errors_that_it_may_cause(limit, error, may_come_of_it):
    assert explain_address_space_limit(error) == (describe_address_space_limit() if may_come_of_it else None)


def test_errors_without_an_address_space_limit_are_not_explained(limit):
    limit[0] = resource.RLIM_INFINITY
    assert describe_address_space_limit() is explain_address_space_limit(MemoryError()) is None


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(errno.EMFILE, "x"), "Too many open files"),
        (OSError(errno.ENOMEM, "x"), "Cannot allocate memory"),
        (BlockingIOError(errno.EAGAIN, "x"), "Resource temporarily unavailable"),
        (MemoryError(), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(errno.ENOENT, "x"), None),
        (OSError("x"), None),
        (RuntimeError("x"), None),
        (ValueError(), None),
    ],
)
def test_shortage_returns_the_system_error_text_of_exhausted_resources(error, what):
    assert shortage(error) == what
