"""Migration between replicas that share no memory: KV blocks are transferred, or recomputed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from threading import Event
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.fleet import migration
from llm_serving.engine.fleet.migration import MigratingRequest
from llm_serving.errors import WorkerError
from llm_serving.transport.messages import BlockContents, ReadBlocks
from llm_serving.transport.shared_memory import MAX_FRAMES_IN_FLIGHT
from support.async_engine_setup import Setup
from support.fake_runner import expected_output

PROMPT = list(range(3, 20))
ROLES = ("prefill", "decode")
ALL_AGAIN = len(PROMPT) + 19


async def ask(engine: AsyncEngine, prompt: Sequence[int] = PROMPT) -> tuple[list[int], FinishReason | None]:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    token_ids: list[int] = []
    reason = None
    async for piece in engine.generate(list(prompt), sampling, request_id="asked"):
        token_ids += piece.token_ids
        reason = piece.finish_reason
    return token_ids, reason


def on_two_machines(talk: Callable[[Setup, AsyncEngine], Awaitable[None]]) -> Setup:
    """Run `talk` on a server of two replicas that share no memory; return the stopped server."""

    async def run() -> Setup:
        setup = Setup(2, roles=ROLES, share_memory=False)
        async with setup.running() as engine:
            await talk(setup, engine)
        return setup

    return asyncio.run(run())


async def is_answered(engine: AsyncEngine) -> None:
    """Check that a request is answered and that no exported block stays allocated."""
    assert (await ask(engine))[0] == expected_output(PROMPT, 20)
    assert await num_handed_over(engine) == 0


def tokens_computed(setup: Setup) -> list[int]:
    return [sum(step.num_tokens for step in setup.runners[index].steps) for index in range(2)]


async def num_handed_over(engine: AsyncEngine) -> int:
    """Return the exported blocks of the first replica that were not reclaimed."""
    first = engine.replicas.engines[0]
    return await asyncio.wrap_future(first.ask(lambda: first.scheduler.blocks.transfer_pool.pool.num_used_blocks))


def between(setup: Setup, index: int, name: str, happens: Callable[[], object]) -> None:
    """Call a function at the second `read` or `write` of the pool of a replica."""
    pool = setup.pools[index]
    really, calls = getattr(pool, name), []

    def asked(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            happens()
        return really(*args)

    setattr(pool, name, asked)


def held(setup: Setup, index: int, name: str) -> tuple[Event, Event]:
    """As `between`, with a function that sets the first event and waits for the second."""
    came, go_on = Event(), Event()

    def hold() -> None:
        came.set()
        go_on.wait()

    between(setup, index, name, hold)
    return came, go_on


def note_asked(setup: Setup, index: int, under_way: list[int]) -> None:
    """Append the number of frames in flight to `under_way` whenever a frame is sent to a replica."""
    channel, count = setup.links[index]._channel, 0
    send, receive = channel.send, channel.receive

    def sent(message: Any) -> None:
        nonlocal count
        count += isinstance(message, BlockContents | ReadBlocks)
        under_way.append(count)
        send(message)

    def received(timeout_s: float | None = None) -> Any:
        nonlocal count
        count -= 1
        return receive(timeout_s)

    channel.send, channel.receive = sent, received  # type: ignore[method-assign]


def test_blocks_are_transferred_and_no_token_is_recomputed() -> None:
    under_way: tuple[list[int], list[int]] = ([], [])

    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        for index in range(2):
            note_asked(setup, index, under_way[index])
        prompts = [[each, *PROMPT] for each in range(3)]
        answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
        assert [answer for answer, _ in answers] == [expected_output(prompt, 20) for prompt in prompts]
        assert await num_handed_over(engine) == 0

    setup = on_two_machines(talk)
    assert tokens_computed(setup) == [3 * (len(PROMPT) + 1), 3 * 19]
    assert under_way == ([1, *[MAX_FRAMES_IN_FLIGHT] * 4] * 3,) * 2


@pytest.mark.parametrize(("lost", "index", "name"), [(0, 0, "read"), (0, 1, "write"), (1, 0, "read"), (1, 1, "write")])
def test_migrated_request_is_recomputed_after_a_lost_work_agent(lost: int, index: int, name: str) -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        between(setup, index, name, setup.links[lost].close)
        await is_answered(engine)
        assert setup.links[lost].is_closed
        assert not setup.links[1 - lost].is_closed

    assert tokens_computed(on_two_machines(talk)) == [len(PROMPT), ALL_AGAIN]


def test_blocks_with_another_epoch_are_not_transferred() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        def belong_to_another() -> None:
            setup.pools[0].tags.epochs[:] += 1

        between(setup, 0, "read", belong_to_another)
        await is_answered(engine)
        assert not setup.links[0].is_closed

    assert tokens_computed(on_two_machines(talk))[1] == ALL_AGAIN


def test_a_work_agent_without_memory_for_blocks_recomputes_and_receives_the_next_ones() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        def refuse() -> None:
            raise WorkerError("no")

        between(setup, 1, "write", refuse)
        await is_answered(engine)
        await is_answered(engine)

    assert tokens_computed(on_two_machines(talk))[1] == ALL_AGAIN + 19


def test_a_work_agent_replaced_after_the_transfer_fails_no_step() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        second = engine.replicas.engines[1]
        take_over, failed = second.take_over, []

        def replaced(*args: Any, **options: Any) -> None:
            setup.links[1].close()
            take_over(*args, **options)

        second.take_over = replaced  # type: ignore[method-assign]
        second._recover = failed.append  # type: ignore[method-assign]
        await is_answered(engine)
        assert not failed

    assert tokens_computed(on_two_machines(talk))[1] == ALL_AGAIN


def test_request_stays_on_its_replica_if_the_other_is_drained_during_the_transfer() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        def drain() -> None:
            engine.replicas.is_drained = lambda index: index == 1  # type: ignore[method-assign]

        between(setup, 1, "write", drain)
        await is_answered(engine)

    assert tokens_computed(on_two_machines(talk)) == [ALL_AGAIN, 0]


def test_a_request_can_be_cancelled_during_the_transfer() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        loop, done = asyncio.get_running_loop(), Event()

        def cancel() -> None:
            engine.control.cancel("asked")
            done.set()

        def ask_to_cancel() -> None:
            loop.call_soon_threadsafe(cancel)
            done.wait()

        between(setup, 1, "write", ask_to_cancel)
        assert await ask(engine) == (expected_output(PROMPT, 1), FinishReason.ABORT)
        assert await num_handed_over(engine) == 0

    on_two_machines(talk)


@pytest.mark.parametrize("goes_on_at", [1, 0], ids=["where it was to go on", "where it was, as the other is drained"])
def test_a_request_can_get_another_priority_during_the_transfer(goes_on_at: int) -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        came, go_on = held(setup, 1, "write")
        next_one = engine.replicas.engines[goes_on_at]
        take_over, taken = next_one.take_over, []

        def note(migrating: MigratingRequest, **options: Any) -> None:
            taken.append(migrating.request.priority)
            take_over(migrating, **options)

        next_one.take_over = note  # type: ignore[method-assign]
        asked = asyncio.create_task(ask(engine))
        await asyncio.to_thread(came.wait)
        changed = [await engine.control.set_priority("asked", priority) for priority in (-1, 1)]
        running = [engine._queue.class_load(name).num_running for name in ("default", "batch")]
        engine.replicas.is_drained = lambda index: index != goes_on_at  # type: ignore[method-assign]
        go_on.set()
        assert (await asked)[0] == expected_output(PROMPT, 20)
        assert ([list(each.values()) for each in changed], running) == ([[True]] * 2, [0, 1])
        assert (taken, engine._queue.class_load("batch").num_running) == ([1], 0)

    on_two_machines(talk)


def test_simultaneous_migrations_are_distributed_over_replicas() -> None:
    prompts = [[each, *PROMPT] for each in range(4)]

    async def run() -> None:
        setup = Setup(3, roles=("prefill", "decode", "decode"), share_memory=False)
        async with setup.running() as engine:
            came, go_on = held(setup, 0, "read")
            asked = [asyncio.create_task(ask(engine, prompt)) for prompt in prompts]
            await asyncio.to_thread(came.wait)
            coming = engine._requests.num_migrating_to
            while coming.total() < len(prompts):
                await asyncio.sleep(0)
            numbers = [coming[engine.replicas.engines[index]] for index in range(3)]
            go_on.set()
            answers = await asyncio.gather(*asked)
            assert [answer for answer, _ in answers] == [expected_output(prompt, 20) for prompt in prompts]
            assert (numbers, coming.total()) == ([0, 2, 2], 0)

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [False, True], ids=["cancelled", "its client is gone"])
def test_blocks_of_a_finished_request_are_not_transferred(leaves: bool) -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        hand_over, really_read, read = engine._dispatcher._migrate_one, setup.pools[0].read, list[object]()

        def note(*names: Any) -> Any:
            read.append(names)
            return really_read(*names)

        setup.pools[0].read = note  # type: ignore[method-assign]
        stream = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=20), request_id="asked")
        handed_over = asyncio.Event()

        def end_and_hand_over(migrating: MigratingRequest) -> None:
            if leaves:
                engine._dispatcher.abort(stream.request_id)
            else:
                engine.control.cancel("asked")
            hand_over(migrating)
            handed_over.set()

        engine._dispatcher._migrate_one = end_and_hand_over  # type: ignore[method-assign]
        await handed_over.wait()
        if not leaves:
            assert [piece async for piece in stream][-1].finish_reason is FinishReason.ABORT
        async with asyncio.timeout(30):
            while await num_handed_over(engine):
                await asyncio.sleep(0)
        assert not read

    assert tokens_computed(on_two_machines(talk)) == [len(PROMPT), 0]


def test_server_shutdown_ends_requests_in_transfer() -> None:
    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        came, go_on = held(setup, 0, "read")
        asked = asyncio.create_task(ask(engine))
        await asyncio.to_thread(came.wait)
        stopping = asyncio.create_task(engine.stop())
        while engine.replicas.living():
            await asyncio.sleep(0)
        go_on.set()
        assert await asked == (expected_output(PROMPT, 1), FinishReason.UNAVAILABLE)
        await stopping

    on_two_machines(talk)


def test_request_stays_on_its_replica_if_too_many_transfers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migration, "MAX_REQUESTS", 1)

    async def talk(setup: Setup, engine: AsyncEngine) -> None:
        came, go_on = held(setup, 0, "read")
        first = asyncio.create_task(ask(engine))
        await asyncio.to_thread(came.wait)
        assert (await ask(engine, [1, *PROMPT]))[0] == expected_output([1, *PROMPT], 20)
        go_on.set()
        assert (await first)[0] == expected_output(PROMPT, 20)
        assert await num_handed_over(engine) == 0

    assert tokens_computed(on_two_machines(talk)) == [len(PROMPT) + len(PROMPT) + 1 + 19, 19]
