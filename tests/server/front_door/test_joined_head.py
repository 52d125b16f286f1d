"""How many writes an answer takes, and when its head goes out."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.front_door import Connection, Guests, Turns
from llm_serving.server.front_door.request_head import RequestHead
from uvicorn.server import ServerState

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}


class Transport(asyncio.Transport):
    """Remembers each write."""

    def __init__(self):
        super().__init__({"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2)})
        self.writes = []
        self.closed = False

    def write(self, data):
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return 0

    def can_write_eof(self):
        return False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def pause_reading(self):
        pass

    resume_reading = pause_reading


async def writes_of(application, method=b"GET", headers=b"", lost=False, transport=None):
    """The writes of one answer, and whether the connection ended behind it."""
    limits, guests = ServerConfig(), Guests(10, 10, 1 << 20)
    config = uvicorn.Config(application, http=Connection, ws="none", lifespan="off", log_config=None)
    config.load()
    turns = Turns(asyncio.get_running_loop(), clock=lambda: 0.0)
    connection = Connection(config, ServerState(), "10.0.0.1", guests, limits, RequestHead(limits), turns)
    assert guests.admit(connection)
    transport = transport or Transport()
    connection.connection_made(transport)
    connection.data_received(method + b" / HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")
    if lost:
        await asyncio.sleep(0)
        transport.closed = True
    await asyncio.gather(*connection.tasks)
    await asyncio.sleep(0)
    closed = transport.closed
    connection.connection_lost(None)
    return transport.writes, closed


async def short(scope, receive, send):
    await send(START)
    await send({"type": "http.response.body", "body": b"four"})


def test_a_short_answer_is_one_write() -> None:
    for headers in (b"", b"Connection: close\r\n"):
        writes, closed = asyncio.run(writes_of(short, headers=headers))
        assert len(writes) == 1
        assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n") and writes[0].endswith(b"\r\n\r\nfour")
        assert closed == bool(headers)


def test_the_head_of_a_stream_does_not_wait_for_its_first_piece() -> None:
    seen = []

    async def slow(scope, receive, send):
        await send(START)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append(len(transport.writes))
        for piece in (b"fo", b"ur"):
            await send({"type": "http.response.body", "body": piece, "more_body": piece == b"fo"})

    transport = Transport()
    writes, _ = asyncio.run(writes_of(slow, transport=transport))
    assert seen == [1]
    assert len(writes) == 3 and writes[1:] == [b"fo", b"ur"]


def test_an_answer_without_a_body_has_its_head() -> None:
    for headers in (b"", b"Connection: close\r\n"):
        writes, _ = asyncio.run(writes_of(short, b"HEAD", headers))
        assert len(writes) == 1 and writes[0].endswith(b"\r\n\r\n")


@pytest.mark.parametrize("behind", [b"garbage", b"GET / HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_refused_at_once_does_not_overtake_an_answer_without_a_body(behind) -> None:
    """Its client would take the refusal for the answer."""
    writes, _ = asyncio.run(writes_of(short, b"HEAD", b"\r\n" + behind))
    assert [each[9:12] for each in writes] == [b"200", b"400"]


def test_nothing_is_written_to_a_client_that_has_left() -> None:
    async def after_a_turn(scope, receive, send):
        await asyncio.sleep(0)
        await short(scope, receive, send)

    assert asyncio.run(writes_of(after_a_turn, lost=True))[0] == []
