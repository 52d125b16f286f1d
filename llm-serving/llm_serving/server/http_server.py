"""Running an ASGI application on a port that was bound before, ending in order."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Any, Final

import uvicorn
import uvloop

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError, shorten
from llm_serving.log import get_logger
from llm_serving.server.front_door import Acceptor, Certificates, Connection, Guests, Turns
from llm_serving.server.front_door.request_head import RequestHead
from llm_serving.server.open_files import OpenFiles

logger = get_logger(__name__)

PROXIES_VARIABLE: Final = "FORWARDED_ALLOW_IPS"
"""Of uvicorn, which reads it where it is told nothing else."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
RELOAD_SIGNAL: Final = signal.SIGHUP


def check_variables(limits: ServerConfig) -> None:
    """Raises ConfigError where the environment says who is a trusted proxy: the YAML does, and nothing else."""
    if (given := os.environ.get(PROXIES_VARIABLE)) is not None:
        key, proxies = "serving_config.trusted_proxies", ", ".join(map(json.dumps, limits.trusted_proxies))
        rule = f"must not be set: `{key}` says whose X-Forwarded-For is believed, now [{proxies}]"
        raise ConfigError(f"the environment variable {PROXIES_VARIABLE} {rule}. Given: {shorten(given)}")


class HttpServer(uvicorn.Server):
    """A server with a door of its own, whose signals end it in order and do not end the process.

    Args:
        app: ASGI application.
        listener: From `listener.bind`.
        limits: What clients may do, the certificate, and how long running requests get after the first signal.
        on_refused: Told of the address and status of what the door refused, before the application saw it.
        on_reload: Reads what else there is to be read at the signal to read files again.
        on_shutdown: Called on the event loop before running requests are waited for.
        files: How many connections there can be.

    Raises:
        ConfigError: The certificate cannot be used.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        limits: ServerConfig,
        on_refused: Callable[[str, int], None] = lambda address, status: None,
        on_reload: Callable[[], Awaitable[None]] | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
        files: OpenFiles | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(limits.shutdown_timeout_s),
            forwarded_allow_ips=list(limits.trusted_proxies),
        )
        config.timeout_keep_alive = limits.idle_timeout_s  # type: ignore[assignment]  # any number will do
        super().__init__(config)
        self._listener = listener
        self._limits, self._head = limits, RequestHead(limits)
        self._certificates: Certificates | None = None
        if limits.ssl_certfile is not None:
            self._certificates = Certificates(limits.ssl_certfile, limits.ssl_keyfile, limits.ssl_keyfile_password_file)
        self._renewal: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_refused = on_refused
        self._on_reload = on_reload
        self._guests: Guests | None = None
        self._acceptor: Acceptor | None = None
        self._reloads: set[asyncio.Future[None]] = set()
        self._on_shutdown = on_shutdown
        self._files = files or OpenFiles()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens the door, in place of uvicorn's own listening."""
        await self.lifespan.startup()
        limits = self._limits
        possible = self._files.possible_connections(limits)
        guests = Guests(possible, limits.max_connections_per_address, limits.max_buffered_bytes)
        guests.on_refused = self._on_refused
        self._guests = guests
        turns = Turns(asyncio.get_running_loop())

        def new_connection(address: str) -> Connection:
            return Connection(self.config, self.server_state, address, guests, self._limits, self._head, turns)

        waiting = self._files.possible_waiting()
        self._acceptor = Acceptor(
            self._listener, guests, new_connection, self._certificates, limits.header_timeout_s, turns, waiting
        )
        if self._certificates is not None:
            self._renewal = asyncio.create_task(self._certificates.watch())
        self.servers = [self._acceptor]  # type: ignore[list-item]  # closed and waited for as one of asyncio's
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets running requests finish, then ends all connections."""
        self._on_shutdown()
        if self._renewal is not None:
            self._renewal.cancel()
        await super().shutdown(sockets)

    def run_within(self, surroundings: AbstractAsyncContextManager[object]) -> None:
        """Serves until told to stop by SIGINT or SIGTERM; call it in the main thread.

        The first signal lets running requests finish, the second ends them, the third ends the process as it would
        without us. SIGHUP has files read and opened again; to a server in a terminal it tells the end of both.

        Args:
            surroundings: Entered on the event loop before the first request and left after the last one, whichever
                signal ended it.
        """
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        if not _is_in_terminal():
            before[RELOAD_SIGNAL] = signal.signal(RELOAD_SIGNAL, self._on_reload_signal)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve_within(surroundings))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _serve_within(self, surroundings: AbstractAsyncContextManager[object]) -> None:
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self._loop = asyncio.get_running_loop()
        async with surroundings:
            logger.info("serving on %s://%s:%d", self._limits.scheme, host, port)
            await self.serve(sockets=[self._listener])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `run_within`."""
        yield

    def end(self) -> None:
        """Ends it as the first signal does; call it on the event loop."""
        self.should_exit = True

    def reload(self) -> None:
        """Looks at the certificate's files at once, and at whatever else is read; call it on the event loop."""
        logger.info("%s: logs, certificates and the YAML are read again", RELOAD_SIGNAL.name)
        if self._certificates is not None:
            self._certificates.reload_if_changed()
        if self._on_reload is not None:
            task = asyncio.ensure_future(self._on_reload())
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    def reload_limits(self, limits: ServerConfig) -> None:
        """From now on other limits count: of connections for all, of what one may send for those that come."""
        self._limits, self._head = limits, RequestHead(limits)
        if self._guests is not None:
            possible = self._files.possible_connections(limits)
            self._guests.reload(possible, limits.max_connections_per_address, limits.max_buffered_bytes)
        if self._acceptor is not None:
            self._acceptor.handshake_timeout_s = limits.header_timeout_s

    def _on_reload_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.reload)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.should_exit = True  # before the log line: who has read it may send the second signal
            logger.info("%s: finishing %d requests", signal.Signals(number).name, len(self.server_state.tasks))
            return
        self.force_exit = True
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, signal.SIG_DFL)


def _is_in_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
