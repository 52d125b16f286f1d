"""The real HTTP server over a fake engine, and clients that use plain sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from llm_serving.server.app import create_app
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from support.fakes import FakeEngine

TIMEOUT_S = 30.0
"""Timeout after which a test fails."""


@contextmanager
def serving(engine: FakeEngine) -> Iterator[str]:
    """Serve in a thread; yield the URL."""
    with bind("127.0.0.1", 0) as listener:
        app = create_app(engine)
        server = HttpServer(app, listener, engine.config.serving, app.refused)

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            server.should_exit = True
            thread.join()


def connect(url: str, source: str = "127.0.0.1") -> socket.socket:
    """Connect to the server from an address of the loopback network."""
    host, port = url.rsplit("/", 1)[1].split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S, source_address=(source, 0))


def read_all(client: socket.socket) -> bytes:
    """Return the bytes received until the server closes the connection."""
    content = bytearray()
    try:
        while piece := client.recv(65536):
            content += piece
    except ConnectionError:
        pass
    return bytes(content)


def read_until(client: socket.socket, end: bytes) -> bytes:
    """Return the bytes received up to and including `end`, reading one byte at a time."""
    content = bytearray()
    while not content.endswith(end):
        byte = client.recv(1)
        assert byte, bytes(content)
        content += byte
    return bytes(content)


def get(path: str = "/health", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
