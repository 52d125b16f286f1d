"""Prefill/decode disaggregation: where requests continue, and cancellation and priorities during migration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.migration import MigratingRequest
from support.async_engine_setup import Setup
from support.fake_runner import expected_output
from support.listeners import FunctionListener

PROMPT = list(range(3, 20))
ROLES = ("prefill", "decode")


async def ask(engine: AsyncEngine, max_tokens: int = 20) -> tuple[list[int], FinishReason | None]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    token_ids: list[int] = []
    reason = None
    async for piece in engine.generate(PROMPT, sampling, request_id="asked"):
        token_ids += piece.token_ids
        reason = piece.finish_reason
    return token_ids, reason


def tokens_computed(setup: Setup) -> list[int]:
    return [sum(step.num_tokens for step in setup.runners[index].steps) for index in range(2)]


def test_one_replica_computes_the_prompt_and_the_other_decodes() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup) == [len(PROMPT), 19]

    asyncio.run(run())


def test_a_migrating_request_can_be_cancelled() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            hand_over = engine._dispatcher._migrate_one

            def cancel_and_hand_over(migrating: MigratingRequest) -> None:
                engine.control.cancel("asked")
                hand_over(migrating)

            engine._dispatcher._migrate_one = cancel_and_hand_over  # type: ignore[method-assign]
            token_ids, reason = await ask(engine)
            assert (len(token_ids) < 20, reason) == (True, FinishReason.ABORT)

    asyncio.run(run())


def test_a_migrating_request_can_get_another_priority() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            loop, hand_over, changing = asyncio.get_running_loop(), engine._dispatcher._migrate_one, asyncio.Event()
            tasks: list[asyncio.Task[Any]] = []

            def ask_and_hand_over(migrating: MigratingRequest) -> None:
                tasks.append(loop.create_task(engine.control.set_priority("asked", 1)))
                loop.call_soon(hand_over, migrating)  # after the first replica was asked

            def asked_of_the_second(question: Callable[[], Any]) -> Future[Any]:
                changing.set()
                return really_ask(question)

            engine._dispatcher._migrate_one = ask_and_hand_over  # type: ignore[method-assign]
            second = engine.replicas.engines[1]
            really_ask, second.ask = second.ask, asked_of_the_second  # type: ignore[method-assign]
            setup.runners[1].gate.clear()
            tasks.append(asyncio.create_task(ask(engine)))
            async with asyncio.timeout(30):
                await changing.wait()
            setup.runners[1].gate.set()
            answered, changed = await asyncio.gather(*tasks)
            assert answered[0] == expected_output(PROMPT, 20)
            assert list(changed.values()) == [True]

    asyncio.run(run())


def test_a_request_that_migrates_back_can_get_another_priority() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            engine.replicas.is_drained = lambda index: index == 1  # type: ignore[method-assign]
            loop, hand_over = asyncio.get_running_loop(), engine._dispatcher._migrate_one
            tasks: list[asyncio.Task[Any]] = []
            first, asked, asked_again = engine.replicas.engines[0], [], Event()
            really_ask = first.ask

            def count(question: Callable[[], Any]) -> Future[Any]:
                answer = really_ask(question)
                asked.append(question)
                if len(asked) == 2:
                    asked_again.set()
                return answer

            def back(migrating: MigratingRequest) -> None:
                really_ask(asked_again.wait)  # no step computes it before
                hand_over(migrating)

            def ask_and_hand_over(migrating: MigratingRequest) -> None:
                tasks.append(loop.create_task(engine.control.set_priority("asked", 1)))
                tasks[0].add_done_callback(lambda _: asked_again.set())
                loop.call_soon(back, migrating)  # after the replica was asked, which no longer has it

            first.ask = count  # type: ignore[method-assign]
            engine._dispatcher._migrate_one = ask_and_hand_over  # type: ignore[method-assign]
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
            (changed,) = await asyncio.gather(*tasks)
            assert list(changed.values()) == [True]

    asyncio.run(run())


@pytest.mark.parametrize("blocks_stay", [False, True], ids=["", "nor can its blocks be given back"])
def test_a_request_whose_migration_raises_ends_and_the_next_ones_continue(blocks_stay: bool) -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            next_of, reclaim_blocks, failed = engine._router.migration_targets, engine.replicas.reclaim_blocks, []

            def fail(blocks: object) -> None:
                raise KeyError(0)

            if blocks_stay:
                engine.replicas.reclaim_blocks = fail  # type: ignore[method-assign]

            def fail_once(preferred: int | None = None) -> list[tuple[int, Engine]]:
                if not failed:
                    failed.append(preferred)
                    raise ValueError("a fault of ours")
                engine.replicas.reclaim_blocks = reclaim_blocks  # type: ignore[method-assign]
                return next_of(preferred)

            engine._router.migration_targets = fail_once  # type: ignore[method-assign]
            hand_over, released = engine._dispatcher.migrate, list[MigratingRequest]()

            def gather(come: list[MigratingRequest]) -> None:
                released.extend(come)
                if len(released) == 2:
                    hand_over(released)

            for replica in engine.replicas.engines.values():
                replica._listeners[:] = [
                    FunctionListener(
                        on_migrating=lambda come: loop.call_soon_threadsafe(gather, come),
                        on_blocks_released=reclaim_blocks,
                    )
                ]
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(30):
                answers = await asyncio.gather(ask(engine), ask(engine))
            ended, answered = sorted(answers, key=lambda each: len(each[0]))
            assert (ended[1], answered[0]) == (FinishReason.ERROR, expected_output(PROMPT, 20))
            assert (engine.num_running, len(engine._requests)) == (0, 0)
            first = engine.replicas.engines[0]
            num_handed_over = first.ask(lambda: first.scheduler.blocks.transfer_pool.pool.num_used_blocks)
            assert bool(await asyncio.wrap_future(num_handed_over)) == blocks_stay

    asyncio.run(run())


def test_no_request_migrates_to_a_drained_replica() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            engine.replicas.is_drained = lambda index: index == 1  # type: ignore[method-assign]
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup)[1] == 0

    asyncio.run(run())


def test_request_too_long_for_the_other_cache_stays_on_its_replica() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            hand_over = engine._dispatcher._migrate_one

            def shrink_and_hand_over(migrating: MigratingRequest) -> None:
                """Migrate a request as if the other replica had been loaded again with a smaller cache."""
                engine.replicas.engines[1].scheduler.blocks.max_request_tokens = 0
                hand_over(migrating)

            engine._dispatcher._migrate_one = shrink_and_hand_over  # type: ignore[method-assign]
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup)[1] == 0

    asyncio.run(run())
