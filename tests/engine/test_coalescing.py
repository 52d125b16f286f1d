"""Answers that several get: computed once, whoever leaves."""

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
from llm_serving.engine.coalescing import CoalescedResponses, Sharing
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.request_stream import TAKEN_AT_ONCE
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
        self.clock, self.aborted, self.put_off = Clock(), [], []
        self.answers = CoalescedResponses(max_bytes, kept_s, self.clock)

    def open(self, key=b"k", **fields):
        def put_off(request_id, deadline):
            self.put_off.append(deadline)

        return self.answers.open(Sharing(key, **fields), f"request-{key.decode()}", self.aborted.append, put_off)


async def all_of(stream) -> list[str]:
    return [each.text async for each in stream]


def test_who_comes_late_gets_all_pieces_in_order():
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


def test_one_that_is_overdue_is_computed_anew_for_whoever_asks_now():
    """The engine may have ended it, and nobody can give it more time then."""

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


def test_others_have_their_turn_while_a_whole_answer_is_read():
    async def run():
        store = Store()
        shared = store.open(keeps=True)
        for _ in range(4 * TAKEN_AT_ONCE):
            shared.put(piece("x"))
        shared.put(piece("y", FinishReason.STOP))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        assert len(await all_of(shared.read("a", None))) == 4 * TAKEN_AT_ONCE + 1
        task.cancel()
        assert turns == 4

    asyncio.run(run())


def test_what_is_remembered_of_those_who_join_is_bounded_also_of_one_id(monkeypatch):
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
def test_what_is_no_answer_is_given_to_nobody_else(reason):
    store = Store()
    store.open(keeps=True).put(piece("1", reason, "broken"))
    assert store.answers.find(b"k") is None


def test_a_kept_answer_lives_as_long_as_it_may():
    async def run():
        store = Store(kept_s=10.0)
        store.open(keeps=True).put(piece("1", FinishReason.STOP))
        store.clock.now = 10.0
        assert await all_of(store.answers.find(b"k").read("b", None)) == ["1"]
        store.clock.now = 10.1
        assert store.answers.find(b"k") is None
        assert store.answers.num_bytes == 0

    asyncio.run(run())


def test_memory_is_bounded_by_what_ended_first_and_then_by_the_longest():
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


def test_only_the_last_that_leaves_ends_it():
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


def test_grace_ends_it_later_unless_somebody_comes():
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


def test_who_cancels_ends_it_for_itself():
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
    ("deadlines", "put_off"),
    [
        ([9e9, None], [None]),
        ([9e9, 8e9], []),
        ([8e9, 9e9, 8e9, None], [9e9, None]),
        ([None, 9e9], []),
        ([None, None], []),
    ],
)
def test_it_is_computed_until_the_latest_deadline_of_those_who_asked(deadlines, put_off):
    async def run():
        store = Store()
        shared = store.open()
        streams = [shared.read("a", None, deadline=each) for each in deadlines]
        assert store.put_off == put_off
        shared.put(piece("1", FinishReason.STOP))
        assert [await all_of(each) for each in streams] == [["1"]] * len(deadlines)

    asyncio.run(run())


def test_the_time_of_each_is_up_by_its_own_deadline():
    async def run():
        store = Store()
        shared, hurried = store.open(), HttpTimings(-2.0)
        patient = shared.read("a", None)
        soon = shared.read("b", hurried, deadline=0.001)
        last = [each async for each in soon][-1]
        assert (last.finish_reason, last.error) == (FinishReason.TIMEOUT, "the request was not done within its 2.001 s")
        assert store.aborted == []
        shared.put(piece("1", FinishReason.STOP))
        assert await all_of(patient) == ["1"]

    asyncio.run(run())


def test_when_nobody_has_time_left_it_ends():
    async def run():
        store = Store()
        shared = store.open()
        streams = [shared.read(name, None, deadline=deadline) for name, deadline in (("a", 0.001), ("b", 0.002))]
        assert store.put_off == [0.002]
        for stream in streams:
            assert [each.finish_reason async for each in stream] == [FinishReason.TIMEOUT]
        assert store.aborted == ["request-k"]

    asyncio.run(run())


def test_each_reader_has_the_time_of_its_first_token():
    store = Store()
    shared, first, late = store.open(), HttpTimings(0.0), HttpTimings(0.0)
    shared.read("a", first)
    store.clock.now = 1.0
    shared.put(piece("1"))
    store.clock.now = 2.0
    shared.read("b", late)
    assert (first.first_token_time, late.first_token_time) == (1.0, 2.0)


def test_an_answer_that_ended_leaves_no_cycle_behind():
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
        """Three that ask for the same while nothing is computed; `act` does something to them."""
        sharing = Sharing(secrets.token_bytes(4))
        async with setup.running() as engine:
            runner = setup.runners[0]
            runner.gate.clear()
            streams = [self.generate(engine, client, sharing, http_timings=HttpTimings(0.0)) for client in "abc"]
            await act(engine, streams)
            runner.gate.set()
            return [[token for each in [p async for p in s] for token in each.token_ids] for s in streams], runner

    def test_the_same_is_computed_once(self):
        setup = Setup()

        async def act(engine, streams):
            assert (engine.num_waiting + engine.num_running) == 1

        answers, runner = asyncio.run(self.run_three(setup, act))
        assert answers == [expected_output(PROMPT, 4)] * 3
        assert sum(step.sampling.num_samples for step in runner.steps) == 4
        counts = {each.name: each.value for family in setup.metrics.registry.collect() for each in family.samples}
        assert counts["llm_serving:shared_answers_total"] == 2

    def test_a_leaver_takes_nothing_from_the_others(self):
        async def act(engine, streams):
            await streams[0].aclose()

        answers, _ = asyncio.run(self.run_three(Setup(), act))
        assert answers[1:] == [expected_output(PROMPT, 4)] * 2

    def test_whoever_joins_a_hurried_one_gets_the_whole_answer(self):
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

    def test_each_is_found_cancelled_and_explained_by_its_own_id(self):
        async def act(engine, streams):
            assert len(engine.control.cancel("cmpl-b", None)) == 1
            with pytest.raises(RequestNotFoundError):
                engine.control.cancel("d", None)
            with pytest.raises(RequestNotFoundError):
                engine.control.cancel("c", "another tenant")

        answers, _ = asyncio.run(self.run_three(Setup(), act))
        assert answers == [expected_output(PROMPT, 4), [], expected_output(PROMPT, 4)]
