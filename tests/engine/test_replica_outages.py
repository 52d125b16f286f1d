"""AsyncEngine while replicas load, restart or are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from unittest.mock import MagicMock

import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.engine import Engine
from llm_serving.engine.replicas import EngineHealth, Events, Replicas
from llm_serving.errors import (
    NoWorkAgentsError,
    UnavailableError,
    WorkerDiedError,
)
from llm_serving.executor.worker_process import RestartStatus
from llm_serving.observability.metrics import ReplicaCounts
from llm_serving.scheduler.tenant_limits import SlotDemand
from support.async_engine_setup import Setup, token_ids
from support.fake_runner import expected_output

AWAY = RestartStatus("killed", lost_at=0.0, attempt_at=8.0, load_s=4.0, num_failed=1, num_restarts=2, max_restarts=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_async_engine_serves_with_the_other_replica_after_one_dies() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            streams = [engine.generate([5, 6], GREEDY, request_id=str(i)) for i in range(2)]
            setup.may_load.clear()
            setup.runners[0].dead = True
            setup.runners[0].gate.set()
            pieces = [[piece async for piece in stream][-1] for stream in streams]
            assert sorted(piece.finish_reason or "" for piece in pieces) == [
                FinishReason.LENGTH,
                FinishReason.UNAVAILABLE,
            ]
            while engine.health().detail == "ready":
                await asyncio.sleep(0)
            assert engine.health().ready and "killed" in engine.health().detail
            assert setup.metrics.replicas() == ReplicaCounts(2, 1)
            assert await token_ids(engine.generate([9], GREEDY, request_id="after")) == expected_output([9], 4)
            setup.may_load.set()
            while engine.health().detail != "ready":
                await asyncio.sleep(0)
            assert setup.metrics.replicas() == ReplicaCounts(2, 2)
            streams = [engine.generate([5, 6], GREEDY, request_id=str(i)) for i in range(2)]
            assert [await token_ids(stream) for stream in streams] == [expected_output([5, 6], 4)] * 2

    asyncio.run(run())


def test_async_engine_refuses_with_retry_after_during_a_long_restart() -> None:
    async def run() -> None:
        setup = Setup(clock=lambda: 5.0)
        async with setup.running() as engine:
            executor = engine.replicas.engines[0].executor
            for away in (AWAY, replace(AWAY, num_failed=0, load_s=301.0)):
                executor.restart_status = away
                for ask in (lambda: engine.generate([5], GREEDY, request_id="a"), lambda: engine.check_capacity([1])):
                    with pytest.raises(UnavailableError, match="WorkAgent 0 is being restarted: killed") as refused:
                        ask()
                    assert refused.value.retry_after == 3.0 + away.load_s
            executor.restart_status = replace(AWAY, num_failed=0)
            assert await token_ids(engine.generate([9], GREEDY, request_id="a")) == expected_output([9], 4)

    asyncio.run(run())


def test_router_prefers_a_replica_whose_worker_is_not_restarting() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            engine.replicas.engines[0].executor.restart_status = AWAY
            for _ in range(3):
                assert await token_ids(engine.generate([9], GREEDY, request_id="a")) == expected_output([9], 4)
            assert not setup.runners[0].steps

    asyncio.run(run())


@pytest.mark.parametrize("shall_exit", [False, True])
def test_server_ends_when_all_replicas_exhausted_their_restarts_if_configured(shall_exit: bool) -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, exit_without_work_agents=shall_exit)
        failed = asyncio.Event()
        setup.engine.on_failure = failed.set
        async with setup.running() as engine:
            for index in range(2):
                assert not failed.is_set()
                engine.replicas.engines[index].executor.restarts_exhausted = True
                engine.replicas.engines[index]._on_restart_attempt("")
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert failed.is_set() == shall_exit
            assert isinstance(engine.failure, NoWorkAgentsError) == shall_exit
            expected = "WorkAgent 1: was restarted more than 5 times in a row without completing a step"
            assert expected in engine.health().detail

    asyncio.run(run())


def test_server_does_not_end_while_a_replica_loads() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, exit_without_work_agents=True)
        setup.slow[1] = Event()
        setup.engine.start()
        engines = setup.engine.replicas.engines
        while 0 not in engines:
            await asyncio.sleep(0)
        engines[0].executor.restarts_exhausted = True
        engines[0]._on_restart_attempt("")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert setup.engine.failure is None
        setup.slow[1].set()
        while 1 not in engines:
            await asyncio.sleep(0)
        await setup.engine.stop()

    asyncio.run(run())


def test_async_engine_without_a_replica_refuses_with_the_reason() -> None:
    async def run() -> None:
        setup = Setup()
        setup.failures[0] = "out of luck"
        async with setup.running() as engine:
            assert not engine.health().ready
            assert "out of luck" in engine.health().detail
            with pytest.raises(UnavailableError, match="out of luck"):
                engine.generate([5], GREEDY, request_id="a")
            while engine.failure is None:
                await asyncio.sleep(0)
            assert str(engine.failure) == "out of luck"

    asyncio.run(run())


def test_replicas_retry_loading_beside_a_replica_that_serves() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        setup.failures[0] = "out of luck"
        async with setup.running() as engine:
            assert engine.health() == EngineHealth(True, "ready; WorkAgent 0: out of luck")
            del setup.failures[0]
            while engine.health().detail != "ready":
                await asyncio.sleep(0)
            assert engine.failure is None

    asyncio.run(run())


def test_health_includes_the_notice_for_operators() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            engine.replicas.engines[0].notice = "many times slower"
            assert (engine.health().ready, engine.health().detail) == (True, "ready; WorkAgent 0: many times slower")

    asyncio.run(run())


def test_health_reports_the_progress_of_loading() -> None:
    async def run() -> None:
        setup = Setup()
        setup.may_load.clear()
        setup.engine.start()
        while setup.engine.health().detail == "starting":
            await asyncio.sleep(0)
        health = setup.engine.health()
        assert (health.ready, health.loading, health.detail) == (False, True, "WorkAgent 0: reading weights")
        with pytest.raises(UnavailableError):
            setup.engine.generate([5], GREEDY, request_id="a")
        setup.may_load.set()
        while setup.engine.health().loading:
            await asyncio.sleep(0)
        assert setup.engine.health().detail == "ready"
        await setup.engine.stop()

    asyncio.run(run())


def test_replica_whose_worker_fails_to_end_holds_no_tenant_slots() -> None:
    engine = MagicMock()

    @contextmanager
    def opened(*_: object) -> Iterator[Engine]:
        yield engine
        raise OSError("its WorkAgent does not end")

    events = Events(*[lambda _: None] * 4)
    replicas = Replicas(ServingConfig(), opened, events)
    replicas._loop = MagicMock()
    engine.run.side_effect = lambda: replicas.accounting.tenant_slots.exchange(0, {"a": SlotDemand(1, 0, 0, 1)})
    with pytest.raises(OSError, match="its WorkAgent does not end"):
        replicas._serve(0)
    replicas.accounting.join(1)
    assert replicas.accounting.tenant_slots.exchange(1, {"a": SlotDemand(1, 0, 0, 1)}) == {"a": 1}


def test_stop_cancels_the_start_of_a_work_agent_and_waits_for_its_end() -> None:
    cancelled, failures, ended = Event(), list[Exception](), Event()

    @contextmanager
    def opened(*_: object) -> Iterator[Engine]:
        cancelled.wait()
        ended.set()
        raise WorkerDiedError("killed")
        yield

    replicas = Replicas(ServingConfig(), opened, Events(*[lambda _: None] * 3, failures.append))
    replicas.cancel_starts = cancelled.set

    async def run() -> None:
        replicas.start()
        await replicas.stop()
        assert ended.is_set()

    asyncio.run(run())
    assert (failures, replicas.load_failures) == ([], [])
