"""Replicas are drained and join again under load; every request is answered."""

from __future__ import annotations

import asyncio
import contextlib
import random
from threading import Event

import pytest
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.control import ReplicaView
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import RequestError
from support.async_engine_setup import Setup
from support.fake_runner import expected_output

SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def token_ids(stream: RequestStream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


async def reach(engine: AsyncEngine, state: str) -> None:
    """Wait until replica 1 is in this state."""
    async with asyncio.timeout(30):
        while engine.replicas.state(1) != state:
            await asyncio.sleep(0)


def ask(engine: AsyncEngine, number: int) -> RequestStream:
    return engine.generate([5 + number, 6], SAMPLING, request_id=str(number))


def test_drained_replica_finishes_its_requests_and_leaves() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, max_num_seqs=2)
        async with setup.running() as engine:
            for runner in setup.runners.values():
                runner.gate.clear()
            streams = [ask(engine, number) for number in range(12)]  # most of them wait
            engine.control.drain(1)
            engine.control.drain(1)
            assert engine.control.replica_views() == [ReplicaView(0, "serving", 6), ReplicaView(1, "draining", 6)]
            streams += [ask(engine, number) for number in range(12, 16)]
            assert engine.control.replica_views() == [ReplicaView(0, "serving", 10), ReplicaView(1, "draining", 6)]
            for runner in setup.runners.values():
                runner.gate.set()
            answers = await asyncio.gather(*map(token_ids, streams))
            assert answers == [expected_output([5 + number, 6], 6) for number in range(16)]
            await reach(engine, "left")
            health = engine.health()
            assert (health.ready, health.detail, health.loading) == (True, "ready", False)

    asyncio.run(run())


def test_joined_replica_loads_and_serves_again() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            engine.control.drain(1)  # it has no requests
            await reach(engine, "left")
            before = setup.runners[1]
            engine.control.join(1)
            await reach(engine, "serving")
            assert setup.runners[1] is not before
            for runner in setup.runners.values():
                runner.gate.clear()
            streams = [ask(engine, number) for number in range(4)]
            assert [row.num_unfinished for row in engine.control.replica_views()] == [2, 2]
            for runner in setup.runners.values():
                runner.gate.set()
            assert await asyncio.gather(*map(token_ids, streams)) == [expected_output([5 + n, 6], 6) for n in range(4)]

    asyncio.run(run())


def test_draining_replica_that_joins_again_continues() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            before = setup.runners[1]
            before.gate.clear()
            setup.runners[0].gate.clear()
            streams = [ask(engine, number) for number in range(2)]
            engine.control.drain(1)
            engine.control.join(1)
            for runner in setup.runners.values():
                runner.gate.set()
            await asyncio.gather(*map(token_ids, streams))
            assert engine.replicas.state(1) == "serving"
            assert setup.runners[1] is before

    asyncio.run(run())


class NotedGate(Event):
    """A closed gate that sets an event when a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def test_leaving_replica_that_joins_gets_no_request_until_it_has_loaded() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            gates = [NotedGate(), NotedGate()]
            for runner, gate in zip(setup.runners.values(), gates, strict=True):
                runner.gate = gate
            left = [ask(engine, number) for number in range(2)]
            for gate in gates:
                assert await asyncio.to_thread(gate.reached.wait, 30)
            for stream in left:
                await stream.aclose()
            engine.control.drain(1)  # it has no requests, but a step in flight
            engine.control.join(1)
            streams = [ask(engine, number) for number in range(4)]
            for gate in gates:
                gate.set()
            assert await asyncio.gather(*map(token_ids, streams)) == [expected_output([5 + n, 6], 6) for n in range(4)]
            await reach(engine, "serving")

    asyncio.run(run())


def test_replica_drained_right_after_a_request_arrived_answers_it() -> None:
    async def run() -> None:
        setup, loop = Setup(num_replicas=2), asyncio.get_running_loop()
        streams: list[RequestStream] = []

        class Failures(dict[int, str]):
            """Calls back when a replica accepts requests, before it checks whether it was drained."""

            def pop(self, *_: object) -> None:  # type: ignore[override]
                asyncio.run_coroutine_threadsafe(give_and_drain(), loop).result(30)

        async with setup.running() as engine:

            async def give_and_drain() -> None:
                streams.extend(ask(engine, number) for number in range(4))
                assert [row.num_unfinished for row in engine.control.replica_views()] == [2, 2]
                engine.control.drain(1)

            engine.control.drain(1)
            await reach(engine, "left")
            setup.runners[0].gate.clear()
            engine.replicas._failures = Failures()
            engine.control.join(1)
            await reach(engine, "draining")
            setup.runners[0].gate.set()
            assert await asyncio.gather(*map(token_ids, streams)) == [expected_output([5 + n, 6], 6) for n in range(4)]
            await reach(engine, "left")

    asyncio.run(run())


def test_alternating_drain_and_join_under_load_loses_no_request() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2, max_num_seqs=2)
        async with setup.running() as engine:
            streams: list[asyncio.Task[list[int]]] = []
            for turn in range(6):
                streams += [asyncio.create_task(token_ids(ask(engine, 8 * turn + number))) for number in range(8)]
                engine.control.drain(1)
                streams += [asyncio.create_task(token_ids(ask(engine, 100 + turn)))]
                await reach(engine, "left")
                engine.control.join(1)
                if turn % 2:
                    await reach(engine, "serving")
            answers = await asyncio.gather(*streams)
            assert len(answers) == 54 and all(len(answer) == 6 for answer in answers)

    asyncio.run(run())


def test_drain_refuses_the_last_replica_and_unknown_ones() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            engine.control.drain(1)
            for replica, rule in (
                (0, "must not be the only replica that serves"),
                (2, "must be an integer from 0 to 1"),
            ):
                with pytest.raises(RequestError, match=rule):
                    engine.control.drain(replica)
            with pytest.raises(RequestError, match="must be an integer from 0 to 1"):
                engine.control.join(-1)

    asyncio.run(run())


def test_drain_refuses_the_last_serving_replica_while_others_restart() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=3)
        async with setup.running() as engine:
            for index in (0, 2):
                engine.replicas.engines[index]._recovery.restarting = "its machine is lost"
            with pytest.raises(RequestError, match="must not be the only replica that serves"):
                engine.control.drain(1)
            engine.control.drain(2)  # it is restarting
            assert [row.state for row in engine.control.replica_views()][:2] == ["restarting", "serving"]
            assert engine.health().ready

    asyncio.run(run())


def test_rejoined_replica_uses_the_reloaded_rules() -> None:
    """The limit monitor knows it: while replicas use different rules, it does not count migrated requests."""

    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            for answer in engine.replicas.reload(engine.config).values():
                await asyncio.wrap_future(answer)
            engine.control.drain(1)
            await reach(engine, "left")
            engine.control.join(1)
            await reach(engine, "serving")
            rules = [each.scheduler.policy for each in engine.replicas.engines.values()]
            assert type(rules[0]) is type(rules[1])
            assert engine.replicas.accounting.limit_monitor._reloads == {0: 1, 1: 1}

    asyncio.run(run())


@pytest.mark.parametrize("roles", [("prefill", "decode", "decode"), ("prefill", "prefill", "decode")], ids="-".join)
def test_drain_loses_no_request_that_migrates_between_machines(
    roles: tuple[str, ...],
) -> None:
    rng = random.Random("-".join(roles))

    async def run() -> None:
        setup = Setup(len(roles), roles=roles, share_memory=False)
        async with setup.running() as engine:

            async def talk(number: int) -> None:
                for each in range(5):
                    prompt = [5 + number, *range(each, 7 * each + 2)]
                    stream = engine.generate(prompt, SAMPLING, request_id=f"{number}-{each}")
                    assert await token_ids(stream) == expected_output(prompt, 6)
                    with contextlib.suppress(RequestError):  # it is the only one that serves
                        rng.choice((engine.control.drain, engine.control.join))(rng.randrange(len(roles)))

            async with asyncio.timeout(60):
                await asyncio.gather(*map(talk, range(8)))
            assert engine.num_running == engine.num_waiting == len(engine._requests) == 0
            assert not engine._requests.num_migrating_to
            assert not engine.replicas.accounting.tenant_slots.migrating

    asyncio.run(run())


def test_open_replicas_are_recomputed_only_after_a_change() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=3)
        async with setup.running() as engine:
            replicas = engine.replicas
            opened = replicas.open()
            assert [*opened] == [0, 1, 2]
            await token_ids(ask(engine, 0))
            assert replicas.open() is opened
            engine.control.drain(1)
            assert [*replicas.open()] == [0, 2]
            await reach(engine, "left")
            engine.control.join(1)
            await reach(engine, "serving")
            assert [*replicas.open()] == [0, 1, 2]
            assert replicas.open()[1] is not opened[1]
            replicas.engines[2].stop()
            assert [*replicas.open()] == [0, 1]

    asyncio.run(run())
