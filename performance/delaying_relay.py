"""A process that hands bytes on, so much later, in both directions: a long way, where no kernel delays packets."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import threading
import time
from collections.abc import Iterator

_READ_BYTES = 2**18


@contextlib.contextmanager
def relay(address: tuple[str, int], delay_s: float) -> Iterator[tuple[str, int]]:
    """Where to connect to, in place of `address`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context, arguments = multiprocessing.get_context("fork"), (server, address, delay_s)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        try:
            yield server.getsockname()[:2]
        finally:
            process.kill()
            process.join()


def _serve(server: socket.socket, address: tuple[str, int], delay_s: float) -> None:
    while True:
        there, _ = server.accept()
        here = socket.create_connection(address)
        for pair in ((there, here), (here, there)):
            threading.Thread(target=_hand_on, args=(*pair, delay_s), daemon=True).start()


def _hand_on(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """What has come at once is handed on at once, so much later."""
    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, content = waiting.get()
            if (pause_s := due - time.monotonic()) > 0:
                time.sleep(pause_s)
            if not content:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            with contextlib.suppress(OSError):
                target.sendall(content)

    delivering = threading.Thread(target=deliver)
    delivering.start()
    content = b"?"
    while content:
        try:
            content = source.recv(_READ_BYTES)
        except OSError:
            content = b""
        waiting.put((time.monotonic() + delay_s, content))
    delivering.join()
