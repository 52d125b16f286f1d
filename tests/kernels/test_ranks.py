"""Sums over ranks. The ranks are threads here, each with its own mapping of the memory that processes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llm_serving.errors import RankLostError
from llm_serving.kernels import library
from llm_serving.kernels.ranks import Ranks
from llm_serving.network.builder import Network
from support.decoder_calls import Step
from support.kernel_calls import FLOAT_TYPES, Typed, empty, typed
from support.kernels import reference
from support.program_calls import Runnable, parameters, run, runnable_of, status_of_program

PIECE_BYTES = 1 << 20
Attributes = dict[str, Any]


def random(count: int, width: int, dtype: str, seed: int = 1) -> Typed:
    return typed(np.random.default_rng(seed).standard_normal((count, width)), dtype)


@pytest.fixture
def memory() -> Iterator[Callable[[int], int]]:
    """Create the memory of so many ranks."""
    made: list[int] = []

    def create(count: int) -> int:
        made.append(os.memfd_create("ranks"))
        os.ftruncate(made[-1], 4096 + 2 * count * PIECE_BYTES)
        return made[-1]

    yield create
    for fd in made:
        os.close(fd)


def together(fd: int, count: int, body: Callable[[Ranks], Any]) -> list[Any]:
    """Run each rank in a thread of its own and return their results."""

    def one(rank: int) -> Any:
        ranks = Ranks(fd, rank, count, 60)
        try:
            return body(ranks)
        finally:
            ranks.leave()

    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(one, rank) for rank in range(count)]]


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("count", [2, 3])
def test_all_reduce_adds_in_rank_order_and_rounds_once(
    isa: str, memory: Callable[[int], int], dtype: str, count: int
) -> None:
    parts = [[random(1, size, dtype, seed=rank) for rank in range(count)] for size in (1, 70, 33 * 1024)]
    found = together(
        memory(count), count, lambda ranks: [ranks.all_reduce(each[ranks.rank].array, dtype) for each in parts]
    )
    for each, sums in zip(parts, zip(*found, strict=True), strict=True):
        expected = typed(reference.all_reduce([part.values for part in each]), dtype)
        assert all(np.array_equal(total, expected.array) for total in sums)


def test_all_reduce_of_several_chunks_in_sequence(memory: Callable[[int], int]) -> None:
    parts = [random(5, PIECE_BYTES // 4, "bfloat16", seed=rank) for rank in range(2)]

    def several(ranks: Ranks) -> list[Any]:
        return [ranks.all_reduce(parts[ranks.rank].array[rows], "bfloat16") for rows in (slice(0, 5), 3, slice(1, 3))]

    for found in together(memory(2), 2, several):
        for rows, each in zip((slice(0, 5), 3, slice(1, 3)), found, strict=True):
            expected = typed(reference.all_reduce([part.values[rows] for part in parts]), "bfloat16")
            assert np.array_equal(each, expected.array)


@pytest.mark.parametrize(("count", "rows", "width"), [(2, 3, 7), (3, 40, 20_011), (2, 2, PIECE_BYTES), (5, 1, 5)])
def test_all_gather_returns_the_columns_of_all_ranks(
    memory: Callable[[int], int], count: int, rows: int, width: int
) -> None:
    whole = np.arange(rows * width, dtype=np.float32).reshape(rows, width)

    def one(ranks: Ranks) -> Any:
        mine = slice(ranks.rank * width // count, (ranks.rank + 1) * width // count)
        return [ranks.all_gather(each[:, mine], width) for each in (whole, whole[:1] + 1)]

    for first, second in together(memory(count), count, one):
        assert np.array_equal(first, whole)
        assert np.array_equal(second, whole[:1] + 1)


def test_rank_exchange_returns_the_numbers_of_all_ranks(memory: Callable[[int], int]) -> None:
    received = together(memory(3), 3, lambda ranks: ranks.exchange([ranks.rank, 10 + ranks.rank]))
    assert received == [[[0, 10], [1, 11], [2, 12]]] * 3


def test_ranks_fail_permanently_when_one_is_lost(memory: Callable[[int], int]) -> None:
    def body(ranks: Ranks) -> None:
        ranks.start_step(1, 3600)
        ranks.exchange([1])
        if ranks.rank == 0:
            with pytest.raises(RankLostError, match="rank 1 is gone"):
                ranks.all_reduce(np.zeros(4, np.float32), "float32")
            with pytest.raises(RankLostError, match="rank 1 is gone"):
                ranks.exchange([1])

    together(memory(2), 2, body)


def test_all_reduce_includes_a_rank_that_exits_afterwards(memory: Callable[[int], int]) -> None:
    assert together(memory(2), 2, lambda ranks: ranks.exchange([7])) == [[[7], [7]]] * 2


def test_ranks_time_out_when_one_does_not_join(memory: Callable[[int], int]) -> None:
    fd = memory(2)
    with pytest.raises(RankLostError, match=r"rank 1 did not come to step 0 in 0\.001 s"):
        Ranks(fd, 0, 2, 0.001)


def test_ranks_refuse_to_mix_two_steps(memory: Callable[[int], int]) -> None:
    def body(ranks: Ranks) -> str | None:
        ranks.start_step(4 + ranks.rank, 3600)
        with pytest.raises(RankLostError):
            ranks.all_reduce(np.zeros(4, np.float32), "float32")
        return ranks.error

    expected = ["rank 1 gives 16 bytes of step 5, rank 0 has 16 of step 4"]
    expected += ["rank 0 gives 16 bytes of step 4, rank 1 has 16 of step 5"]
    found = together(memory(2), 2, body)
    # Whoever is seen to have left before it is looked at is gone, which is as good.
    assert expected[0] == found[0] or expected[1] == found[1]


def test_ranks_refuse_an_occupied_or_unknown_rank(memory: Callable[[int], int]) -> None:
    fd = memory(2)

    def twice(ranks: Ranks) -> None:
        ranks.exchange([1])
        if ranks.rank == 0:
            with pytest.raises(RankLostError, match="rank 1 is taken"):
                Ranks(fd, 1, 2, 60)
        ranks.exchange([2])

    together(fd, 2, twice)
    with pytest.raises(RankLostError, match="rank 2 of 2: there must be 2 to 16"):
        Ranks(fd, 2, 2, 60)
    with pytest.raises(RankLostError, match="the memory of 3 ranks must be a file of"):
        Ranks(fd, 0, 3, 60)


def program_of_sum(x: Typed) -> Runnable:
    """Adds the sum over all ranks to rows."""
    net = Network(x.array.shape[1], len(x.array))
    rows = net.embedding("x")
    net.lm_head(net.add(rows, net.record("all_reduce", {"x": rows}, {}, {})), "one")
    given = {"x.weight": x.values, "one.weight": np.eye(x.array.shape[1])}
    with library.use_isa("plain"):  # which keeps weights as they are
        return runnable_of(net, {weight: given[weight.names[0]] for weight in net.weights}, x.dtype)


def step_of_rows(count: int) -> Step:
    return Step(list(range(count)), [0] * count, [-1] * count, [[0]], [count], [count], list(range(count)))


def test_program_all_reduces_over_ranks(memory: Callable[[int], int]) -> None:
    x, other = random(9, 64, "bfloat16"), random(9, 64, "bfloat16", seed=2)
    runnable = program_of_sum(x)

    def one(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            return ranks.all_reduce(other.array, "bfloat16")
        ranks.use()
        with library.use_isa("plain"):
            return run(runnable, step_of_rows(9), []).array

    logits, total = together(memory(2), 2, one)
    assert np.array_equal(logits, typed(x.values + Typed(total, "bfloat16").values, "bfloat16").values)


def of_table_and_head(table: Typed, head: Typed, of_table: Attributes, of_head: Attributes) -> Runnable:
    net = Network(64, len(head.array))
    net.lm_head(net.embedding("table"), "head")
    first, last = net.operations
    net.operations[:] = first.changed(attributes=of_table), last.changed(attributes=of_head)
    values = {"table.weight": table.values, "head.weight": head.values}
    return runnable_of(net, {weight: values[weight.names[0]] for weight in net.weights}, table.dtype)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_gathers_logits_of_all_ranks_before_the_cap(isa: str, memory: Callable[[int], int], dtype: str) -> None:
    table, head = random(20, 64, dtype), random(37, 64, dtype, seed=2)
    capped = {"scale": 0.5, "cap": 3.0}
    logits = run(of_table_and_head(table, head, {}, {}), step_of_rows(20), []).array
    expected = run(of_table_and_head(table, head, {}, capped), step_of_rows(20), []).array
    part = of_table_and_head(table, typed(head.values[18:], dtype), {}, {**capped, "first": 18, "rows": 37})

    def one(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            return ranks.all_gather(logits[:, :18], 37)
        ranks.use()
        with library.use_isa(isa):
            given = parameters(part, step_of_rows(20), []) | {"result": empty((20, 37), "float32")}
            assert status_of_program(given) == 0, library.last_error()
            return given["result"].array

    given, found = together(memory(2), 2, one)
    assert np.array_equal(given, logits)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_program_embedding_of_other_ranks_rows_is_zero(isa: str, dtype: str) -> None:
    table = random(20, 64, dtype)
    rows = typed(table.values[6:13], dtype)
    with library.use_isa("plain"):
        part = of_table_and_head(rows, typed(np.eye(64), dtype), {"first": 6, "rows": 20}, {})
    found = run(part, step_of_rows(20), []).array
    assert np.array_equal(found[6:13], rows.values)
    assert not found[:6].any() and not found[13:].any()


def test_program_without_ranks_refuses_all_reduce() -> None:
    with pytest.raises(AssertionError, match="this process computes with no other"):
        run(program_of_sum(random(3, 64, "float32")), step_of_rows(3), [])
