"""AsyncEngine: streams, routing, admission, and requests that cannot be served."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import Caller
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine import control
from llm_serving.engine.sinks import SinkContext
from llm_serving.errors import (
    CapacityError,
    ContextLengthError,
    RequestError,
    UnavailableError,
    WorkerDiedError,
)
from support.async_engine_setup import Setup, token_ids
from support.fake_runner import VOCAB_SIZE, expected_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_async_engine_streams_the_answers_of_many_requests() -> None:
    async def run() -> None:
        async with Setup().running() as engine:
            prompts = [list(range(3, 8 + i)) for i in range(20)]
            streams = [engine.generate(prompt, GREEDY, request_id="same") for prompt in prompts]
            answers = await asyncio.gather(*map(token_ids, streams))
            assert answers == [expected_output(prompt, 4) for prompt in prompts]

    asyncio.run(run())


def test_request_lookup_does_not_reuse_the_state_of_an_ended_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_ended(question: object) -> None:
        raise WorkerDiedError("since it was found living")

    async def run() -> None:
        async with Setup(num_replicas=2).running() as engine:
            assert sorted(await engine.lookup.scheduler_states()) == [0, 1]
            monkeypatch.setattr(engine.replicas.engines[0], "ask", has_ended)
            assert sorted(await engine.lookup.scheduler_states()) == [1]

    asyncio.run(run())


def test_admission_limits_the_waiting_requests_of_a_tenant() -> None:
    async def run() -> None:
        keys = (ApiKey(name="a", key_sha256="0a" * 32, max_waiting=2), ApiKey(name="b", key_sha256="0b" * 32))
        setup = Setup(api_keys=keys)
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            streams = [engine.generate([5, 6], GREEDY, request_id="x", caller=Caller(tenant="a")) for _ in range(2)]
            with pytest.raises(CapacityError, match=r"2 of 2 requests of a wait in .*\(api_keys\.a\.max_waiting\)"):
                engine.generate([5, 6], GREEDY, request_id="x", caller=Caller(tenant="a"))
            with pytest.raises(CapacityError):
                engine.check_capacity([2], Caller(tenant="a"))
            streams += [engine.generate([5, 6], GREEDY, request_id="x", caller=Caller(tenant="b")) for _ in range(5)]
            await streams[0].aclose()
            streams.append(engine.generate([5, 6], GREEDY, request_id="x", caller=Caller(tenant="a")))
            setup.runners[0].gate.set()
            await asyncio.gather(*(anext(stream) for stream in streams[1:]))
            streams += [engine.generate([5, 6], GREEDY, request_id="x", caller=Caller(tenant="a")) for _ in range(2)]
            answers = await asyncio.gather(*map(token_ids, streams[-2:]))
            assert answers == [expected_output([5, 6], 4)] * 2

    asyncio.run(run())


def test_router_spreads_requests_over_replicas() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            for runner in setup.runners.values():
                runner.gate.clear()
            streams = [engine.generate([5, 6], GREEDY, request_id=str(i)) for i in range(6)]
            for runner in setup.runners.values():
                runner.gate.set()
            await asyncio.gather(*map(token_ids, streams))
            seeds = [sum(step.num_rows for step in runner.steps) for runner in setup.runners.values()]
            assert seeds == [12, 12]

    asyncio.run(run())


def test_dispatcher_ends_a_request_whose_engine_ends_by_an_exception() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            (replica,) = engine.replicas.engines.values()

            def receive(request: Request, context: SinkContext) -> object:
                if request.prompt_token_ids == [13]:
                    raise ValueError("a fault of ours")
                return known(request, context)

            known, replica._attach_sink = replica._attach_sink, receive
            all_have_come = Event()
            replica.ask(all_have_come.wait)
            prompts = [[5], [13], [13], [6]]  # the second one with a fault is met while all others are ended
            streams = [engine.generate(each, GREEDY, request_id=str(i)) for i, each in enumerate(prompts)]
            all_have_come.set()
            async with asyncio.timeout(30):
                last = [[piece async for piece in stream][-1] for stream in streams]
            assert all(
                each.finish_reason is FinishReason.ERROR and "a fault of ours" in str(each.error) for each in last
            )
            assert (engine.num_waiting, engine.num_running) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("num_faults", [1, 2])
def test_dispatcher_ends_only_the_request_whose_output_cannot_be_delivered(num_faults: int) -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            leave, faults = engine._queue.remove, []

            def fail_at_first(request_id: str) -> None:
                if len(faults) < num_faults:
                    faults.append(request_id)
                    raise ValueError("a fault of ours")
                leave(request_id)

            engine._queue.remove = fail_at_first  # type: ignore[method-assign]
            all_have_come = Event()
            engine.replicas.engines[0].ask(all_have_come.wait)
            streams = [engine.generate([5, 6 + i], GREEDY, request_id=str(i)) for i in range(3)]
            all_have_come.set()
            async with asyncio.timeout(30):
                last = [[piece async for piece in stream][-1] for stream in streams]
            assert [each.finish_reason for each in last] == [FinishReason.ERROR, *[FinishReason.LENGTH] * 2]
            assert "a fault of ours" in str(last[0].error)
            assert faults == [streams[0].request_id] * num_faults

    asyncio.run(run())


def test_open_requests_do_not_keep_an_ended_engine() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            ended = engine.replicas.engines[0]
            setup.runners[0].dead = True
            stream = engine.generate([5, 6], GREEDY, request_id="a")
            async with asyncio.timeout(30):
                assert [piece async for piece in stream][-1].failed
                while engine.replicas.engines[0] is ended or engine.health().detail != "ready":
                    await asyncio.sleep(0)
            assert await token_ids(engine.generate([9], GREEDY, request_id="after")) == expected_output([9], 4)
            assert ended not in engine._requests.num_of

    asyncio.run(run())


def test_control_updates_the_admission_queue_when_a_priority_change_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STATE_TIMEOUT_S", 0.01)

    async def run() -> None:
        setup = Setup(max_num_seqs=1)
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            first = engine.generate([5], GREEDY, request_id="a")
            while engine.num_running == 0:
                await asyncio.sleep(0)
            second = engine.generate([5], GREEDY, request_id="b")
            moved = asyncio.Event()
            move = engine._queue.change_class
            engine._queue.change_class = lambda *change: (move(*change), moved.set())  # type: ignore[method-assign]
            with pytest.raises(UnavailableError, match=r"did not confirm the new priority within 0\.01 s"):
                await engine.control.set_priority("b", 1)
            setup.runners[0].gate.set()
            async with asyncio.timeout(30):
                await moved.wait()
                await asyncio.gather(token_ids(first), token_ids(second))
            assert engine._queue.class_load("batch").num_running == engine._queue.load().num_waiting == 0

    asyncio.run(run())


def test_full_admission_queue_refuses_with_retry_after() -> None:
    async def run() -> None:
        setup = Setup(max_waiting_queue=2, max_num_seqs=1)
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            first = engine.generate([5], GREEDY, request_id="a")
            while engine.num_running == 0:
                await asyncio.sleep(0)
            waiting = [engine.generate([5], GREEDY, request_id="b") for _ in range(2)]
            with pytest.raises(CapacityError, match="2 of 2 requests wait in the queue") as refused:
                engine.generate([5], GREEDY, request_id="c")
            assert refused.value.retry_after is not None
            setup.runners[0].gate.set()
            for stream in (first, *waiting):
                assert await token_ids(stream) == expected_output([5], 4)

    asyncio.run(run())


def test_admission_admits_or_refuses_a_group_as_a_whole() -> None:
    async def run() -> None:
        setup = Setup(max_waiting_queue=3, max_waiting_tokens=20)
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            streams = [engine.generate([5] * 6, GREEDY, request_id="a")]
            engine.check_capacity([6, 6])
            with pytest.raises(CapacityError, match=r"1 of 3 requests wait in the queue .*; 3 needed"):
                engine.check_capacity([1, 1, 1])
            with pytest.raises(CapacityError, match=r"6 of 20 prompt tokens wait in the queue .*; 15 needed"):
                engine.check_capacity([15])
            with pytest.raises(RequestError, match="`n` must ask for at most 3 answers"):
                engine.check_capacity([1] * 4)
            assert engine.num_waiting == 1
            setup.runners[0].gate.set()
            await asyncio.gather(*map(token_ids, streams))
            assert (engine.num_waiting, engine.num_running) == (0, 0)
            engine.check_capacity([5, 5, 5])

    asyncio.run(run())


def test_admission_refuses_a_request_far_beyond_its_target_with_the_prediction() -> None:
    async def run() -> None:
        setup = Setup(slo_refusal_factor=2.0)
        async with setup.running() as engine:
            predictor = engine.replicas.engines[0].ttft_predictor
            for step in range(64):  # ten seconds for each step and one for each token
                tokens = 2 + step % 5
                predictor.record_step(num_tokens=tokens, num_rows=2, seconds=10 + tokens, num_finished=0)
            with pytest.raises(CapacityError, match=r"expected in 14\.0 s, more than 5 s times 2 ") as refused:
                engine.generate([5] * 4, GREEDY, request_id="b")
            assert refused.value.retry_after == pytest.approx(9.5, abs=0.5)  # 14 - 5 s, and jitter
            assert refused.value.queue_estimate_ms == pytest.approx(14000)
            assert engine.seconds_to_first_token(4) == pytest.approx(14.0)
            # Nothing was promised to the class of priority 1.
            assert await token_ids(
                engine.generate([5], GREEDY, request_id="c", caller=Caller(priority=1))
            ) == expected_output([5], 4)
            for step in range(20_000):  # a second for each step and a tenth for each token
                tokens = 2 + step % 5
                predictor.record_step(num_tokens=tokens, num_rows=2, seconds=1 + tokens / 10, num_finished=0)
            assert engine.seconds_to_first_token(4) == pytest.approx(1.4)
            assert await token_ids(engine.generate([5] * 4, GREEDY, request_id="a")) == expected_output([5] * 4, 4)
            text = setup.metrics.render()[0].decode()
            refusals = (
                'llm_serving:requests_refused_total{model_name="model",priority_class="standard",reason="slo"} 1.0'
            )
            assert refusals in text

    asyncio.run(run())


def test_closing_a_stream_aborts_its_request() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            stream = engine.generate([5], SamplingParams(max_tokens=60, ignore_eos=True), request_id="a")
            await stream.aclose()
            await stream.aclose()
            setup.runners[0].gate.set()
            while engine.num_running + engine.num_waiting:
                await asyncio.sleep(0)
            assert await token_ids(engine.generate([9], GREEDY, request_id="b")) == expected_output([9], 4)

    asyncio.run(run())


def test_stopping_the_engine_ends_open_streams_with_an_error() -> None:
    async def run() -> None:
        setup = Setup()
        async with setup.running() as engine:
            setup.runners[0].gate.clear()
            stream = engine.generate([5], SamplingParams(max_tokens=60, ignore_eos=True), request_id="a")
            stopping = asyncio.create_task(engine.stop())
            await asyncio.sleep(0)  # the engine has received the message
        await stopping
        last = [piece async for piece in stream][-1]
        assert last.finish_reason is FinishReason.UNAVAILABLE
        assert "shutting down" in (last.error or "")

    asyncio.run(run())


def test_requests_of_an_engine_that_has_not_started_end_with_the_server() -> None:
    """The engine thread is stopped after requests may be submitted and before its first step."""
    may_begin = Event()

    class Held(dict[int, str]):
        def pop(self, *arguments: Any) -> Any:
            may_begin.wait()
            return super().pop(*arguments)

    async def run() -> None:
        setup = Setup()
        setup.engine.replicas._failures = Held()
        setup.engine.start()
        while setup.engine.health().loading:
            await asyncio.sleep(0)
        stream = setup.engine.generate([5], GREEDY, request_id="a")
        stopping = asyncio.create_task(setup.engine.stop())
        await asyncio.sleep(0)  # the engine has received the message
        may_begin.set()
        await stopping
        async with asyncio.timeout(30):
            assert [piece async for piece in stream][-1].finish_reason is FinishReason.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ([], GREEDY, RequestError, "at least one token"),
        ([5] * 65, GREEDY, ContextLengthError, "at most 64 tokens long"),
        ([5] * 61, GREEDY, ContextLengthError, "with the prompt of 61 tokens must be at most 64"),
        ([VOCAB_SIZE], GREEDY, RequestError, "token ids from 0 to 999"),
        ([-1], GREEDY, RequestError, "token ids from 0 to 999"),
        ([5], SamplingParams(stop_token_ids=(VOCAB_SIZE,)), RequestError, "stop_token_ids"),
        ([5], SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)), RequestError, "logit_bias"),
    ],
)
def test_async_engine_refuses_requests_that_can_never_be_served(prompt, sampling, error, message) -> None:
    async def run() -> None:
        async with Setup().running() as engine:
            with pytest.raises(error, match=message):
                engine.generate(prompt, sampling, request_id="a")

    asyncio.run(run())
