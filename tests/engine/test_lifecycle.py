"""Pause, sleep and new weights on fake replicas: what happens to accepted requests and to later ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import ANONYMOUS, Caller
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.lifecycle import Gate, Lifecycle
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import CapacityError, RequestError, UnavailableError
from support.async_engine_setup import Setup
from support.fake_runner import expected_output

PROMPT = [3, 4, 5]


def generate(engine: AsyncEngine, num_tokens: int = 30) -> RequestStream:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return engine.generate(PROMPT, sampling, request_id="one")


async def token_ids(stream: RequestStream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


async def first_token(stream: RequestStream) -> int:
    piece = await anext(aiter(stream))
    return piece.token_ids[0]


async def ready(engine: AsyncEngine, count: int) -> None:
    while engine.replicas.counts().num_ready < count:
        await asyncio.sleep(0)


def test_frozen_requests_continue_after_a_pause() -> None:
    async def run() -> None:
        async with Setup(num_replicas=2).running() as engine:
            await ready(engine, 2)
            streams = [generate(engine, 60) for _ in range(4)]
            tokens = [await first_token(each) for each in streams]
            await engine.lifecycle.pause("freeze", "wait")
            assert engine.health().detail == "the model is paused" and not engine.health().ready
            with pytest.raises(UnavailableError, match="the request was not started: the model is paused"):
                generate(engine)
            await engine.lifecycle.pause("freeze", "wait")
            if engine.num_running:  # fake steps are so fast that all may have ended before the pause
                for change in (engine.lifecycle.pause("finish", "wait"), engine.lifecycle.sleep(2, "finish", "wait")):
                    with pytest.raises(RequestError, match="`running` must be freeze or abort, because"):
                        await change
                assert engine.health().detail == "the model is paused", "a refused change changes nothing"
            await engine.lifecycle.resume()
            assert engine.health().ready
            for token, stream in zip(tokens, streams, strict=True):
                assert [token, *await token_ids(stream)] == expected_output(PROMPT, 60)

    asyncio.run(run())


def test_accepted_requests_finish_or_are_aborted_first() -> None:
    async def run() -> None:
        async with Setup().running() as engine:
            finishing = asyncio.create_task(token_ids(generate(engine)))
            await asyncio.sleep(0)
            await engine.lifecycle.pause("finish", "wait")
            assert engine.num_running == engine.num_waiting == 0
            assert await finishing == expected_output(PROMPT, 30)
            await engine.lifecycle.resume()
            stream = generate(engine)
            await first_token(stream)
            await engine.lifecycle.sleep(2, "abort", "wait")
            reasons = [piece.finish_reason async for piece in stream]
            assert reasons[-1] in (FinishReason.ABORT, FinishReason.LENGTH)

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_model_serves_again_after_it_wakes_up(level: int) -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            await ready(engine, 2)
            runners = dict(setup.runners)
            assert await token_ids(generate(engine)) == expected_output(PROMPT, 30)
            await engine.lifecycle.sleep(level, "finish", "wait")
            assert engine.replicas.all_left == (level == 2)
            assert engine.lifecycle.level == level
            with pytest.raises(RequestError, match=r"must be 0 .awake.: send POST /v1/wake_up first"):
                await engine.lifecycle.resume()
            with pytest.raises(RequestError, match=r"must be 0 .awake.: send POST /v1/wake_up first"):
                await engine.lifecycle.pause("finish", "wait")
            await engine.lifecycle.sleep(1, "finish", "wait")
            assert engine.health().detail == f"the model sleeps at level {level}"
            gate = engine.lifecycle.gate
            assert gate is not None
            entering = asyncio.create_task(gate.enter())
            await engine.lifecycle.wake_up()
            await entering
            assert (setup.runners[0] is runners[0]) == (level == 1)
            assert await token_ids(generate(engine)) == expected_output(PROMPT, 30)
            await engine.lifecycle.wake_up()

    asyncio.run(run())


@pytest.mark.parametrize("is_paused", [False, True])
def test_reload_changes_how_many_requests_may_wait_for_a_paused_model(is_paused: bool) -> None:
    async def run() -> None:
        async with Setup().running() as engine:
            if is_paused:
                await engine.lifecycle.pause("finish", "wait")
            engine._follow(replace(engine.config, scheduler=replace(engine.config.scheduler, max_waiting_queue=1)))
            await engine.lifecycle.pause("finish", "wait")
            gate = engine.lifecycle.gate
            assert gate is not None
            waiting = asyncio.create_task(gate.enter())
            await asyncio.sleep(0)
            with pytest.raises(CapacityError, match="1 requests wait already, the limit of"):
                await asyncio.wait_for(gate.enter(), 10)
            await engine.lifecycle.resume()
            await waiting

    asyncio.run(run())


def test_level_2_freezes_nothing() -> None:
    async def run() -> None:
        async with Setup().running() as engine:
            with pytest.raises(RequestError, match="`running` must be finish or abort at level 2"):
                await engine.lifecycle.sleep(2, "freeze", "wait")
            assert engine.lifecycle.gate is None

    asyncio.run(run())


def test_a_drained_replica_stays_drained() -> None:
    async def run() -> None:
        async with Setup(num_replicas=2).running() as engine:
            await ready(engine, 2)
            engine.control.drain(1)
            await engine.lifecycle.sleep(2, "finish", "wait")
            await engine.lifecycle.wake_up()
            assert [engine.replicas.state(index) for index in (0, 1)] == ["serving", "left"]

    asyncio.run(run())


def test_drains_and_joins_during_sleep_take_effect_at_the_wake_up() -> None:
    async def run() -> None:
        async with Setup(num_replicas=3).running() as engine:
            await ready(engine, 3)
            engine.control.drain(2)
            await engine.lifecycle.sleep(2, "finish", "wait")
            engine.control.drain(1)
            with pytest.raises(RequestError, match="`replica` must not be the only replica that serves"):
                engine.control.drain(0)
            for index in (0, 2):
                engine.control.join(index)
            await asyncio.sleep(0.1)
            assert [engine.replicas.state(index) for index in range(3)] == ["left"] * 3, (
                "a sleeping model loads no replica"
            )
            await engine.lifecycle.wake_up()
            assert [engine.replicas.state(index) for index in range(3)] == ["serving", "left", "serving"]

    asyncio.run(run())


async def hash_of(folder: Path) -> str:
    return f"hash of {folder}"


def test_failed_weights_are_replaced_by_the_former_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        setup = Setup()
        used: list[str] = []

        def use(folder: Path) -> None:
            used.append(folder.name)
            setup.failures = {0: "no such tensor"} if folder.name == "bad" else {}

        async with setup.running() as engine:
            lifecycle = Lifecycle(engine.config, engine._dispatcher, use)
            engine.lifecycle = lifecycle
            lifecycle.weights = Path("first")
            monkeypatch.setattr(lifecycle, "_hash", hash_of)
            assert await lifecycle.replace_weights(Path("good"), "finish", "wait") == "hash of good"
            assert await token_ids(generate(engine)) == expected_output(PROMPT, 30)
            with pytest.raises(UnavailableError, match="the weights were not loaded: no such tensor"):
                await lifecycle.replace_weights(Path("bad"), "finish", "wait")
            assert used == ["good", "bad", "good"]
            assert lifecycle.weights == Path("good") and lifecycle.gate is None
            assert await token_ids(generate(engine)) == expected_output(PROMPT, 30)

    asyncio.run(run())


async def freeze(setup: Setup, engine: AsyncEngine, caller: Caller = ANONYMOUS) -> RequestStream:
    """Pause an engine while it computes the first step of a request. Return the request's stream."""
    await ready(engine, 1)
    setup.runners[0].gate.clear()
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    stream = engine.generate(PROMPT, sampling, caller, request_id="one")
    pausing = asyncio.create_task(engine.lifecycle.pause("freeze", "wait"))
    await asyncio.sleep(0)
    setup.runners[0].gate.set()
    await pausing
    return stream


async def last_output(stream: RequestStream) -> RequestOutput:
    async with asyncio.timeout(30):
        return [piece async for piece in stream][-1]


def test_deadlines_of_frozen_requests_apply() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            await ready(engine, 1)
            stream = await freeze(setup, engine, Caller(deadline=engine.clock() + 0.1))
            assert (await last_output(stream)).finish_reason is FinishReason.TIMEOUT

    asyncio.run(run())


def test_a_shutdown_ends_frozen_and_waiting_requests() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            stream = await freeze(setup, engine)
            gate = engine.lifecycle.gate
            assert gate is not None
            waiting = asyncio.create_task(gate.enter())
            await asyncio.sleep(0)
            engine.lifecycle.begin_shutdown()
            last = await last_output(stream)
            assert (last.finish_reason, last.error) == (FinishReason.UNAVAILABLE, "the server is shutting down")
            with pytest.raises(UnavailableError, match="the server is shutting down; new requests are refused"):
                await waiting

    asyncio.run(run())


@pytest.mark.parametrize("change", ["wake_up", "replace", "hash", "pause"])
def test_a_shutdown_ends_a_change_in_progress(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hash_forever(folder: Path) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        setup, used = Setup(), []
        async with setup.running() as engine:
            lifecycle = Lifecycle(engine.config, engine._dispatcher, used.append)
            engine.lifecycle, lifecycle.weights = lifecycle, Path("first")
            monkeypatch.setattr(lifecycle, "_hash", hash_forever if change == "hash" else hash_of)
            if change == "wake_up":
                await lifecycle.sleep(2, "finish", "wait")
                assert engine.replicas.all_left
                setup.may_load.clear()
                changing = lifecycle.wake_up()
            elif change == "pause":
                setup.runners[0].gate.clear()
                stream = generate(engine)
                changing = lifecycle.pause("finish", "wait")
            else:
                setup.may_load.clear()
                changing = lifecycle.replace_weights(Path("good"), "finish", "wait")
            task = asyncio.create_task(changing)
            while change == "replace" and (not used or engine.replicas.drained):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            lifecycle.begin_shutdown()
            with pytest.raises(UnavailableError, match="the server is shutting down"):
                async with asyncio.timeout(30):
                    await task
            assert used == [Path("good")] * (change == "replace")
            with pytest.raises(UnavailableError, match="the server is shutting down"):
                await lifecycle.wake_up()
            if change == "pause":
                setup.runners[0].gate.set()
                assert await token_ids(stream) == expected_output(PROMPT, 30), "accepted requests finish"
            setup.may_load.set()

    asyncio.run(run())


def test_one_change_at_a_time() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            stream = generate(engine)
            pausing = asyncio.create_task(engine.lifecycle.pause("finish", "wait"))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="is being changed by another request"):
                await engine.lifecycle.resume()
            setup.runners[0].gate.set()
            await token_ids(stream)
            await pausing

    asyncio.run(run())


def test_a_gate_holds_a_limited_number_of_requests_or_refuses_them() -> None:
    async def run() -> None:
        gate = Gate("the model sleeps", "wait", 2)
        held = [asyncio.create_task(gate.enter()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="the model sleeps, and 2 requests wait already"):
            await gate.enter()
        gate.change("the model is paused", "wait")
        await asyncio.sleep(0)
        gate.change("the model is paused", "refuse")
        for each in held:
            with pytest.raises(UnavailableError, match="the model is paused; new requests are refused"):
                await each
        gate.change("the model sleeps", "wait")
        entering = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.open()
        await entering

    asyncio.run(run())
