"""Runs the ASGI application on a bound socket: uvicorn with limits, signals, TLS and reload."""

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

from llm_serving.config.sections.server import ServerConfig, tls_context
from llm_serving.errors import ConfigError, shorten
from llm_serving.log import get_logger
from llm_serving.server.http.acceptor import Acceptor, ConnectionLimits
from llm_serving.server.http.connection import Connection, within_connection
from llm_serving.server.http.listener import OpenFiles

logger = get_logger(__name__)

PROXIES_VARIABLE: Final = "FORWARDED_ALLOW_IPS"
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
RELOAD_SIGNAL: Final = signal.SIGHUP
CERTIFICATE_PERIOD_S: Final = 5.0
NO_TIMEOUT: Final = 10**6
"""Disables uvicorn's keep-alive timeout, because `Connection` has its own."""


def check_variables(limits: ServerConfig) -> None:
    """Raise ConfigError if an environment variable names trusted proxies, which only the YAML may do."""
    if (given := os.environ.get(PROXIES_VARIABLE)) is not None:
        key, proxies = "serving_config.trusted_proxies", ", ".join(map(json.dumps, limits.trusted_proxies))
        rule = f"must not be set: the key `{key}` lists the proxies whose X-Forwarded-For is trusted, now [{proxies}]"
        raise ConfigError(f"the environment variable {PROXIES_VARIABLE} {rule}. Given: {shorten(given)}")


class Certificate:
    """The server's TLS context, which is reloaded when its files change. Raise ConfigError if the files are invalid."""

    def __init__(self, limits: ServerConfig) -> None:
        assert limits.ssl_certfile is not None
        self._files = limits.ssl_certfile, limits.ssl_keyfile, limits.ssl_keyfile_password_file
        self._versions = [_version(file) for file in self._files]
        self._current = tls_context(*self._files)
        self.context = tls_context(*self._files)
        """The listener's context. Each handshake replaces it by the latest one."""
        self.context.sni_callback = self._on_hello

    def _on_hello(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def reload_if_changed(self) -> bool:
        versions = [_version(file) for file in self._files]
        if versions == self._versions:
            return False
        self._versions = versions
        try:
            self._current = tls_context(*self._files)
        except ConfigError as error:
            logger.error("the certificate was not reloaded; the previous one stays in use: %s", error)
            return False
        logger.info("reloaded the certificate %s", self._files[0])
        return True

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_PERIOD_S)
            self.reload_if_changed()


def _version(file: Path | None) -> tuple[int, int, int]:
    """Return a value that changes when a file, or the target of a link, is written or replaced."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        status = None
    return (0, 0, 0) if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)


class HttpServer(uvicorn.Server):
    """uvicorn behind `Connection`. `on_refused(address, status)` is called for each refused connection or request head,
    `on_reload` on SIGHUP, and `on_shutdown` on the event loop before the server waits for running requests. Raise
    ConfigError if the certificate is invalid.
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
        self._on_shutdown()
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)
        self._registry.abort_all()
        await asyncio.sleep(0)  # the transports end in the next iteration of the event loop

    def run_within(self, surroundings: AbstractAsyncContextManager[object]) -> None:
        """Enter the context `surroundings` and serve until SIGINT or SIGTERM. Call this in the main thread. The first
        signal lets running requests finish, the second ends them, the third ends the process. SIGHUP reloads files, but
        ends the process if standard input is a terminal, because a closing terminal sends it.
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
        """Do nothing, because `run_within` handles the signals."""
        yield

    def end(self) -> None:
        """Stop as after the first signal. Only the event loop may call this."""
        self.should_exit = True

    def reload(self) -> None:
        """Reload the certificate and other files. Only the event loop may call this."""
        logger.info("%s: reopening the logs, reloading certificates and the YAML", RELOAD_SIGNAL.name)
        if self._certificate is not None:
            self._certificate.reload_if_changed()
        if self._on_reload is not None:
            self._keep(self._on_reload())

    def reload_limits(self, limits: ServerConfig) -> None:
        """Apply new limits. Limits on a single connection, such as timeouts, apply only to later connections."""
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
            self.should_exit = True  # before the log line, after which a second signal may follow
            logger.info("%s: finishing %d requests", signal.Signals(number).name, len(self.server_state.tasks))
            return
        self.force_exit = True
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, signal.SIG_DFL)
