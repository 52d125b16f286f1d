"""A connection between a fake transport and a fake application, both of which a test can inspect."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import uvicorn
from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.http.acceptor import ConnectionLimits
from llm_serving.server.http.connection import Connection, within_connection
from llm_serving.server.http.request import REQUEST_KEY
from uvicorn.server import ServerState

GET = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
DECLARED = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\na\n\r\nb\r\n\r\ncd!"
CHUNKED = (
    b"POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;x=y\r\na\n\r\nb\r\n7\r\n\r\n\r\ncd!\r\n0\r\nT: u\r\n\r\n"
)


class Transport(asyncio.Transport):
    """A transport that stores the written bytes."""

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
    """An application that returns path and body; it waits for `gate` before its response."""

    def __init__(self):
        self.paths = []
        self.arrived = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = []
        self.reads = True

    async def __call__(self, scope, receive, send):
        self.scope = scope
        self.paths.append(scope["path"])
        self.arrived.append(scope[REQUEST_KEY].arrived)
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


class Server:
    """An application behind `Connection`."""

    def __init__(self, **limits):
        self.limits = ServerConfig(**limits)
        self.app = Application()
        self.refused = []
        """(address, status) of each refused request."""
        self.registry = ConnectionLimits(100, 100, self.limits.max_buffered_bytes, self.on_refused)
        self.config = uvicorn.Config(
            within_connection(self.run), http="httptools", ws="none", lifespan="off", log_config=None
        )
        self.config.load()
        self.state = ServerState()

    def on_refused(self, address, status):
        self.refused.append((address, status))

    async def run(self, scope, receive, send):
        await self.app(scope, receive, send)

    def connection(self):
        connection = Connection(self.config, self.state, self.limits, self.registry, "10.0.0.1")
        assert self.registry.admit(connection)
        return connection

    def connect(self):
        connection = self.connection()
        transport = Transport()
        connection.connection_made(transport)
        return connection, transport


@asynccontextmanager
async def connected(**limits):
    """Yield a server and a connection to it; then close the connection and check that no task is left."""
    server = Server(**limits)
    connection, transport = server.connect()
    try:
        yield server, connection, transport
    finally:
        if isinstance(server.app, Application):
            server.app.gate.set()
        connection.connection_lost(None)
        await settle()
        for task in server.state.tasks:
            task.cancel()
        assert server.registry.num_bytes == 0


async def settle():
    """Run all tasks and callbacks that are ready."""
    for _ in range(20):
        await asyncio.sleep(0)
