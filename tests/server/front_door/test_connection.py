"""A connection between a transport and an application, both seen from within: what is held, parsed and handed over."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import asynccontextmanager

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.config.schema import ServerConfig
from llm_serving.server.front_door import Connection, Guests, Turns
from llm_serving.server.front_door.connection import READ_BYTES, SLICE_BYTES, TLS_BYTES, WRITE_BUFFER_BYTES
from llm_serving.server.front_door.parting import LINGER_LEAST_BYTES
from llm_serving.server.front_door.request_head import RequestHead
from llm_serving.server.front_door.slow_reader import TAKEN_BYTES
from uvicorn.server import ServerState

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
DECLARED = b"POST /%d HTTP/1.1\r\nContent-Length: 12\r\n\r\na\n\r\nb\r\n\r\ncd!"
CHUNKED = (
    b"POST /%d HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\na\n\r\nb\r\n7\r\n\r\n\r\ncd!\r\n0\r\nT: u\r\n\r\n"
)


class Transport(asyncio.Transport):
    """Remembers what was written; never sends."""

    def __init__(self, **extra):
        super().__init__({"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2), **extra})
        self.written = b""
        self.unsent = 0
        self.reading = True
        self.closed = self.aborted = self.eof = False

    def write(self, data):
        self.written += data

    def write_eof(self):
        self.eof = True

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return self.unsent

    def set_write_buffer_limits(self, high=None, low=None):
        self.high = high

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.closed or self.aborted

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True

    @property
    def statuses(self):
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


class Application:
    """Echoes path and body; waits for `gate` before the answer."""

    def __init__(self):
        self.paths = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = []
        self.reads = True

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        body = bytearray()
        more = self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return
            body += message["body"]
            more = message["more_body"]
        watch = asyncio.ensure_future(receive() if self.reads else asyncio.Event().wait())
        gate = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait([watch, gate], return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, gate):
            task.cancel()
        if not self.gate.is_set():
            self.left.append(scope["path"])
            return
        answer = scope["path"].encode() + b"=" + bytes(body) + b";"
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class Door:
    """An application behind the front door."""

    def __init__(self, **limits):
        self.limits = ServerConfig(**limits)
        self.app = Application()
        self.guests = Guests(100, 100, self.limits.max_buffered_bytes)
        self.config = uvicorn.Config(self.app, http=Connection, ws="none", lifespan="off", log_config=None)
        self.config.load()

    def connection(self):
        head = RequestHead(self.limits)
        turns = Turns(asyncio.get_running_loop(), clock=lambda: 0.0)
        connection = Connection(self.config, ServerState(), "10.0.0.1", self.guests, self.limits, head, turns)
        assert self.guests.admit(connection)
        return connection

    def connect(self):
        connection = self.connection()
        transport = Transport()
        connection.connection_made(transport)
        return connection, transport


@asynccontextmanager
async def door(**limits):
    """The door, an application and one connection; afterwards the connection is lost and nothing is left behind."""
    house = Door(**limits)
    connection, transport = house.connect()
    try:
        yield house, connection, transport
    finally:
        house.app.gate.set()
        connection.connection_lost(None)
        await settle()
        for task in connection.tasks:
            task.cancel()
        assert house.guests.num_bytes == 0


async def settle():
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class TestCutting:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_any_cuts_give_the_same_answers_in_order(self, data):
        kinds = data.draw(st.lists(st.sampled_from([GET, DECLARED, CHUNKED]), min_size=1, max_size=6))
        stream = b"".join(kind % number for number, kind in enumerate(kinds))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=40)))
        wait = data.draw(st.booleans())

        async def run():
            async with door() as (_, connection, transport):
                for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                    if begin < end:
                        connection.data_received(stream[begin:end])
                    if wait:
                        await settle()
                while len(transport.statuses) < len(kinds):
                    await asyncio.sleep(0)
                bodies = {GET: b"", DECLARED: b"a\n\r\nb\r\n\r\ncd!", CHUNKED: b"a\n\r\nb\r\n\r\ncd!"}
                answers = [b"/%d=%s;" % (number, bodies[kind]) for number, kind in enumerate(kinds)]
                places = [transport.written.find(answer) for answer in answers]
                assert places == sorted(places)
                assert -1 not in places
                assert not transport.is_closing()

        asyncio.run(run())

    def test_a_byte_at_a_time(self):
        async def run():
            async with door() as (house, connection, transport):
                for byte in GET % 1 + CHUNKED % 2 + DECLARED % 3:
                    connection.data_received(bytes([byte]))
                    await settle()
                assert house.app.paths == ["/1", "/2", "/3"]
                assert transport.statuses == [200, 200, 200]

        asyncio.run(run())

    def test_empty_lines_before_a_request_mean_nothing(self):
        async def run():
            async with door() as (_, connection, transport):
                for _ in range(3):
                    connection.data_received(b"\r\n\r\n\n" + GET % 1)
                    await settle()
                assert transport.statuses == [200] * 3

        asyncio.run(run())

    @pytest.mark.parametrize("request_", [GET % 0, DECLARED % 0, CHUNKED % 0])
    def test_an_upgrade_is_answered_without_it(self, request_):
        """Java's client asks for HTTP/2 with every request, those with a body among them."""
        line, rest = request_.split(b"\r\n", 1)
        asking = b"\r\n".join(
            [line, b"Connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"HTTP2-Settings: AAMA", rest]
        )

        async def run():
            async with door() as (_, connection, transport):
                connection.data_received(asking + GET % 1)
                await settle()
                await settle()
                body = b"" if request_.startswith(b"GET") else b"a\n\r\nb\r\n\r\ncd!"
                assert transport.statuses == [200, 200]
                assert b"/0=" + body + b";" in transport.written
                assert not transport.closed

        asyncio.run(run())


class TestTurns:
    def test_a_chunked_body_is_parsed_a_slice_a_turn(self):
        async def run():
            async with door() as (_, connection, transport):
                body = b"\n\r\n" * 20_000
                connection.data_received(b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body))
                connection.data_received(body[:50_000])
                assert len(connection.cycle.body) <= SLICE_BYTES
                assert not transport.reading
                while not transport.reading:
                    before = len(connection.cycle.body)
                    await asyncio.sleep(0)
                    assert len(connection.cycle.body) - before <= SLICE_BYTES
                connection.data_received(body[50_000:] + b"\r\n0\r\n\r\n")
                while not transport.statuses:
                    await asyncio.sleep(0)
                assert transport.written.endswith(b"/1=" + body + b";")

        asyncio.run(run())

    def test_after_a_full_read_it_is_the_others_turn(self):
        async def run():
            async with door() as (_, connection, transport):
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n")
                await settle()
                connection.data_received(b"x" * READ_BYTES)
                assert not transport.reading
                await settle()
                assert transport.reading

        asyncio.run(run())

    def test_a_body_that_nobody_reads_is_not_read_on(self):
        async def run():
            async with door() as (house, connection, transport):
                house.app.reads = False
                house.app.gate.clear()
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"x" * 1000)
                connection.data_received(b"x" * READ_BYTES)
                for _ in range(3):
                    assert not transport.reading
                    await asyncio.sleep(0)
                assert len(connection.cycle.body) > READ_BYTES

        asyncio.run(run())

    def test_the_rest_of_a_body_is_read_when_its_answer_comes_between_two_turns(self):
        async def run():
            async with door() as (house, connection, transport):
                house.app.reads = False
                house.app.gate.clear()
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"x" * 1000)
                connection.data_received(b"x" * READ_BYTES)
                connection.cycle.response_complete = True
                connection.on_response_complete()
                assert not transport.reading
                await settle()
                assert transport.reading

        asyncio.run(run())

    def test_chunks_of_a_byte_are_refused_after_some_thousands(self):
        async def run():
            async with door() as (_, connection, transport):
                connection.data_received(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
                connection.data_received(b"1\r\na\r\n" * 6000)
                while transport.reading is False:
                    await asyncio.sleep(0)
                assert transport.statuses == []
                connection.data_received(b"1\r\na\r\n" * 2000)
                while not transport.statuses:
                    await asyncio.sleep(0)
                assert transport.statuses == [431]

        asyncio.run(run())


class TestPipelining:
    def test_one_request_at_a_time_reaches_the_application(self):
        async def run():
            async with door() as (house, connection, _):
                house.app.gate.clear()
                connection.data_received(b"".join(GET % number for number in range(9)))
                await settle()
                assert house.app.paths == ["/0"]
                house.app.gate.set()
                await settle()
                await settle()
                assert house.app.paths == [f"/{number}" for number in range(9)]

        asyncio.run(run())

    def test_what_is_far_ahead_stays_unread(self):
        async def run():
            async with door(max_pipelined_bytes=100) as (house, connection, transport):
                house.app.gate.clear()
                connection.data_received(GET % 0 + GET % 1)
                await settle()
                assert transport.reading  # so that a client that leaves is noticed
                connection.data_received(GET % 2 * 10)
                assert not transport.reading
                await settle()
                assert not transport.reading  # although the application watches for the client
                house.app.gate.set()
                while len(transport.statuses) < 12:
                    await asyncio.sleep(0)
                assert transport.reading

        asyncio.run(run())

    def test_whoever_leaves_with_requests_ahead_is_noticed(self):
        async def run():
            async with door() as (house, connection, _):
                house.app.gate.clear()
                connection.data_received(GET % 0 + GET % 1)
                await settle()
                connection.connection_lost(None)
                await settle()
                assert house.app.left == ["/0"]

        asyncio.run(run())


class TestPlaces:
    @pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"])
    def test_who_takes_a_complete_answer_does_not_make_room(self, head):
        async def run():
            async with door() as (_, connection, transport):
                assert not connection.is_served
                transport.unsent = 100_000
                connection.data_received(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
                await settle()
                connection.pause_writing()
                assert connection.cycle.response_complete
                assert connection.is_served
                connection.resume_writing()
                transport.unsent = 0
                if not head:
                    assert not connection.is_served

        asyncio.run(run())


class TestBytesHeld:
    def test_a_body_weighs_until_the_application_has_it(self):
        async def run():
            async with door() as (house, connection, _):
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
                await settle()
                assert house.guests.num_bytes == 3000
                house.app.gate.clear()
                connection.data_received(b"x" * 2000)
                await settle()
                assert house.guests.num_bytes == 0

        asyncio.run(run())

    def test_the_largest_unfinished_request_is_refused_when_there_is_too_much(self):
        async def run():
            async with door(max_buffered_bytes=10_000) as (house, connection, transport):
                other, others_transport = house.connect()
                head = b"POST / HTTP/1.1\r\nContent-Length: 50000\r\n\r\n"
                connection.data_received(head + b"x" * 6000)
                other.data_received(head + b"x" * 3000)
                await settle()
                assert transport.statuses == []
                other.data_received(b"x" * 2000)
                await settle()
                assert transport.statuses == [503]
                assert b"\r\nretry-after: 1\r\n" in transport.written
                assert others_transport.statuses == []
                assert house.app.left == ["/"]
                other.connection_lost(None)

        asyncio.run(run())

    def test_with_tls_its_buffers_weigh_too(self):
        async def run():
            async with door() as (house, connection, _):
                connection.scheme = "https"
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
                assert house.guests.num_bytes == 3000 + TLS_BYTES
                connection.data_received(b"x" * 2000)
                await settle()
                assert house.guests.num_bytes == 0

        asyncio.run(run())

    def test_what_a_slow_reader_leaves_weighs_too(self):
        async def run():
            async with door(max_buffered_bytes=10_000) as (house, connection, transport):
                transport.unsent = 9000
                connection.pause_writing()
                assert house.guests.num_bytes == 9000
                connection.resume_writing()
                assert house.guests.num_bytes == 0
                transport.unsent = 11_000
                connection.pause_writing()
                assert transport.aborted

        asyncio.run(run())

    def test_an_answer_waits_when_so_much_is_not_taken(self):
        async def run():
            async with door() as (_, _, transport):
                assert transport.high == WRITE_BUFFER_BYTES

        asyncio.run(run())


FLOODS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"X-Aaaaaa: bbbbbb\r\n"),
    "one header": (b"GET / HTTP/1.1\r\nX: ", b"a"),
    "url": (b"GET /", b"a"),
    "trailers": (CHUNKED[:-9] % 1, b"X-Aaaaaa: bbbbbb\r\n"),
    "one trailer": (CHUNKED[:-9] % 1 + b"X: ", b"a"),
    "chunk extension": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;e=", b"a"),
    "chunks of one byte": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    "requests": (b"", GET % 1),
    "empty lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_memory_does_not_grow_with_what_is_sent(name):
    begin, unit = FLOODS[name]
    piece = unit * (READ_BYTES // len(unit))

    async def run():
        async with door() as (house, connection, transport):
            house.app.gate.clear()
            connection.data_received(begin + piece)  # the first answer and its objects are not counted
            await settle()
            tracemalloc.start()
            for _ in range(100):
                if transport.reading and not transport.is_closing():
                    connection.data_received(piece)
                await asyncio.sleep(0)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

    assert asyncio.run(run()) < 500_000


class TestEnds:
    def test_a_connection_whose_body_came_after_the_answer_does_not_idle_for_ever(self):
        async def run():
            async with door() as (house, connection, transport):
                house.app.reads = False
                connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\n")
                await settle()
                assert b"connection: close" not in transport.written
                assert transport.statuses == [200]
                assert not transport.is_closing()
                connection.timeout_keep_alive = 0.01
                connection.data_received(b"body")
                while not transport.closed:
                    await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(run(), 10))

    @pytest.mark.parametrize("kind", [b"Content-Length: 2001", b"Transfer-Encoding: chunked"])
    def test_an_answer_before_a_body_that_may_not_be_read_says_that_the_connection_ends(self, kind):
        """A client that keeps it would send its next request into a connection that is closed meanwhile."""

        async def run():
            async with door(max_request_body_bytes=2000) as (house, connection, transport):
                house.app.reads = False
                connection.data_received(b"POST / HTTP/1.1\r\n" + kind + b"\r\n\r\n")
                await settle()
                assert transport.statuses == [200]
                assert b"connection: close\r\n" in transport.written
                assert transport.eof and not transport.is_closing()
                connection.data_received(b"x" * 4_000_000)
                assert not transport.aborted
                connection.data_received(b"x" * 1_000_000)
                assert transport.aborted

        asyncio.run(run())

    def test_whoever_is_slow_to_send_what_is_dropped_is_told_all_the_same(self):
        async def run():
            async with door() as (_, connection, transport):
                connection.data_received(b"GET /" + b"x" * 100_000)
                parting = connection.transport
                for _ in range(5):  # each after a while
                    connection.data_received(b"x" * LINGER_LEAST_BYTES)
                    parting._end_lingering()
                    assert not transport.aborted
                parting._end_lingering()
                assert transport.aborted

        asyncio.run(run())

    def test_a_refused_client_may_read_the_answer_before_the_end(self):
        async def run():
            async with door() as (_, connection, transport):
                connection.data_received(b"GET /" + b"x" * 100_000)
                assert transport.statuses == [414]
                assert transport.eof
                assert not transport.is_closing()
                connection.data_received(b"x" * 4_000_000)
                assert not transport.aborted
                connection.data_received(b"x" * 1_000_000)
                assert transport.aborted

        asyncio.run(run())

    def test_a_reader_that_takes_nothing_is_cut_off(self):
        async def run():
            async with door(write_timeout_s=0.01) as (_, connection, transport):
                connection.data_received(GET % 0)
                await settle()
                connection.pause_writing()
                while not transport.aborted:
                    await asyncio.sleep(0.001)

        asyncio.run(run())

    @pytest.mark.parametrize("ended", [False, True])
    def test_a_reader_that_goes_on_taking_is_not(self, ended):
        class Slow(Transport):
            looks = 0

            def get_write_buffer_size(self):
                self.looks += 1
                self.unsent = max(0, self.unsent - TAKEN_BYTES)
                return self.unsent

        async def run():
            async with door(write_timeout_s=0.001) as (house, _, _):
                connection = house.connection()
                transport = Slow()
                connection.connection_made(transport)
                transport.unsent = 10 * TAKEN_BYTES
                if ended:
                    connection.data_received(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                    await settle()
                    assert transport.closed
                else:
                    connection.pause_writing()
                while transport.unsent > TAKEN_BYTES:
                    assert not transport.aborted
                    await asyncio.sleep(0.001)
                assert transport.looks >= 8
                connection.connection_lost(None)

        asyncio.run(asyncio.wait_for(run(), 10))

    def test_tls_ends_when_the_answer_is_taken(self):
        """It cuts what is left of one two seconds after its end has begun."""

        async def run():
            async with door() as (house, _, _):
                connection, transport = house.connection(), Transport(sslcontext=object())
                connection.connection_made(transport)
                connection.data_received(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                transport.unsent = 100_000

                def write(data):
                    Transport.write(transport, data)
                    if data.endswith(b";"):  # the whole answer
                        connection.pause_writing()

                transport.write = write
                await settle()
                assert transport.statuses == [200]
                assert connection.transport.is_closing()
                assert not transport.closed
                connection.resume_writing()
                assert transport.closed
                connection.connection_lost(None)

        asyncio.run(run())

    def test_a_reader_that_takes_nothing_after_the_end_is_cut_off(self):
        async def run():
            async with door(write_timeout_s=0.01) as (_, connection, transport):
                transport.unsent = 10
                connection.data_received(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
                await settle()
                assert transport.closed
                while not transport.aborted:
                    await asyncio.sleep(0.001)

        asyncio.run(run())
