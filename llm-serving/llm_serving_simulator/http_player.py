"""Measures a real server: starts one, plays a workload over HTTP, and records what its clients measure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import psutil
from llm_serving.config import ServingConfig, load_config
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.timings import monotonic
from llm_serving.errors import ConfigError, UnavailableError
from llm_serving.server.http.listener import bind

from llm_serving_simulator.figures import Outcome
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream

MAX_INTERFERENCE: Final = 0.1
"""Share of all cores that other programs may use during a measurement."""


@contextlib.contextmanager
def temporary_server(
    path: Path | None, overrides: Sequence[str], model: str | None, recordings: Path | None = None
) -> Iterator[ServingConfig]:
    """Run a server on a free port of this machine; yield its configuration. Raise ConfigError if it cannot be served
    like this, StartError if the server ended before it was ready.

    `overrides`: "section.key=value" each. `recordings`: folder for recordings of the scheduler, which are complete at
    the exit.
    """
    # Not imported with the module, because simulations need no commands.
    from llm_serving_tools.background_server import start_silently, stop
    from llm_serving_tools.signals import ended_in_order

    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    settings = [*overrides, "serving_config.server_ip=127.0.0.1", f"serving_config.server_port={port}"]
    if recordings is not None:
        settings += [f"scheduler_config.record_path={recordings}", "scheduler_config.record_file_bytes=4GB"]
    config = load_config(path, settings, model)
    if config.api_keys or config.serving.scheme != "http":
        raise ConfigError("a measured server must have no API keys and no TLS")
    arguments = [text for each in settings for text in ("--set", each)]
    for name, value in (("--config", path), ("--model", model)):
        arguments += [] if value is None else [name, str(value)]
    with tempfile.TemporaryDirectory(prefix="llm-serving-") as folder, ended_in_order():
        start_silently(config, arguments, Path(folder))
        try:
            yield config
        finally:
            stop(Path(folder), None)


class CpuInterference:
    """Measures from its creation on how much CPU time other programs use."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._all_s, self._own_s = _all_s(), _own_s()

    def share(self) -> float:
        """Return the share of all cores used by programs other than this process and its descendants."""
        elapsed = (time.monotonic() - self._start_s) * (psutil.cpu_count() or 1)
        other_s = _all_s() - self._all_s - max(0.0, _own_s() - self._own_s)
        return max(0.0, other_s / elapsed) if elapsed > 0 else 0.0


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    total = 0.0
    this = psutil.Process()
    for each in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


PATH: Final = "/v1/completions"
TOKEN_EVENT: Final = b'"choices":[{'
"""Occurs once in each event that carries a token."""
FINISH_REASONS: Final = {b'"finish_reason":"length"': "length", b'"finish_reason":"stop"': "stop"}
MAX_TIMER_DELAY_S: Final = 0.002
"""Delay of the event loop's timers that is not counted as time of the server."""
IDLE_TIMEOUT_S: Final = 120.0


class ClientTiming(NamedTuple):
    """The times of one request at its client, by this machine's monotonic clock."""

    request_id: str
    due_s: float
    token_times_s: list[float]


class Playback(NamedTuple):
    """What clients measured, in the order in which the requests were sent."""

    timings: list[ClientTiming]
    outcomes: list[Outcome]
    """Times since the start of the workload."""


async def play(
    url: str,
    workload: Workload,
    classes: Sequence[RequestClass],
    name: str = "play",
    until_s: float | None = None,
    on_finished: Callable[[Outcome], None] = lambda outcome: None,
    salt: str | None = None,
    temperature: float = 0.0,
) -> Playback:
    """Send the requests of a workload at their times and read the answers.

    Each request asks for the number of tokens in the workload, without an earlier end.

    Args:
        url: http://HOST:PORT.
        workload: The requests; refused ones are sent again as the workload specifies.
        classes: Request classes of the server.
        name: Prefix of the request ids.
        until_s: Stop sending, and abort unfinished requests, after this time; None: wait for all answers.
        on_finished: Called with the outcome of each finished request.
        salt: `cache_salt` of the requests, which separates them from cached prefixes of others.
        temperature: Sampling temperature.

    Raises:
        UnavailableError: No server answers at the URL.
    """
    player = _Player(url, workload, classes, name, on_finished, salt, temperature)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(player.run(stream)) for stream in workload.streams]
            if until_s is not None:
                await asyncio.wait(running, timeout=until_s)
                for each in running:
                    each.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return Playback(player.timings, player.outcomes)


def _first(errors: BaseException) -> BaseException:
    return _first(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors


class _Player:
    def __init__(
        self,
        url: str,
        workload: Workload,
        classes: Sequence[RequestClass],
        name: str,
        on_finished: Callable[[Outcome], None],
        salt: str | None,
        temperature: float,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._workload, self._classes, self._name, self._on_finished = workload, classes, name, on_finished
        self._salt, self._temperature = salt, temperature
        self.timings: list[ClientTiming] = []
        self.outcomes: list[Outcome] = []
        # Bodies are encoded before the first request, so that encoding delays none.
        self._bodies = {id(each): self._encode(each) for stream in workload.streams for each in stream.requests}
        self._start_s = monotonic()

    async def run(self, stream: WorkloadStream) -> None:
        async with asyncio.TaskGroup() as tasks:
            if stream.concurrency is None:
                for request in stream.requests:
                    delay = self._start_s + request.due_s - monotonic()
                    if delay > 0:
                        await asyncio.sleep(delay)
                    late_s = monotonic() - self._start_s - request.due_s
                    due_s = request.due_s + (late_s if 0 < late_s < MAX_TIMER_DELAY_S else 0.0)
                    tasks.create_task(self._send(request, due_s))
                return
            rest = iter(stream.requests)

            async def client() -> None:
                for request in rest:
                    await self._send(request, monotonic() - self._start_s)

            for _ in range(stream.concurrency):
                tasks.create_task(client())

    async def _send(self, request: WorkloadRequest, due_s: float) -> None:
        """Send a request, again while it is refused, and record its outcome."""
        outcome = Outcome(
            request.stream,
            class_of(request.priority_in(self._classes), self._classes),
            request.tenant,
            len(request.prompt_token_ids),
            min(request.num_output_tokens, request.max_tokens),
            due_s,
        )
        timing = ClientTiming(f"{self._name}-{len(self.timings)}", self._start_s + due_s, [])
        self.timings.append(timing)
        self.outcomes.append(outcome)
        while True:
            attempt = await self._attempt(timing, request)
            retry_s = attempt.retry_after_s
            if retry_s is None or outcome.num_retries >= self._workload.retries:
                break
            outcome.num_retries += 1
            await asyncio.sleep(retry_s)
        outcome.token_times_s = [time - self._start_s for time in attempt.token_times_s]
        outcome.end_s = attempt.ended_s - self._start_s
        outcome.finish, outcome.error = attempt.finish, attempt.error
        self._on_finished(outcome)

    async def _attempt(self, timing: ClientTiming, request: WorkloadRequest) -> _Attempt:
        """Send a request once; record the tokens of an aborted attempt as well."""
        id_key, head, fields = self._bodies[id(request)]
        body = id_key + timing.request_id.encode() + fields
        loop = asyncio.get_running_loop()
        message = head + b"content-length: %d\r\n\r\n" % len(body) + body
        try:
            _, attempt = await loop.create_connection(lambda: _Attempt(message), self._host, self._port)
        except OSError as error:
            raise UnavailableError(f"no server answers at {self._host}:{self._port}: {error}") from None
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await attempt.ended
        finally:
            attempt.close()
            timing.token_times_s.extend(attempt.token_times_s)
        return attempt

    def _encode(self, request: WorkloadRequest) -> tuple[bytes, bytes, bytes]:
        """Return the body up to the request id, the HTTP head, and the body behind the request id."""
        fields: dict[str, object] = {
            "prompt": request.prompt_token_ids,
            "max_tokens": min(request.num_output_tokens, request.max_tokens),
            "ignore_eos": True,
            "stream": True,
            "temperature": self._temperature,
            "skip_special_tokens": False,  # a special token would have no event
            "priority": request.priority_in(self._classes),
        }
        if request.tenant:
            fields["user"] = request.tenant
        if request.timeout_s is not None:
            fields["timeout_s"] = request.timeout_s
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        rest = b'",' + json.dumps(fields).encode()[1:]
        host = f"{self._host}:{self._port}"
        head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        return b'{"request_id":"', head.encode(), rest


class _Attempt(asyncio.Protocol):
    """One request on its own connection; the answer is parsed when it is complete, so that parsing delays no other."""

    def __init__(self, message: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_s = 0.0
        self.token_times_s: list[float] = []
        self.finish = self.error = ""
        self.retry_after_s: float | None = None
        self._message = message
        self._received: list[tuple[float, bytes]] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._received.append((monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        self.ended_s = self._received[-1][0] if self._received else monotonic()
        self._parse()
        self.ended.set_result(None)

    def close(self) -> None:
        if not self.ended.done() or self.ended.cancelled():  # the attempt is aborted
            self._parse()
        if self._transport is not None:
            self._transport.close()

    def _parse(self) -> None:
        answer = b"".join(data for _, data in self._received)
        status = answer[9:12]
        if status != b"200":
            head, _, body = answer.partition(b"\r\n\r\n")
            self.finish = "refused" if status in (b"429", b"400") else "error"
            self.error = body[:300].decode(errors="replace")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"retry-after:"):
                    self.retry_after_s = float(line.split(b":")[1])
            return
        rest = b""
        for time_s, data in self._received:
            text = rest + data
            self.token_times_s += [time_s] * text.count(TOKEN_EVENT)
            rest = text[-len(TOKEN_EVENT) + 1 :]
        self.finish = next((name for mark, name in FINISH_REASONS.items() if mark in answer), "error")
        if self.finish == "error":
            self.error = "the answer broke off"
