"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from llm_serving.core.memory import periodic_heap_trim

MEBI = 2**20
HELPERS = """
import ctypes
from pathlib import Path
from llm_serving.core.memory import return_large_blocks, trim_heap

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
    """What a program that prints bytes prints; it has an allocator of its own, as a server has."""
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", HELPERS + program]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def test_blocks_of_connections_are_mappings_after_a_large_one_was_freed():
    """A body of 4 MiB, then a hundred connections that take 256 KiB each, of which the last stays."""
    kept = growth("""
assert return_large_blocks()
libc.free(take(4 * 2**20))
before = resident()
free_all_but_the_last([take(2**18) for _ in range(100)])
print(resident() - before)
""")
    assert kept < 4 * MEBI


def test_pages_below_what_lives_are_given_back():
    kept = growth("""
before = resident()
free_all_but_the_last([take(30_000) for _ in range(1000)])
trim_heap()
print(resident() - before)
""")
    assert kept < 4 * MEBI


def test_it_happens_again_and_again_while_the_server_runs():
    given, times = threading.Event(), []

    def give():
        times.append(threading.current_thread())
        if len(times) == 3:
            given.set()

    with periodic_heap_trim(give, period_s=0.001):
        assert given.wait(30)
    assert times[0] is not threading.current_thread()
    assert not times[0].is_alive()
