"""Taking connections while the system has none to give."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import uvloop
from llm_serving.server.front_door import Acceptor, Guests, acceptor


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
    weight = 0
    welcome = None

    def __init__(self, address: str) -> None:
        self.address = address

    def connection_made(self, transport):
        transport.write(self.address.encode())
        transport.close()


def run(main):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_connections_wait_until_there_are_file_descriptors(monkeypatch, caplog):
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    monkeypatch.setattr(logging.getLogger("llm_serving"), "propagate", True)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            exhausted = Exhausted(listener, failures=5)
            door = Acceptor(exhausted, Guests(9, 9, 9), Greeting, None, 1.0)
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
            door = Acceptor(listener, guests, Greeting, None, 1.0)
            door.close()
            door.close()
            await door.wait_closed()
            with socket.create_connection(listener.getsockname()):
                await asyncio.sleep(0)
                assert len(guests) == 0

    run(main)
