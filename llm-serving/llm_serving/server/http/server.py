"""Run the ASGI application on a bound socket: uvicorn with limits, signals, TLS and reload."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
import uvloop

from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tls import tls_context
from llm_serving.errors import ConfigError, shorten
from llm_serving.log import get_logger
from llm_serving.server.http.acceptor import Acceptor, ConnectionLimits
from llm_serving.server.http.connection import Connection, within_connection
from llm_serving.server.http.listener import OpenFiles

logger = get_logger(__name__)

PROXIES_VARIABLE: Final = "FORWARDED_ALLOW_IPS"
"""uvicorn reads it where it gets no other value."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
RELOAD_SIGNAL: Final = signal.SIGHUP
CERTIFICATE_PERIOD_S: Final = 5.0
"""Time between two looks at the files of the certificate."""
NO_TIMEOUT: Final = 10**6
"""Seconds. `Connection` has the timeout of idle connections."""


def check_variables(limits: ServerConfig) -> None:
    """Raise ConfigError where the environment names trusted proxies: the YAML does, and nothing else."""
    if (given := os.environ.get(PROXIES_VARIABLE)) is not None:
        key, proxies = "serving_config.trusted_proxies", ", ".join(map(json.dumps, limits.trusted_proxies))
        rule = f"must not be set: `{key}` says whose X-Forwarded-For is believed, now [{proxies}]"
        raise ConfigError(f"the environment variable {PROXIES_VARIABLE} {rule}. Given: {shorten(given)}")


class Certificate:
    """The TLS context of the server; new handshakes use changed files without a restart.

    Files that cannot be used are logged once, and the previous certificate stays in use.

    Raises:
        ConfigError: The files cannot be used at the start.
    """

    def __init__(self, limits: ServerConfig) -> None:
        assert limits.ssl_certfile is not None
        self._files = limits.ssl_certfile, limits.ssl_keyfile, limits.ssl_keyfile_password_file
        self._versions = [_version(file) for file in self._files]
        self._current = tls_context(*self._files)
        self.context = tls_context(*self._files)
        """Passes each handshake on to the current context."""
        self.context.sni_callback = self._on_hello

    def _on_hello(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def reload_if_changed(self) -> bool:
        """Return whether changed files are in use from now on."""
        versions = [_version(file) for file in self._files]
        if versions == self._versions:
            return False
        self._versions = versions
        try:
            self._current = tls_context(*self._files)
        except ConfigError as error:
            logger.error("the previous certificate stays in use: %s", error)
            return False
        logger.info("%s: the certificate was read again", self._files[0])
        return True

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(CERTIFICATE_PERIOD_S)
            self.reload_if_changed()


def _version(file: Path | None) -> tuple[int, int, int]:
    """Return what differs once a file is written or replaced; links are followed."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        status = None
    return (0, 0, 0) if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)


class HttpServer(uvicorn.Server):
    """uvicorn behind `Connection`; signals end it in order and do not end the process.

    Args:
        app: ASGI application.
        listener: From `bind`.
        limits: Section `serving_config`.
        on_refused: Called with the address and status of each response to what never became a request.
        on_reload: Reads other files again at SIGHUP.
        on_shutdown: Called on the event loop before running requests are waited for.
        files: Says how many connections there can be.

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
        super().__init__(
            uvicorn.Config(
                within_connection(app),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=NO_TIMEOUT,
                timeout_graceful_shutdown=math.ceil(limits.shutdown_timeout_s),
                forwarded_allow_ips=list(limits.trusted_proxies),
            )
        )
        self._listener = listener
        self._limits = limits
        self._files = files or OpenFiles()
        possible = self._files.possible_connections(limits)
        self._registry = ConnectionLimits(
            possible, limits.max_connections_per_address, limits.max_buffered_bytes, on_refused
        )
        self._certificate = None if limits.ssl_certfile is None else Certificate(limits)
        self._acceptor: Acceptor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_reload = on_reload
        self._on_shutdown = on_shutdown
        self._tasks: set[asyncio.Future[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, in place of uvicorn's own listening."""
        await self.lifespan.startup()

        context = None
        if self._certificate is not None:
            context = self._certificate.context
            self._keep(self._certificate.watch())
        new_connection = partial(Connection, self.config, self.server_state)
        self._acceptor = Acceptor(self._listener, self._registry, new_connection, context, self._limits)
        self.servers = [self._acceptor]  # type: ignore[list-item]  # closed and waited for like one of asyncio's
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, then end all connections."""
        self._on_shutdown()
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)
        self._registry.abort_all()
        await asyncio.sleep(0)  # the transports end in the next iteration of the event loop

    def run_within(self, surroundings: AbstractAsyncContextManager[object]) -> None:
        """Serve until SIGINT or SIGTERM; call it in the main thread.

        The first signal lets running requests finish, the second ends them, the third ends the process. SIGHUP reads
        files again, unless the server runs in a terminal, where the signal tells that the terminal closes.

        Args:
            surroundings: Entered on the event loop before the first request and left after the last one.
        """
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        if sys.stdin is None or not sys.stdin.isatty():
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
        """Leave the signals to `run_within`."""
        yield

    def end(self) -> None:
        """Stop as at the first signal; call it on the event loop."""
        self.should_exit = True

    def reload(self) -> None:
        """Read the certificate and other files again; call it on the event loop."""
        logger.info("%s: logs, certificates and the YAML are read again", RELOAD_SIGNAL.name)
        if self._certificate is not None:
            self._certificate.reload_if_changed()
        if self._on_reload is not None:
            self._keep(self._on_reload())

    def reload_limits(self, limits: ServerConfig) -> None:
        """Change the limits: those over all connections at once, those of one connection for new connections."""
        self._limits = limits
        possible = self._files.possible_connections(limits)
        self._registry.reload(possible, limits.max_connections_per_address, limits.max_buffered_bytes)
        if self._acceptor is not None:
            self._acceptor.limits = limits

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
