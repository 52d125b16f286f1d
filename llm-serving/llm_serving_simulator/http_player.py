"""A load played on a real server: the same requests at the same times, and what their clients saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.timings import monotonic
from llm_serving.errors import UnavailableError

from llm_serving_simulator.load import Asked, Load, Stream
from llm_serving_simulator.outcome import Outcome

PATH: Final = "/v1/completions"
EVENT: Final = b'"choices":[{'
"""Once in each event that has a token."""
ENDS: Final = {b'"finish_reason":"length"': "length", b'"finish_reason":"stop"': "stop"}
TIMER_S: Final = 0.002
"""How late a timer of an event loop may be; that is no time of the server's."""
IDLE_S: Final = 120.0
"""Without a byte of an answer."""


class Seen(NamedTuple):
    """One request as its client saw it; seconds of the clock of this machine, which server and clients share."""

    request_id: str
    due_s: float
    token_times_s: list[float]


class Play(NamedTuple):
    """In the order in which the requests were sent."""

    seen: list[Seen]
    outcomes: list[Outcome]
    """Seconds from the beginning of the load."""


async def play(
    url: str,
    load: Load,
    classes: Sequence[RequestClass],
    name: str = "play",
    until_s: float | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    salt: str | None = None,
    temperature: float = 0.0,
) -> Play:
    """Sends the requests of a load when they are due, and reads their answers.

    Answers have as many tokens as the load says: each request asks for so many and for no end before.

    Args:
        url: http://HOST:PORT.
        load: What is sent; refused requests come again as it says.
        classes: Of the server.
        name: What ids of requests begin with.
        until_s: After so long nothing more is sent, and what is not answered is broken off; None: all are answered.
        on_end: Told of each request that has ended.
        salt: `cache_salt` of the requests: what the server computed for others is of no use to them.
        temperature: Of all answers.

    Raises:
        UnavailableError: No server answers there.
    """
    player = _Player(url, load, classes, name, on_end, salt, temperature)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(player.run(stream)) for stream in load.streams]
            if until_s is not None:
                await asyncio.wait(running, timeout=until_s)
                for each in running:
                    each.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return Play(player.seen, player.outcomes)


def _first(errors: BaseException) -> BaseException:
    return _first(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors


class _Player:
    def __init__(
        self,
        url: str,
        load: Load,
        classes: Sequence[RequestClass],
        name: str,
        on_end: Callable[[Outcome], None],
        salt: str | None,
        temperature: float,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._load, self._classes, self._name, self._on_end = load, classes, name, on_end
        self._salt, self._temperature = salt, temperature
        self.seen: list[Seen] = []
        self.outcomes: list[Outcome] = []
        self._bodies = {id(each): self._request(each) for stream in load.streams for each in stream.requests}
        self._began_s = monotonic()

    async def run(self, stream: Stream) -> None:
        async with asyncio.TaskGroup() as tasks:
            if stream.concurrency is None:
                for asked in stream.requests:
                    delay = self._began_s + asked.due_s - monotonic()
                    if delay > 0:
                        await asyncio.sleep(delay)
                    late_s = monotonic() - self._began_s - asked.due_s
                    due_s = asked.due_s + (late_s if 0 < late_s < TIMER_S else 0.0)
                    tasks.create_task(self._ask(asked, due_s))
                return
            rest = iter(stream.requests)

            async def client() -> None:
                for asked in rest:
                    await self._ask(asked, monotonic() - self._began_s)

            for _ in range(stream.concurrency):
                tasks.create_task(client())

    async def _ask(self, asked: Asked, due_s: float) -> None:
        outcome = Outcome(
            asked.stream,
            class_of(asked.priority_in(self._classes), self._classes),
            asked.tenant,
            len(asked.prompt_token_ids),
            min(asked.num_output_tokens, asked.max_tokens),
            due_s,
        )
        seen = Seen(f"{self._name}-{len(self.seen)}", self._began_s + due_s, [])
        self.seen.append(seen)
        self.outcomes.append(outcome)
        while True:
            exchange = await self._exchange(seen, asked)
            retry_s = exchange.retry_after_s
            if retry_s is None or outcome.num_retries >= self._load.retries:
                break
            outcome.num_retries += 1
            await asyncio.sleep(retry_s)
        outcome.token_times_s = [time - self._began_s for time in exchange.token_times_s]
        outcome.end_s = exchange.ended_s - self._began_s
        outcome.finish, outcome.error = exchange.finish, exchange.error
        self._on_end(outcome)

    async def _exchange(self, seen: Seen, asked: Asked) -> _Exchange:
        """One attempt; what has come of one that is broken off is noted too."""
        head, middle, rest = self._bodies[id(asked)]
        body = head + seen.request_id.encode() + rest
        loop = asyncio.get_running_loop()
        request = middle + b"content-length: %d\r\n\r\n" % len(body) + body
        try:
            _, exchange = await loop.create_connection(lambda: _Exchange(request), self._host, self._port)
        except OSError as error:
            raise UnavailableError(f"no server answers at {self._host}:{self._port}: {error}") from None
        try:
            async with asyncio.timeout(IDLE_S):
                await exchange.ended
        finally:
            exchange.close()
            seen.token_times_s.extend(exchange.token_times_s)
        return exchange

    def _request(self, asked: Asked) -> tuple[bytes, bytes, bytes]:
        """Beginning of the body, head of the request, the rest of the body behind the id."""
        fields: dict[str, object] = {
            "prompt": asked.prompt_token_ids,
            "max_tokens": min(asked.num_output_tokens, asked.max_tokens),
            "ignore_eos": True,
            "stream": True,
            "temperature": self._temperature,
            "skip_special_tokens": False,  # else tokens come without an event
            "priority": asked.priority_in(self._classes),
        }
        if asked.tenant:
            fields["user"] = asked.tenant
        if asked.timeout_s is not None:
            fields["timeout_s"] = asked.timeout_s
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        rest = b'",' + json.dumps(fields).encode()[1:]
        host = f"{self._host}:{self._port}"
        head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        return b'{"request_id":"', head.encode(), rest


class _Exchange(asyncio.Protocol):
    """One request on its own connection; nothing of its answer is decoded before it is complete."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_s = 0.0
        self.token_times_s: list[float] = []
        self.finish = self.error = ""
        self.retry_after_s: float | None = None
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():
            return
        self.ended_s = self._pieces[-1][0] if self._pieces else monotonic()
        self._read()
        self.ended.set_result(None)

    def close(self) -> None:
        if not self.ended.done() or self.ended.cancelled():  # it is broken off
            self._read()
        if self._transport is not None:
            self._transport.close()

    def _read(self) -> None:
        whole = b"".join(data for _, data in self._pieces)
        status = whole[9:12]
        if status != b"200":
            head, _, body = whole.partition(b"\r\n\r\n")
            self.finish, self.error = (
                "refused" if status in (b"429", b"400") else "error",
                body[:300].decode(errors="replace"),
            )
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"retry-after:"):
                    self.retry_after_s = float(line.split(b":")[1])
            return
        rest = b""
        for time, data in self._pieces:
            text = rest + data
            count = text.count(EVENT)
            self.token_times_s += [time] * count
            rest = text[-len(EVENT) + 1 :]
        self.finish = next((name for mark, name in ENDS.items() if mark in whole), "error")
        if self.finish == "error":
            self.error = "the answer broke off"
