import ctypes
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from llm_serving.errors import KernelError
from llm_serving.kernels import library
from llm_serving.worker.sampler import LibrarySampler
from support.decoder_calls import create_decoder, mixed_step
from support.kernel_calls import call, empty, integers, scalar, typed
from support.program_calls import llama_of, parameters, run, status_of_program
from support.step_factories import sampling_input

CHUNK = 1 << 20
"""Bytes of an item of `llm_read_memory`."""


@contextmanager
def no_more_memory_than(num_bytes: int) -> Iterator[None]:
    """In addition to the memory that the process has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def add(size: int, seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(-99, 99, (2, 1, size))
    y = empty((1, size), "float32")
    call("AddExt", typed(a, "float32"), typed(b, "float32"), scalar(1, "int64"), y)
    assert np.array_equal(y.array, a + b)


def status_of_shapes(operator: str, parameters: list[tuple[np.ndarray, str, list[int]] | None]) -> int:
    """As `status_of`, of parameters that say they have other shapes than their arrays."""
    count = len(parameters)
    given = [each or (np.empty(0), "none", []) for each in parameters]
    pointers = (ctypes.c_void_p * count)(*(each and each[0].ctypes.data for each in parameters))
    ranks = (ctypes.c_int * count)(*(len(shape) for _, _, shape in given))
    shapes = [(ctypes.c_int64 * max(1, len(shape)))(*shape) for _, _, shape in given]
    of_shapes = (ctypes.c_void_p * count)(*map(ctypes.addressof, shapes))
    dtypes = (ctypes.c_char_p * count)(*(dtype.encode() for _, dtype, _ in given))
    status: int = getattr(library.load(), operator)(count, pointers, ranks, of_shapes, dtypes, None, None)
    return status


def test_thread_pool_runs_short_loops_with_changing_thread_counts() -> None:
    for threads in (1, 2, 5, 3, 1, 4):
        with library.use_threads(threads):
            for seed in range(60):
                add(40_000 + 997 * seed, seed)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_thread_pool_runs_every_item_once(threads: int) -> None:
    words = np.random.default_rng(threads).integers(0, 1 << 63, 64 * CHUNK // 8, dtype=np.uint64)
    for count in (0, 1, 2, 3, 5, 8, 13, 50, 64):
        expected = np.bitwise_xor.reduce(words[: count * CHUNK // 8 : 8])
        with library.use_threads(threads):
            for _ in range(5):
                # A word of each line, by exclusive or: what is read twice is taken out again.
                assert library.load().llm_read_memory(words.ctypes.data, count * CHUNK, 2) == expected


def test_thread_pool_separates_concurrent_loops() -> None:
    failures: list[AssertionError] = []

    def run(first: int) -> None:
        try:
            for seed in range(first, first + 60):
                add(50_000, seed)
        except AssertionError as error:
            failures.append(error)

    with library.use_threads(2):
        callers = [threading.Thread(target=run, args=(1000 * i,)) for i in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failures


def test_out_of_memory_fails_one_call_only() -> None:
    runnable = llama_of(create_decoder("float32", 16, attention_bias=False, mlp_bias=False))
    step, caches = mixed_step("float32", 16)
    expected = run(runnable, step, caches).bits
    given = parameters(runnable, step, caches)
    instructions = given["instructions"].array.copy()
    instructions[0, 3] = 2**31 - 1  # bytes of memory for each row
    with no_more_memory_than(2**32):
        assert status_of_program(given | {"instructions": integers(instructions)}) != 0
    assert "there is no memory for" in library.last_error()
    assert np.array_equal(run(runnable, step, caches).bits, expected)


def test_out_of_memory_in_a_pool_thread_fails_one_call_only() -> None:
    """Heads longer than any memory: each item of the loop first requests memory."""
    dim, batch = 2**43, 5
    cache, q = [1, 16, 1, dim], [batch, dim]
    one = np.zeros(4096, np.uint8)
    parameters = [
        *((one, "float32", each) for each in (q, cache, cache)),
        (np.zeros((batch, 1), np.int32), "int32", [batch, 1]),
        (np.ones(batch, np.int32), "int32", [batch]),
        *[None] * 5,
        *((np.array(value, dtype), dtype, []) for value, dtype in ((1, "int64"), (0.5, "float32"), (1, "int64"))),
        *((np.array(value, np.int64), "int64", []) for value in (0, 1, 0)),
        (one, "float32", q),
    ]
    for threads in (1, 2, 3):
        with library.use_threads(threads):
            for _ in range(3):
                assert status_of_shapes("PagedAttention", parameters) != 0
                assert library.last_error() == "PagedAttention: there is no memory for what it computes on its way"
            add(50_000, threads)


def test_out_of_memory_while_packing_is_reported() -> None:
    """Rows so long that no memory could hold a panel of them."""
    one, columns = np.zeros(64, np.uint8).ctypes.data, 2**44
    status = library.load().llm_pack_qvalues(1, 8, one, one, None, columns, 0, one, b"float32", 1, columns, 1)
    with pytest.raises(KernelError, match="llm_pack_qvalues: there is no memory for what it computes on its way"):
        library.done(status)


def test_out_of_memory_while_sampling_fails_one_call_only() -> None:
    logits, sampling = np.zeros((1, 2**22), np.float32), sampling_input(1)

    def choose_in_vain() -> None:
        with no_more_memory_than(2**24), pytest.raises(KernelError, match="llm_sample: there is no memory"):
            LibrarySampler()(logits, sampling, np.empty(0, np.int32))

    with ThreadPoolExecutor(1) as fresh:  # a thread keeps the memory that it once had
        fresh.submit(choose_in_vain).result()
    assert LibrarySampler()(logits[:, :5], sampling, np.empty(0, np.int32)).token_ids.tolist() == [0]


def test_thread_pool_works_without_further_threads() -> None:
    before = library.load().llm_num_threads()
    with no_more_memory_than(2**26):
        library.load().llm_set_num_threads(2**40)
    assert before <= library.load().llm_num_threads() < 500
    add(50_000, 1)
    library.load().llm_set_num_threads(before)
