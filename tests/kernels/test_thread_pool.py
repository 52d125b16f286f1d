import threading

import numpy as np
from kernel_calls import call, empty, scalar, typed
from llm_serving.kernels import library


def add(size: int, seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(-99, 99, (2, 1, size))
    y = empty((1, size), "float32")
    call("AddExt", typed(a, "float32"), typed(b, "float32"), scalar(1, "int64"), y)
    assert np.array_equal(y.array, a + b)


def test_many_short_loops_with_changing_numbers_of_threads() -> None:
    for threads in (1, 2, 5, 3, 1, 4):
        with library.threads_in_use(threads):
            for seed in range(60):
                add(40_000 + 997 * seed, seed)


def test_loops_of_two_threads_at_once_do_not_mix() -> None:
    failures: list[AssertionError] = []

    def run(first: int) -> None:
        try:
            for seed in range(first, first + 60):
                add(50_000, seed)
        except AssertionError as error:
            failures.append(error)

    with library.threads_in_use(2):
        callers = [threading.Thread(target=run, args=(1000 * i,)) for i in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not failures
