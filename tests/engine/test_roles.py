"""Replicas of different roles behind one door: where requests go on, and what those on their way are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from async_engine_setup import Setup
from fake_runner import expected_output
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.departure import Departure

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


def test_a_prompt_is_computed_by_one_and_its_answer_by_the_other() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup) == [len(PROMPT), 19]

    asyncio.run(run())


def test_a_cancel_finds_a_request_that_is_on_its_way() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            hand_over = engine._hand_one_over

            def cancel_and_hand_over(departure: Departure) -> None:
                engine.control.cancel("asked")
                hand_over(departure)

            engine._hand_one_over = cancel_and_hand_over  # type: ignore[method-assign]
            token_ids, reason = await ask(engine)
            assert (len(token_ids) < 20, reason) == (True, FinishReason.ABORT)

    asyncio.run(run())


def test_another_priority_finds_a_request_that_is_on_its_way() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            loop, hand_over, changing = asyncio.get_running_loop(), engine._hand_one_over, asyncio.Event()
            tasks: list[asyncio.Task[Any]] = []

            def ask_and_hand_over(departure: Departure) -> None:
                tasks.append(loop.create_task(engine.control.reprioritise("asked", 1)))
                loop.call_soon(hand_over, departure)  # when the first replica has been asked

            def asked_of_the_second(question: Callable[[], Any]) -> Future[Any]:
                changing.set()
                return really_ask(question)

            engine._hand_one_over = ask_and_hand_over  # type: ignore[method-assign]
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


def test_a_drained_replica_takes_nothing_over() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            engine.replicas.is_drained = lambda index: index == 1  # type: ignore[method-assign]
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup)[1] == 0

    asyncio.run(run())


def test_who_is_too_long_for_the_other_cache_goes_on_where_its_prompt_was_computed() -> None:
    async def run() -> None:
        setup = Setup(2, roles=ROLES)
        async with setup.running() as engine:
            hand_over = engine._hand_one_over

            def shrink_and_hand_over(departure: Departure) -> None:
                """As if the other one had been loaded again meanwhile, with less memory left."""
                engine.replicas.engines[1].scheduler.blocks.can_ever_hold = lambda num_tokens: False  # type: ignore[method-assign]
                hand_over(departure)

            engine._hand_one_over = shrink_and_hand_over  # type: ignore[method-assign]
            assert (await ask(engine))[0] == expected_output(PROMPT, 20)
        assert tokens_computed(setup)[1] == 0

    asyncio.run(run())
