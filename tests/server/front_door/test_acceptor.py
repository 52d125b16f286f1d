"""Taking connections while the system has none to give."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from functools import partial

import uvloop
from llm_serving.core.timings import monotonic
from llm_serving.server.front_door import Acceptor, Guests, Turns, acceptor


class Exhausted:
    """A listening socket for whose connections there are no file descriptors, `failures` times."""

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
    """A connection that says hello and ends."""

    is_served = False
    is_heard = True
    is_idle = False
    weight = 0
    welcome = None
    unread_since: float | None = None
    descriptor: int | None = None

    def __init__(self, address: str) -> None:
        self.address = address

    def connection_made(self, transport):
        transport.write(self.address.encode())
        transport.close()

    def abandon(self):
        """It was never made."""


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_connections_wait_until_there_are_file_descriptors(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            exhausted = Exhausted(listener, failures=5)
            door = Acceptor(exhausted, Guests(9, 9, 9), Greeting, None, 1.0, Turns(asyncio.get_running_loop()))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b"127.0.0.1"
            writer.close()
            door.close()
            await door.wait_closed()
            assert exhausted.num_failed == 5

    with caplog.at_level(logging.WARNING, "llm_serving"):
        run(main)
    assert [record.getMessage() for record in caplog.records] == [
        "connections cannot be accepted: Too many open files; they wait until they can",
        "connections are accepted again",
    ]


def test_nobody_is_accepted_after_the_end():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            guests = Guests(9, 9, 9)
            door = Acceptor(listener, guests, Greeting, None, 1.0, Turns(asyncio.get_running_loop()))
            door.close()
            door.close()
            await door.wait_closed()
            with socket.create_connection(listener.getsockname()):
                await asyncio.sleep(0)
                assert len(guests) == 0

    run(main)


class Counted(Greeting):
    """A connection whose welcome takes a whole turn."""

    def __init__(self, welcomed, clock, address):
        super().__init__(address)
        welcomed.append(address)
        clock[0] += 1.0


def crowd(listener, address, count):
    return [socket.create_connection(listener.getsockname(), source_address=(address, 0)) for _ in range(count)]


def welcome(addresses, max_waiting):
    """Addresses of connections -> those of the welcomed, in order, and those told to the log as refused."""

    async def main():
        welcomed, refused, clock = [], [], [0.0]
        with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, contextlib.ExitStack() as clients:
            for address, count in addresses:
                for client in crowd(listener, address, count):
                    clients.enter_context(client)
            guests = Guests(200, 200, 9)
            guests.on_refused = lambda address, status: refused.append(address)
            turns = Turns(asyncio.get_running_loop(), clock=lambda: clock[0])
            door = Acceptor(listener, guests, partial(Counted, welcomed, clock), None, 1.0, turns, max_waiting)
            while len(welcomed) + len(refused) < sum(count for _, count in addresses):
                await asyncio.sleep(0)
            door.close()
            await door.wait_closed()
        return welcomed, refused

    return run(main)


def test_a_crowd_of_one_address_delays_no_other():
    welcomed, refused = welcome([("127.0.1.1", 40), ("127.0.1.2", 1)], max_waiting=100)
    assert welcomed.index("127.0.1.2") <= 2
    assert len(welcomed) == 41
    assert refused == []


def test_where_too_many_wait_the_address_that_has_most_loses_some():
    welcomed, refused = welcome([("127.0.1.1", 40), ("127.0.1.2", 3)], max_waiting=10)
    assert welcomed.count("127.0.1.2") == 3
    assert set(refused) == {"127.0.1.1"}
    assert len(refused) > 20


def test_an_address_waits_for_one_turn_however_many_it_has():
    """What an attack piles up must not grow for as long as it goes on."""

    async def main():
        refused = []
        with socket.create_server(("127.0.0.1", 0), backlog=200) as listener, contextlib.ExitStack() as clients:
            for address, count in (("127.0.1.1", 40), ("127.0.1.2", 3)):
                for client in crowd(listener, address, count):
                    clients.enter_context(client)
            guests = Guests(200, 200, 9)
            guests.on_refused = lambda address, status: refused.append(address)
            turns = Turns(asyncio.get_running_loop(), budget_s=0.0)  # all wait
            door = Acceptor(listener, guests, Greeting, None, 1.0, turns, max_waiting=10)
            while len(refused) < 33:
                await asyncio.sleep(0)
            assert turns._num_waiting == 2
            door.close()
            await door.wait_closed()

    run(main)


def test_who_has_left_meanwhile_is_not_welcomed():
    async def main():
        welcomed = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            crowd(listener, "127.0.1.1", 1)[0].close()
            turns = Turns(asyncio.get_running_loop())
            door = Acceptor(listener, Guests(9, 9, 9), partial(Counted, welcomed, [0.0]), None, 1.0, turns)
            with crowd(listener, "127.0.1.2", 1)[0]:
                while not welcomed:
                    await asyncio.sleep(0)
            door.close()
            await door.wait_closed()
        assert welcomed == ["127.0.1.2"]

    run(main)


def test_who_is_turned_away_is_told_so_and_can_read_it():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as clients:
            asked = [clients.enter_context(each) for each in crowd(listener, "127.0.1.1", 3)]
            for client in asked:
                client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody")
            turns = Turns(asyncio.get_running_loop(), budget_s=0.0)  # all wait
            door = Acceptor(listener, Guests(9, 9, 9), Greeting, None, 1.0, turns, max_waiting=2)
            while not door._waiting:
                await asyncio.sleep(0)
            answer = b"".join(iter(lambda: asked[2].recv(4096), b""))  # without a reset
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in answer
            door.close()
            await door.wait_closed()

    run(main)


def test_what_had_come_while_it_waited_counts_from_when_it_was_taken():
    async def main():
        connections = []

        def new_connection(address):
            connections.append(Greeting(address))
            return connections[-1]

        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as clients:
            _silent, asks = (clients.enter_context(each) for each in crowd(listener, "127.0.1.1", 2))
            asks.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            before = monotonic()
            door = Acceptor(listener, Guests(9, 9, 9), new_connection, None, 1.0, Turns(asyncio.get_running_loop()))
            while len(connections) < 2:
                await asyncio.sleep(0)
            assert connections[0].unread_since is None
            assert before <= connections[1].unread_since <= monotonic()
            door.close()
            await door.wait_closed()

    run(main)
