"""Accepting connections, also while the system has no file descriptors left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import Counter

import trustme
import uvloop
from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.http import acceptor
from llm_serving.server.http.acceptor import HANDSHAKES_AT_ONCE, Acceptor, ConnectionLimits
from tools.attackers import client_hello


class Exhausted:
    """A listening socket whose accept fails `failures` times for lack of file descriptors."""

    def __init__(self, listener: socket.socket, failures: int) -> None:
        self._listener = listener
        self.failures = failures
        self.num_failed = 0

    def accept(self):
        if self.num_failed < self.failures:
            self.num_failed += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def fileno(self):
        return self._listener.fileno()

    def setblocking(self, value):
        self._listener.setblocking(value)


class Greeting(asyncio.Protocol):
    """A connection that sends a greeting and closes."""

    is_busy = has_unread = False
    weight = 0
    handshake = tls = None

    def __init__(self, limits, registry, address, client):
        self.address = address

    def connection_lost(self, exc):
        pass

    def connection_made(self, transport):
        transport.write(self.address.encode())
        transport.close()


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def limits_of(max_connections, refused=None):
    def on_refused(address, status):
        refused.append((address, status))

    return ConnectionLimits(max_connections, max_connections, 9, on_refused)


def test_connections_wait_until_there_are_file_descriptors(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "EXHAUSTED_PAUSE_S", 0.01)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            exhausted = Exhausted(listener, failures=5)
            accepting = Acceptor(exhausted, limits_of(9), Greeting, None, ServerConfig())
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b"127.0.0.1"
            writer.close()
            accepting.close()
            await accepting.wait_closed()
            assert exhausted.num_failed == 5

    with caplog.at_level(logging.WARNING, "llm_serving"):
        run(main)
    assert [record.getMessage() for record in caplog.records] == [
        "the server cannot accept new connections: Too many open files; they wait in the kernel",
        "the server accepts new connections again",
    ]


def test_no_connection_is_accepted_after_close():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            limits = limits_of(9)
            accepting = Acceptor(listener, limits, Greeting, None, ServerConfig())
            accepting.close()
            accepting.close()
            await accepting.wait_closed()
            with socket.create_connection(listener.getsockname()):
                await asyncio.sleep(0)
                assert len(limits) == 0

    run(main)


def test_refused_connection_gets_a_reason():
    async def main():
        refused = []
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            client.connect(listener.getsockname())
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody")
            accepting = Acceptor(listener, limits_of(0, refused), Greeting, None, ServerConfig())
            while not refused:
                await asyncio.sleep(0)
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # without a reset
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in answer
            assert refused == [("127.0.0.1", 503)]
            accepting.close()
            await accepting.wait_closed()

    run(main)


class CountingContext(ssl.SSLContext):
    """Reports each handshake that starts."""

    def wrap_bio(self, *args, **kwargs):
        self.on_begin()
        return super().wrap_bio(*args, **kwargs)


class Silent(Greeting):
    """A connection that sends nothing."""

    def is_closing(self):
        return False

    def connection_made(self, transport):
        transport.close()


def begin_handshakes(sources, leaving=0):
    """Connect from each address; the first `leaving` clients disconnect at once.

    Returns:
        The addresses whose handshakes began, and the iteration of the event loop of each.
    """
    context, begun, addresses, iteration = CountingContext(ssl.PROTOCOL_TLS_SERVER), [], [], 0
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    context.on_begin = lambda: begun.append(iteration)

    async def main():
        nonlocal iteration
        with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, contextlib.ExitStack() as clients:
            for number, source in enumerate(sources):
                client = socket.create_connection(listener.getsockname(), source_address=(source, 0))
                clients.enter_context(client)
                client.sendall(client_hello())
                if number < leaving:
                    client.close()
            accepting = Acceptor(listener, limits_of(200), Silent, context, ServerConfig(header_timeout_s=30.0))
            establish = accepting._establish

            def note(connection, client):
                addresses.append(connection.address)
                establish(connection, client)

            accepting._establish = note
            while len(begun) < len(sources) - leaving:
                await asyncio.sleep(0)
                iteration += 1
            accepting.close()
            await accepting.wait_closed()

    run(main)
    return addresses, begun


def test_handshakes_start_in_turn_by_address():
    addresses, begun = begin_handshakes(["127.0.1.1"] * 40 + ["127.0.1.2"])
    assert max(Counter(begun).values()) <= HANDSHAKES_AT_ONCE
    assert addresses.index("127.0.1.2") <= HANDSHAKES_AT_ONCE


def test_no_handshake_starts_for_a_closed_connection():
    addresses, _ = begin_handshakes(["127.0.1.1"] * 40, leaving=39)
    assert addresses == ["127.0.1.1"]
