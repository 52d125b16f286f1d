"""Clients that disconnect at critical moments."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.request_stream import RequestStream
from llm_serving.server.generation.generation import ClientGoneError, Generation, run_until_client_leaves
from support.fakes import FakeEngine, FakeStream, Script, Submitted


def test_disconnect_at_the_end_of_a_response_cancels_no_other_task():
    async def run() -> str:
        loop = asyncio.get_running_loop()
        gone, done = loop.create_future(), loop.create_future()

        async def receive() -> dict[str, str]:
            await gone
            return {"type": "http.disconnect"}

        async def work() -> str:
            return await done

        def both_at_once() -> None:
            gone.set_result(None)
            done.set_result("answer")

        loop.call_later(0, both_at_once)
        result = await run_until_client_leaves(receive, work())
        for _ in range(5):  # what follows the work: closing the generation, sending the answer
            await asyncio.sleep(0)
        return result

    assert asyncio.run(run()) == "answer"


def test_disconnect_is_distinguished_from_server_shutdown():
    async def leave() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def stay() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        with pytest.raises(ClientGoneError):
            await run_until_client_leaves(leave, asyncio.Event().wait())
        task = asyncio.create_task(run_until_client_leaves(stay, asyncio.Event().wait()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_cancelled_close_still_aborts_the_requests():
    async def run() -> list[str]:
        engine = FakeEngine()
        held = Script(hold_after=0)
        asked = [Submitted([1], SamplingParams(), f"request-{i}", 0) for i in range(2)]
        generation = Generation([FakeStream(engine, each, held) for each in asked])
        reading = asyncio.create_task(anext(generation.outputs()))
        await engine.held.wait()
        closing = asyncio.create_task(generation.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        reading.cancel()
        await asyncio.gather(closing, reading, return_exceptions=True)
        return engine.aborted

    assert asyncio.run(run()) == ["request-0", "request-1"]


def test_outputs_that_a_response_did_not_get_are_not_counted():
    async def read_one() -> None:
        streams = [RequestStream(name, lambda request_id: None) for name in "ab"]
        charged: list[int] = []
        generation = Generation(streams, on_close=charged.append)
        outputs = generation.outputs()
        for stream in streams:
            for count in (1, 2, 3):
                stream.put(RequestOutput("r", "x", (1,), (), 3, 0, count, FinishReason.LENGTH if count == 3 else None))
        await anext(outputs)  # the tasks that merge the streams read further ahead
        await generation.aclose()
        assert charged == [1]
        assert sorted(each.latest is None for each in streams) == [False, True]

    asyncio.run(read_one())
