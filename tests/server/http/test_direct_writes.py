"""Chunks of a stream that are written directly, and those that are not."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import ALTERNATIVE_BYTES, TOKEN_BYTES, RequestOutput, TokenLogprobs
from llm_serving.engine.request_stream import RequestStream
from llm_serving.server.generation.generation import READ_AT_ONCE, Generation
from llm_serving.server.http.request import REQUEST_KEY
from support.connection_harness import GET, connected, settle


class Stream:
    """An application that bypasses its response object for chunks."""

    def __init__(self):
        self.scope = {}
        self.is_complete = asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.scope = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.is_complete.wait()
        await send({"type": "http.response.body", "body": b"end"})

    def write(self, text: bytes) -> bool:
        return self.scope[REQUEST_KEY].chunk_writer(lambda index, piece: piece, 0)(text)


def never(index, piece):
    raise AssertionError("nothing may be made of it")


def test_direct_write_sends_a_piece_at_once_as_a_chunk():
    async def run():
        async with connected() as (server, connection, transport):
            server.app = stream = Stream()
            connection.data_received(GET % 1)
            await settle()
            assert b"\r\ntransfer-encoding: chunked\r\n" in transport.written
            before = len(transport.written)
            assert stream.write(b"a" * 17)
            assert stream.write(b"")
            assert transport.written[before:] == b"11\r\n" + b"a" * 17 + b"\r\n"
            stream.is_complete.set()
            await settle()
            assert transport.written.endswith(b"a\r\n3\r\nend\r\n0\r\n\r\n")

    asyncio.run(run())


@pytest.mark.parametrize("why", ["the client does not read", "the client has left", "it is complete", "another began"])
def test_direct_write_does_not_serialize_a_piece_that_must_wait(why):
    async def run():
        async with connected() as (server, connection, transport):
            server.app = stream = Stream()
            connection.data_received(GET % 1)
            await settle()
            write = stream.scope[REQUEST_KEY].chunk_writer(never, 0)
            if why == "the client does not read":
                connection.pause_writing()
            elif why == "the client has left":
                connection.connection_lost(None)
            else:
                stream.is_complete.set()
                await settle()
                if why == "another began":
                    stream.is_complete.clear()
                    connection.data_received(GET % 2)
                    await settle()
            before = transport.written
            assert not write(b"piece")
            assert transport.written == before
            stream.is_complete.set()

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_", [b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"], ids=["HEAD", "HTTP/1.0"]
)
def test_direct_write_is_not_used_for_responses_without_chunks(request_):
    async def run():
        async with connected() as (server, connection, _):
            server.app = stream = Stream()
            connection.data_received(request_)
            await settle()
            assert not stream.scope[REQUEST_KEY].chunk_writer(never, 0)(b"piece")
            stream.is_complete.set()

    asyncio.run(run())


def piece(number: int, reason: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", "", (number,), (), 1, 0, number, reason)


def test_direct_writes_keep_the_order_of_a_stream() -> None:
    async def run() -> None:
        stream, taken, read = RequestStream("r", lambda _: None), [], []

        def take(output: RequestOutput) -> bool:
            taken.extend(output.token_ids)
            return output.token_ids[0] % 2 == 0

        async def read_all() -> None:
            async for output in stream:
                read.extend(output.token_ids)

        stream.take = take
        stream.put(piece(0))  # no reader waits yet
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


def test_stream_reports_its_pending_pieces() -> None:
    async def run() -> None:
        stream, reported = RequestStream("r", lambda _: None), []
        logprobs = (TokenLogprobs(5, -1.0, (5, 6), (-1.0, -2.0)),)
        large = RequestOutput("r", "text", (5,), logprobs, 1, 0, 1)
        stream.put(piece(0))
        stream.report_waiting(reported.append)
        stream.put(large)
        assert reported == [piece(0).num_bytes, large.num_bytes]
        assert large.num_bytes == piece(0).num_bytes + len("text") + TOKEN_BYTES + 2 * ALTERNATIVE_BYTES
        await anext(stream)
        await anext(stream)
        assert sum(reported) == 0
        stream.report_waiting(None)
        stream.put(piece(1))
        assert sum(reported) == 0

    asyncio.run(run())


def test_pending_pieces_of_several_choices_are_counted() -> None:
    async def run() -> None:
        streams, reported = [RequestStream("r", lambda _: None) for _ in range(2)], []
        generation = Generation(streams)
        generation.report_unread_bytes(reported.append)
        outputs = generation.outputs()
        streams[0].put(piece(0))
        assert (await anext(outputs)).choice == 0
        for number in range(200):
            streams[number % 2].put(piece(number))
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(reported) >= (200 - READ_AT_ONCE - len(streams)) * piece(0).num_bytes
        await generation.aclose()

    asyncio.run(run())


def test_serialization_error_is_raised_to_the_reader() -> None:
    async def run() -> None:
        stream = RequestStream("r", lambda _: None)
        stream.take = lambda _: bool(1 // 0)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put(piece(1))
        with pytest.raises(ZeroDivisionError):
            await reader

    asyncio.run(run())
