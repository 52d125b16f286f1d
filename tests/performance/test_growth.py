from __future__ import annotations

import math

import pytest
from benchmarks import growth
from harness.machine_limits import Limits, StepCost
from support.fake_runner import FakeRunner
from support.fakes import DEMO_SPEC


def test_growth_table_has_times_and_shares_of_the_limit() -> None:
    points = [
        growth.Point(1, 128, 0.002, 0.001),
        growth.Point(1, 2048, 0.004, 0.003),
        growth.Point(8, 128, 0.01, 0.002),
    ]
    assert growth.table(points, [128, 2048]) == [
        "| running | 128 tokens each | 2,048 tokens each |",
        "| --- | --- | --- |",
        "| 1 | 2.00 ms (50%) | 4.00 ms (75%) |",
        "| 8 | 10.00 ms (20%) | - |",
    ]


def test_growth_limit_is_memory_for_few_rows_and_arithmetic_for_many() -> None:
    cost, limits = StepCost(DEMO_SPEC, "bfloat16"), Limits("isa", 2, "bfloat16", 1e9, 1e10, 1e10)
    one = growth.closest((1, 128), [growth.StepTime(1.0, 1e9)], cost, limits)
    many = growth.closest((4096, 128), [growth.StepTime(2.0, 1e9)], cost, limits)
    assert (one.running, one.context, one.seconds, many.seconds) == (1, 128, 1.0, 2.0)
    assert one.least_s == cost.num_bytes(128) / 1e9
    assert many.least_s == pytest.approx(sum(cost.flop(4096, 4096, 4096 * 128)) / 1e10)


def test_growth_takes_the_round_closest_to_the_bandwidth_of_its_time() -> None:
    cost, limits = StepCost(DEMO_SPEC, "bfloat16"), Limits("isa", 2, "bfloat16", 1e9, 1e10, 1e10)
    point = growth.closest((1, 128), [growth.StepTime(1.0, 4e9), growth.StepTime(1.2, 1e9)], cost, limits)
    assert (point.seconds, point.least_s) == (1.2, cost.num_bytes(128) / 1e9)


@pytest.mark.parametrize(("running", "context"), [(1, 1), (3, 16), (2, 17)])
def test_growth_requests_decode_one_token_after_their_context(running: int, context: int) -> None:
    num_blocks = running * math.ceil(context / growth.BLOCK_SIZE)
    runner = FakeRunner(num_blocks, growth.BLOCK_SIZE)
    runner._guard._cache.num_written[:] = growth.BLOCK_SIZE
    output = runner.execute(growth.decode_step(0, running, context))
    assert len(output.token_ids) == running
    assert sorted(runner.steps[0].block_tables.ravel().tolist()) == list(range(num_blocks))
