"""Pieces of a stream that are written at once, and those that go the usual way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import ALTERNATIVE_BYTES, TOKEN_BYTES, RequestOutput, TokenLogprobs
from llm_serving.engine.request_stream import RequestStream
from llm_serving.server.front_door.lane import Lane
from llm_serving.server.front_door.turns import Turns
from llm_serving.server.generation.generation import READ_AT_ONCE, Generation


class Answer:
    """What a lane knows of an answer, its connection and the clock of its turns."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.writes: list[bytes] = []
        self.now = 0.0
        self.step_s = step_s
        flow, transport = SimpleNamespace(write_paused=False), SimpleNamespace(write=self.writes.append)
        self.cycle: Any = SimpleNamespace(chunked_encoding=True, disconnected=False, flow=flow, transport=transport)
        self.turns = Turns(asyncio.get_running_loop(), budget_s=1.0, clock=lambda: self.now)
        self.lane = Lane(self.cycle, self.turns)

    def to_bytes(self, index: int, text: str) -> bytes:
        self.now += self.step_s
        return text.encode()

    def passes(self, text: str = "abc") -> bool:
        return self.lane.pass_on(self.to_bytes, 0, text)


def test_a_piece_is_written_at_once_as_a_chunk() -> None:
    async def run() -> None:
        answer = Answer()
        assert answer.passes("a" * 17)
        assert answer.passes("")
        assert answer.writes == [b"11\r\n" + b"a" * 17 + b"\r\n"]

    asyncio.run(run())


def test_a_piece_that_has_something_to_wait_for_is_not_even_made() -> None:
    async def run() -> None:
        for place, name, value in (
            ("cycle", "chunked_encoding", None),
            ("cycle", "disconnected", True),
            ("flow", "write_paused", True),
        ):
            answer = Answer(step_s=1.0)
            setattr(answer.cycle if place == "cycle" else answer.cycle.flow, name, value)
            assert not answer.passes()
            assert (answer.writes, answer.now) == ([], 0.0)
        answer = Answer()
        answer.lane.end()
        assert not answer.passes()

    asyncio.run(run())


def test_pieces_beyond_a_turn_wait_for_theirs_and_nobody_passes_those_who_wait() -> None:
    async def run() -> None:
        answer = Answer(step_s=0.4)
        assert [answer.passes() for _ in range(5)] == [True, True, True, False, False]
        await asyncio.sleep(0)
        assert answer.passes()
        answer.turns.do_later("10.0.0.1", lambda: None)
        assert not answer.passes()

    asyncio.run(run())


def piece(number: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", "", (number,), (), 1, 0, number, reason)


def test_a_stream_gives_away_only_what_its_reader_waits_for_and_keeps_the_order() -> None:
    async def run() -> None:
        stream, taken, read = RequestStream("r", lambda _: None), [], []

        def take(output: RequestOutput) -> bool:
            taken.extend(output.token_ids)
            return output.token_ids[0] % 2 == 0

        async def read_all() -> None:
            async for output in stream:
                read.extend(output.token_ids)

        stream.take = take
        stream.put(piece(0))  # nobody waits yet
        reader = asyncio.create_task(read_all())
        await asyncio.sleep(0)
        for number in (2, 3, 4):  # 3 is refused, so that 4 goes behind it
            stream.put(piece(number))
        await asyncio.sleep(0)
        stream.put(piece(6))
        stream.put(piece(8, FinishReason.LENGTH))
        await reader
        assert (taken, read) == ([2, 3, 6], [0, 3, 4, 8])

    asyncio.run(run())


def test_a_stream_tells_what_waits_in_it() -> None:
    async def run() -> None:
        stream, told = RequestStream("r", lambda _: None), []
        logprobs = (TokenLogprobs(5, -1.0, (5, 6), (-1.0, -2.0)),)
        large = RequestOutput("r", "text", (5,), logprobs, 1, 0, 1)
        stream.put(piece(0))
        stream.tell_waiting(told.append)
        stream.put(large)
        assert told == [piece(0).num_bytes, large.num_bytes]
        assert large.num_bytes == piece(0).num_bytes + len("text") + TOKEN_BYTES + 2 * ALTERNATIVE_BYTES
        await anext(stream)
        await anext(stream)
        assert sum(told) == 0
        stream.tell_waiting(None)
        stream.put(piece(1))
        assert sum(told) == 0

    asyncio.run(run())


def test_of_several_choices_too_most_waits_where_it_is_counted() -> None:
    async def run() -> None:
        streams, told = [RequestStream("r", lambda _: None) for _ in range(2)], []
        generation = Generation(streams)
        generation.report_unread_bytes(told.append)
        outputs = generation.outputs()
        streams[0].put(piece(0))
        assert (await anext(outputs)).choice == 0
        for number in range(200):
            streams[number % 2].put(piece(number))
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(told) >= (200 - READ_AT_ONCE - len(streams)) * piece(0).num_bytes
        await generation.aclose()

    asyncio.run(run())


def test_what_fails_in_making_a_piece_is_raised_to_the_reader() -> None:
    async def run() -> None:
        stream = RequestStream("r", lambda _: None)
        stream.take = lambda _: bool(1 // 0)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put(piece(1))
        with pytest.raises(ZeroDivisionError):
            await reader

    asyncio.run(run())
