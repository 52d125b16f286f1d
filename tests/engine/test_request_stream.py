"""Request coalescing: identical requests are computed once, whichever client disconnects."""

from __future__ import annotations

import asyncio
import gc
import secrets
import weakref
from threading import Event

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import Caller
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.timings import HttpTimings
from llm_serving.engine import open_requests
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.request_stream import MAX_READ_AT_ONCE, CoalescedResponses, Sharing
from llm_serving.errors import RequestNotFoundError
from support.async_engine_setup import Setup
from support.fake_runner import expected_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 6, 7]


def piece(text="x", reason=None, error=None) -> RequestOutput:
    return RequestOutput("r", text, (1,), (), 3, 0, 1, reason, error=error)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Store:
    def __init__(self, max_bytes=2**20, kept_s=10.0):
        self.clock, self.aborted, self.extended = Clock(), [], []
        self.answers = CoalescedResponses(max_bytes, kept_s, self.clock)

    def open(self, key=b"k", **fields):
        def extend(request_id, deadline):
            self.extended.append(deadline)

        return self.answers.open(Sharing(key, **fields), f"request-{key.decode()}", self.aborted.append, extend)


async def all_of(stream) -> list[str]:
    return [each.text async for each in stream]


def test_late_reader_of_a_coalesced_response_gets_all_outputs_in_order():
    async def run():
        store = Store()
        shared = store.open()
        first = shared.read("a", None)
        shared.put(piece("1"))
        late = store.answers.find(b"k").read("b", None)
        shared.put(piece("2", FinishReason.STOP))
        assert await all_of(first) == await all_of(late) == ["1", "2"]
        assert (len(store.answers), store.answers.num_bytes) == (0, 0), "not kept"

    asyncio.run(run())


def test_expired_coalesced_response_is_computed_again_for_new_requests():
    """The engine may have ended the request, so its deadline cannot be extended."""

    async def run():
        store = Store()
        shared = store.open()
        shared.put(piece("1"))
        hurried = shared.read("a", None, deadline=10.0)
        store.clock.now = 9.9
        assert store.answers.find(b"k") is shared
        store.clock.now = 10.0
        assert store.answers.find(b"k") is None
        again = store.open()
        patient = again.read("b", None)
        shared.put(piece("2", FinishReason.TIMEOUT, "too late"))
        again.put(piece("3", FinishReason.STOP))
        assert (await all_of(hurried), await all_of(patient)) == (["1", "2"], ["3"])
        assert store.answers.num_bytes == 0

    asyncio.run(run())


def test_reading_a_long_coalesced_response_yields_to_other_tasks():
    async def run():
        store = Store()
        shared = store.open(keeps=True)
        for _ in range(4 * MAX_READ_AT_ONCE):
            shared.put(piece("x"))
        shared.put(piece("y", FinishReason.STOP))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert len(await all_of(shared.read("a", None))) == 4 * MAX_READ_AT_ONCE + 1
        task.cancel()
        assert turns == 4

    asyncio.run(run())


def test_number_of_recorded_coalesced_ids_is_bounded(monkeypatch):
    monkeypatch.setattr(open_requests, "MAX_COALESCED", 3)
    requests = OpenRequests()
    for number in range(5):
        requests.record_coalesced("a", f"r-{number}")
        requests.record_coalesced("a", f"r-{number}")
    assert requests.coalesced_with("a") == ["r-2", "r-3", "r-4"]
    requests.record_coalesced("b", "r-5")
    requests.record_coalesced("c", "r-6")
    assert [requests.coalesced_with(each) for each in "abc"] == [["r-4"], ["r-5"], ["r-6"]]
    requests.record_coalesced("c", "r-7")
    assert requests.coalesced_with("a") == []


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT])
def test_failed_or_aborted_response_is_not_shared(reason):
    store = Store()
    store.open(keeps=True).put(piece("1", reason, "broken"))
    assert store.answers.find(b"k") is None


def test_finished_coalesced_response_expires():
    async def run():
        store = Store(kept_s=10.0)
        store.open(keeps=True).put(piece("1", FinishReason.STOP))
        store.clock.now = 10.0
        assert await all_of(store.answers.find(b"k").read("b", None)) == ["1"]
        store.clock.now = 10.1
        assert store.answers.find(b"k") is None
        assert store.answers.num_bytes == 0

    asyncio.run(run())


def test_coalesced_responses_evict_the_oldest_finished_then_the_largest_in_flight():
    async def run():
        store = Store(max_bytes=1700)
        store.open(b"old", keeps=True).put(piece("1", FinishReason.STOP))
        running, other = store.open(b"new"), store.open(b"short")
        reader = running.read("a", None)
        other.put(piece("y"))
        for _ in range(3):
            running.put(piece("x"))
        assert store.answers.find(b"old") is not None
        running.put(piece("x"))
        assert store.answers.find(b"old") is None
        assert store.answers.num_bytes <= 1700
        running.put(piece("x"))
        assert store.answers.find(b"new") is None
        assert store.answers.find(b"short") is not None
        running.put(piece("x", FinishReason.STOP))
        assert await all_of(reader) == ["x"] * 6, "who reads reads on"
        assert store.answers.num_bytes <= 1700

    asyncio.run(run())


def test_coalesced_response_is_aborted_when_its_last_reader_leaves():
    async def run():
        store = Store()
        shared = store.open()
        first, second = shared.read("a", None), shared.read("b", None)
        await first.aclose()
        await first.aclose()
        assert store.aborted == []
        await second.aclose()
        assert store.aborted == ["request-k"]

    asyncio.run(run())


def test_coalesced_response_without_readers_is_aborted_after_its_grace_period():
    async def run():
        store = Store()
        ended = asyncio.Event()
        shared = store.answers.open(Sharing(b"k", grace_s=0.01), "r", lambda _: ended.set(), lambda *_: None)
        await shared.read("a", None).aclose()
        again = shared.read("a", None)
        assert not ended.is_set()
        await again.aclose()
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(run())


def test_cancelling_a_coalesced_response_ends_it_for_that_client():
    async def run():
        store = Store()
        shared = store.open()
        mine, others = shared.read("a", None), shared.read("b", None)
        shared.put(piece("1"))
        assert shared.cancel(["a"])
        shared.put(piece("2", FinishReason.STOP))
        pieces = [each async for each in mine]
        assert [each.text for each in pieces] == ["1", ""]
        assert pieces[-1].finish_reason is FinishReason.ABORT
        assert await all_of(others) == ["1", "2"]
        assert not store.open().cancel(["a"]), "nobody else reads"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("deadlines", "extended"),
    [
        ([9e9, None], [None]),
        ([9e9, 8e9], []),
        ([8e9, 9e9, 8e9, None], [9e9, None]),
        ([None, 9e9], []),
        ([None, None], []),
    ],
)
def test_coalesced_response_is_computed_until_its_latest_deadline(deadlines, extended):
    async def run():
        store = Store()
        shared = store.open()
        streams = [shared.read("a", None, deadline=each) for each in deadlines]
        assert store.extended == extended
        shared.put(piece("1", FinishReason.STOP))
        assert [await all_of(each) for each in streams] == [["1"]] * len(deadlines)

    asyncio.run(run())


def test_each_reader_of_a_coalesced_response_times_out_by_its_own_deadline():
    async def run():
        store = Store()
        shared, hurried = store.open(), HttpTimings(-2.0)
        patient = shared.read("a", None)
        soon = shared.read("b", hurried, deadline=0.001)
        last = [each async for each in soon][-1]
        assert last.finish_reason == FinishReason.TIMEOUT
        assert last.error == "the request did not finish within its time limit of 2.001 s"
        assert store.aborted == []
        shared.put(piece("1", FinishReason.STOP))
        assert await all_of(patient) == ["1"]

    asyncio.run(run())


def test_coalesced_response_ends_when_all_deadlines_have_passed():
    async def run():
        store = Store()
        shared = store.open()
        streams = [shared.read(name, None, deadline=deadline) for name, deadline in (("a", 0.001), ("b", 0.002))]
        assert store.extended == [0.002]
        for stream in streams:
            assert [each.finish_reason async for each in stream] == [FinishReason.TIMEOUT]
        assert store.aborted == ["request-k"]

    asyncio.run(run())


def test_each_reader_of_a_coalesced_response_records_its_first_token_time():
    store = Store()
    shared, first, late = store.open(), HttpTimings(0.0), HttpTimings(0.0)
    shared.read("a", first)
    store.clock.now = 1.0
    shared.put(piece("1"))
    store.clock.now = 2.0
    shared.read("b", late)
    assert (first.first_token_time, late.first_token_time) == (1.0, 2.0)


def test_finished_coalesced_response_leaves_no_reference_cycle():
    async def run():
        store = Store()
        gc.collect()
        gc.disable()
        try:
            for keeps in (False, True):
                shared = store.open(keeps=keeps)
                stream = shared.read("a", None)
                shared.put(piece("1", FinishReason.STOP))
                if keeps:
                    await all_of(shared.read("b", None))
                gone = weakref.ref(stream)
                await all_of(stream)
                del stream
                assert gone() is None
        finally:
            gc.enable()

    asyncio.run(run())


class TestOnAnEngine:
    def generate(self, engine, client, sharing, **caller):
        return engine.generate(PROMPT, GREEDY, Caller(**caller), request_id=client, sharing=sharing)

    async def run_three(self, setup, act):
        """Submit three identical requests while no step runs; `act` then acts on their streams."""
        sharing = Sharing(secrets.token_bytes(4))
        async with setup.running() as engine:
            runner = setup.runners[0]
            runner.gate.clear()
            streams = [self.generate(engine, client, sharing, http_timings=HttpTimings(0.0)) for client in "abc"]
            await act(engine, streams)
            runner.gate.set()
            return [[token for each in [p async for p in s] for token in each.token_ids] for s in streams], runner

    def test_identical_requests_are_computed_once(self):
        setup = Setup()

        async def act(engine, streams):
            assert (engine.num_waiting + engine.num_running) == 1

        answers, runner = asyncio.run(self.run_three(setup, act))
        assert answers == [expected_output(PROMPT, 4)] * 3
        assert sum(step.sampling.num_samples for step in runner.steps) == 4
        counts = {each.name: each.value for family in setup.metrics.registry.collect() for each in family.samples}
        assert counts["llm_serving:shared_answers_total"] == 2

    def test_client_that_disconnects_does_not_affect_other_readers(self):
        async def act(engine, streams):
            await streams[0].aclose()

        answers, _ = asyncio.run(self.run_three(Setup(), act))
        assert answers[1:] == [expected_output(PROMPT, 4)] * 2

    def test_request_that_joins_one_with_a_short_deadline_gets_the_whole_answer(self):
        async def run():
            setup, sharing = Setup(), Sharing(b"k")
            async with setup.running() as engine:
                setup.runners[0].gate.clear()
                soon = engine.clock() + 0.01
                both_have_come = Event()
                engine.replicas.engines[0].ask(both_have_come.wait)  # as the engine ends the first one when it is late
                hurried = self.generate(engine, "a", sharing, http_timings=HttpTimings(engine.clock()), deadline=soon)
                patient = self.generate(engine, "b", sharing)
                both_have_come.set()
                late = [each async for each in hurried][-1]
                setup.runners[0].gate.set()
                return late, [token async for each in patient for token in each.token_ids]

        late, tokens = asyncio.run(run())
        assert late.finish_reason is FinishReason.TIMEOUT
        assert tokens == expected_output(PROMPT, 4)

    def test_coalesced_requests_are_found_cancelled_and_explained_by_their_own_ids(self):
        async def act(engine, streams):
            assert len(engine.control.cancel("cmpl-b", None)) == 1
            with pytest.raises(RequestNotFoundError):
                engine.control.cancel("d", None)
            with pytest.raises(RequestNotFoundError):
                engine.control.cancel("c", "another tenant")

        answers, _ = asyncio.run(self.run_three(Setup(), act))
        assert answers == [expected_output(PROMPT, 4), [], expected_output(PROMPT, 4)]

    def test_coalesced_request_is_cancelled_for_all_clients_by_its_engine_id(self):
        async def act(engine, streams):
            assert engine.control.cancel(streams[0].request_id, None) == [streams[0].request_id]

        answers, _ = asyncio.run(self.run_three(Setup(), act))
        assert max(map(len, answers)) <= 1, "only the step in flight may still give a token"

    def test_request_that_follows_a_cancelled_identical_one_is_computed(self):
        async def run():
            setup, sharing = Setup(), Sharing(b"k")
            async with setup.running() as engine:
                setup.runners[0].gate.clear()
                first = self.generate(engine, "a", sharing)
                assert engine.control.cancel("a", None) == [first.request_id]
                second = self.generate(engine, "b", sharing)
                setup.runners[0].gate.set()
                reasons = [[each async for each in stream][-1].finish_reason for stream in (first, second)]
                return reasons, len(engine.coalesced)

        assert asyncio.run(run()) == ([FinishReason.ABORT, FinishReason.LENGTH], 0)
