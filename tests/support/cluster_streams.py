"""The streams of `check_cluster.py`, and clients that resume them when a connection ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

TASKS: Final = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Name the days of the week.")
RECONNECT_S: Final = 0.1
"""Pause before a client that lost its connection connects again."""
Client = Callable[[], httpx.AsyncClient]
"""Returns a client of the current server."""


def bodies(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return the requests of the streams, all different."""
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
    )
    common = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    pairs = itertools.islice(itertools.cycle(itertools.product(TASKS, ways)), count)
    return [{**common, "prompt": task, "seed": seed, **way} for seed, (task, way) in enumerate(pairs)]


@dataclass
class Answer:
    """The events of a stream and when they arrived."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0
    received_at: list[float] = field(default_factory=list)
    error: str | None = None
    stream_id: str | None = None
    last_event_id: str = ""
    num_connections: int = 0

    def same_as(self, other: Answer) -> bool:
        mine, theirs = ((self.text, self.logprobs, self.error), (other.text, other.logprobs, other.error))
        return mine == theirs and self.error is None

    def silence_s(self, since: float) -> float:
        """Return the longest time between two events, of intervals that ended after `since`."""
        pairs = itertools.pairwise(self.received_at)
        return max((later - max(earlier, since) for earlier, later in pairs if later > since), default=0.0)

    def take(self, line: str) -> None:
        """Apply a line of a stream."""
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_event_id = value
        if name != "data" or not value.startswith("{"):
            return
        event = json.loads(value)
        self.received_at.append(time.monotonic())
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]


async def read(client: Client, body: dict[str, Any], answer: Answer) -> None:
    """Read a stream to its end, over several connections if necessary; retry while no server answers."""
    while not answer.num_tokens and answer.error is None:
        try:
            await _read_on(client(), body, answer)
        except httpx.HTTPError:
            await asyncio.sleep(RECONNECT_S)


async def _read_on(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    method, url, more = "POST", "/v1/completions", {"json": body}
    if answer.stream_id is not None:
        method, url = "GET", f"/v1/streams/{answer.stream_id}"
        more = {"headers": {"Last-Event-ID": answer.last_event_id}} if answer.last_event_id else {}
    async with client.stream(method, url, **more) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code} {(await response.aread()).decode()}"
            return
        answer.num_connections += 1
        answer.stream_id = response.headers["x-stream-id"]
        async for line in response.aiter_lines():
            answer.take(line)
