"""What arrives encrypted is deciphered little at a time, whatever the records are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import ssl
from types import SimpleNamespace

import pytest
import trustme
import uvloop
from llm_serving.server.front_door import Acceptor, Guests, Turns
from llm_serving.server.front_door.deciphering import READ_BYTES, SLICE_BYTES

RECORD_BYTES = 1 + 22
"""Of a record with one byte in it."""


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


class Listening(asyncio.Protocol):
    """A connection that keeps what it hears."""

    is_served = False
    weight = 0
    welcome = None
    has_turn = True
    transport = None
    heard = b""

    def __init__(self, address):
        self.address = address

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.heard += data

    def abandon(self):
        """It was never made."""


class Client:
    """Speaks TLS on a bare socket."""

    def __init__(self, authority, address):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self.socket = socket.create_connection(address)
        self.socket.setblocking(False)
        self.heard = bytearray()

    async def shake_hands(self):
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                break
            await loop.sock_sendall(self.socket, self._outgoing.read())
            self._incoming.write(await loop.sock_recv(self.socket, 65536))
        await loop.sock_sendall(self.socket, self._outgoing.read())

    async def read(self):
        self._incoming.write(await asyncio.get_running_loop().sock_recv(self.socket, 2**20))
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                self.heard += self._tls.read(2**20)

    async def send(self, records):
        for each in records:
            self._tls.write(each)
        await asyncio.get_running_loop().sock_sendall(self.socket, self._outgoing.read())


def talk(authority, talking, clock):
    """Runs `talking(client, connections)` against a door with a clock."""

    async def main():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        connections = []

        def new_connection(address):
            connections.append(Listening(address))
            return connections[-1]

        with socket.create_server(("127.0.0.1", 0)) as listener:
            turns = Turns(asyncio.get_running_loop(), clock=clock)
            files = SimpleNamespace(context=context)
            door = Acceptor(listener, Guests(9, 9, 9), new_connection, files, 30.0, turns)
            client = Client(authority, listener.getsockname())
            await client.shake_hands()
            while connections[0].transport is None:
                await asyncio.sleep(0)
            try:
                await talking(client, connections)
            finally:
                client.socket.close()
                connections[0].transport.abort()
                door.close()
                await door.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_records_of_a_byte_are_deciphered_a_slice_a_turn(authority):
    """Each costs the loop as much as a long one; those that only change the key cost ten times that."""
    sizes, sent = [], bytes(range(250)) * 2

    async def talking(client, connections):
        await client.send(bytes((each,)) for each in sent)
        while len(connections[0].heard) < len(sent):
            before = len(connections[0].heard)
            await asyncio.sleep(0)
            sizes.append(len(connections[0].heard) - before)
        assert connections[0].heard == sent

    talk(authority, talking, itertools.count().__next__)  # a step takes longer than a part of a turn
    assert max(sizes) <= SLICE_BYTES / RECORD_BYTES + 1


def test_long_texts_arrive_whole(authority):
    sent = random.Random(5).randbytes(20 * READ_BYTES)

    async def talking(client, connections):
        sending = asyncio.ensure_future(client.send([sent]))
        while len(connections[0].heard) < len(sent):
            await asyncio.sleep(0)
        await sending
        assert connections[0].heard == sent

    talk(authority, talking, lambda: 0.0)


def test_nothing_is_deciphered_for_whom_there_is_enough(authority):
    sent = random.Random(6).randbytes(4 * READ_BYTES)

    async def talking(client, connections):
        (connection,) = connections
        connection.data_received = lambda data: (Listening.data_received(connection, data), pause())

        def pause():
            connection.transport.pause_reading()

        connection.transport.pause_reading()
        sending = asyncio.ensure_future(client.send([sent]))
        for _ in range(50):
            await asyncio.sleep(0)
        assert connection.heard == b""
        while len(connection.heard) < len(sent):
            connection.transport.resume_reading()
            await asyncio.sleep(0)
        await sending
        assert connection.heard == sent

    talk(authority, talking, lambda: 0.0)


def test_nothing_is_deciphered_of_whoever_takes_nothing(authority):
    """TLS has answers of its own, which would pile up."""
    written = bytes(8 * 2**20)

    async def talking(client, connections):
        (connection,) = connections
        connection.pause_writing = connection.resume_writing = lambda: None
        connection.transport.write(written)
        await client.send([b"x"])
        for _ in range(50):
            await asyncio.sleep(0)
        assert connection.heard == b""
        while len(client.heard) < len(written):
            await client.read()
        while connection.heard != b"x":
            await asyncio.sleep(0)

    talk(authority, talking, lambda: 0.0)
