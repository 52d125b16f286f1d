"""Routing of requests among several replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from llm_serving.admission.ttft_predictor import ReplicaSpeed
from llm_serving.core.request_class import Caller
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.fleet.router import PromptBlocks, prompt_block_hashes
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import CapacityError
from llm_serving.executor.worker_process import RestartStatus
from llm_serving.kvcache import BlockPool
from support.async_engine_setup import Setup
from support.fake_runner import expected_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PREFIX = list(range(3, 27))
"""Six blocks."""


async def token_ids(stream: RequestStream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


def measure(engine: AsyncEngine, *step_s: float) -> None:
    """Set the measured speed of each replica: so many seconds per step, and 0.1 s per token."""
    for index, seconds in enumerate(step_s):
        each = engine.replicas.engines[index]
        each.ttft_predictor.speed = ReplicaSpeed(
            each.scheduler.limits, seconds, 0.1, 0.25, each.scheduler.limits.max_num_seqs
        )


def num_unfinished(engine: AsyncEngine) -> Counter[int]:
    """Return the number of unfinished requests of each replica."""
    return Counter({index: engine._requests.num_of[each] for index, each in engine.replicas.engines.items()})


def hold(setup: Setup) -> None:
    for runner in setup.runners.values():
        runner.gate.clear()


def release(setup: Setup) -> None:
    for runner in setup.runners.values():
        runner.gate.set()


def test_router_prefers_the_replica_that_caches_the_prefix() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            await token_ids(engine.generate([*PREFIX, 500], GREEDY, request_id="0"))
            hold(setup)
            measure(engine, 0.1, 0.1)
            prompts = [[700], [*PREFIX, 501]]
            streams = [engine.generate(each, GREEDY, request_id="1") for each in prompts]
            assert num_unfinished(engine) == {0: 2, 1: 0}
            release(setup)
            assert [await token_ids(each) for each in streams] == [expected_output(each, 4) for each in prompts]

    asyncio.run(run())


def test_router_avoids_a_cached_prefix_behind_a_long_queue() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, max_num_seqs=2)
        async with setup.running() as engine:
            await token_ids(engine.generate(PREFIX, GREEDY, request_id="0"))
            hold(setup)
            measure(engine, 1.0, 1.0)
            streams = [engine.generate([*PREFIX, 500 + i], GREEDY, request_id="1") for i in range(6)]
            assert min(num_unfinished(engine)[index] for index in (0, 1)) >= 2
            release(setup)
            assert [await token_ids(each) for each in streams] == [
                expected_output([*PREFIX, 500 + i], 4) for i in range(6)
            ]

    asyncio.run(run())


def test_router_sends_more_requests_to_the_faster_replica() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            hold(setup)
            measure(engine, 0.1, 2.0)
            streams = [engine.generate([i, 6], GREEDY, request_id=str(i)) for i in range(6)]
            assert num_unfinished(engine)[0] > num_unfinished(engine)[1]
            release(setup)
            await asyncio.gather(*map(token_ids, streams))

    asyncio.run(run())


def test_router_exports_the_predicted_ttft_of_each_class() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            name = "llm_serving:predicted_time_to_first_token_seconds"
            assert f"{name}{{" not in setup.metrics.render()[0].decode()  # nothing has been measured
            measure(engine, 3.0, 2.0)
            text = setup.metrics.render()[0].decode()
            assert f'{name}{{model_name="model",priority_class="standard"}} 2.1' in text

    asyncio.run(run())


def test_router_ignores_cached_prefixes_of_other_tenants() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            measure(engine, 0.1, 0.1)
            hold(setup)
            streams = [
                engine.generate(PREFIX, GREEDY, Caller(tenant=tenant), request_id=tenant) for tenant in ("a", "b")
            ]
            assert num_unfinished(engine) == {0: 1, 1: 1}
            release(setup)
            await asyncio.gather(*map(token_ids, streams))

    asyncio.run(run())


def test_router_treats_an_unmeasured_replica_as_fast_as_the_others() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            hold(setup)
            measure(engine, 0.1)
            streams = [engine.generate([i, 6], GREEDY, request_id=str(i)) for i in range(6)]
            assert min(num_unfinished(engine)[index] for index in (0, 1)) >= 2
            release(setup)
            await asyncio.gather(*map(token_ids, streams))

    asyncio.run(run())


def test_router_avoids_a_replica_whose_work_agent_restarts() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, clock=lambda: 5.0)
        async with setup.running() as engine:
            away = RestartStatus(
                reason="killed", lost_at=0.0, attempt_at=8.0, load_s=4.0, num_failed=0, num_restarts=1, max_restarts=5
            )
            engine.replicas.engines[0].executor.restart_status = away
            hold(setup)
            streams = [engine.generate([5, 6], GREEDY, request_id="x") for _ in range(4)]
            assert num_unfinished(engine) == {0: 0, 1: 4}
            engine.replicas.engines[0].executor.restart_status = None
            release(setup)
            await asyncio.gather(*map(token_ids, streams))

    asyncio.run(run())


def test_router_uses_the_configured_policy() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=3, routing="round_robin")
        async with setup.running() as engine:
            hold(setup)
            for number in range(4):
                await engine.generate([5, 6], GREEDY, request_id="x").aclose()
                await engine.generate([5, 6], replace(GREEDY, max_tokens=1), request_id=str(number)).aclose()
            assert engine._router.latest == 7 % 3
            release(setup)

    asyncio.run(run())


def test_prompt_block_hashes_depend_on_the_namespace_and_exclude_the_last_token() -> None:
    assert len(prompt_block_hashes("a", range(9), 4)) == 2
    assert len(prompt_block_hashes("a", range(8), 4)) == 1
    assert prompt_block_hashes("a", range(9), 4)[0] != prompt_block_hashes("b", range(9), 4)[0]


def test_router_treats_the_prompt_of_an_unfinished_request_as_cached() -> None:
    prompts, pool = PromptBlocks(), BlockPool(4)
    hashes = prompt_block_hashes("", range(13), 4)
    prompts.add("x", 0, hashes)
    prompts.add("y", 0, hashes[:2])
    assert [prompts.num_found(replica, hashes, pool) for replica in (0, 1)] == [3, 0]
    prompts.remove("x")
    prompts.remove("x")
    assert prompts.num_found(0, hashes, pool) == 2
    prompts.remove("y")
    assert prompts.num_found(0, hashes, pool) == 0
    assert not any(prompts._counts.values())


def test_router_of_a_single_replica_looks_up_cached_prefixes_for_deadlines() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            await token_ids(engine.generate(PREFIX, GREEDY, request_id="first"))
            replica = engine.replicas.engines[0]
            predictor, limits = replica.ttft_predictor, replica.scheduler.limits
            timed = Caller(deadline=engine.clock() + 8.0)
            predictor.speed = ReplicaSpeed(limits, 0.0, 1.0, 0.25, 8)  # a token takes a second
            engine.precheck_capacity([len(PREFIX)], timed)
            await token_ids(engine.generate(PREFIX, GREEDY, timed, request_id="again"))
            predictor.speed = ReplicaSpeed(limits, 0.0, 1.0, 0.25, 8)
            with pytest.raises(CapacityError, match="the first token is expected in"):
                engine.generate(PREFIX[::-1], GREEDY, timed, request_id="another")

    asyncio.run(run())


def test_shared_prompt_of_forks_is_counted_once() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            hold(setup)
            parent = engine.generate(PREFIX, GREEDY, request_id="a", has_siblings=True)
            forks = [
                engine.generate(PREFIX, replace(GREEDY, seed=seed), request_id="a", fork_of=parent) for seed in (1, 2)
            ]
            assert engine._queue.load().num_uncached_tokens == len(PREFIX) + len(forks)
            release(setup)
            for stream in (parent, *forks):
                assert len(await token_ids(stream)) == GREEDY.max_tokens

    asyncio.run(run())
