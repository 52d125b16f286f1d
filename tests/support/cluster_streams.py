"""The streams of `cluster_proof.py`, and clients that go on with theirs when a connection ends."""

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
AGAIN_S: Final = 0.1
"""Pause before a client that lost its connection comes again."""
Client = Callable[[], httpx.AsyncClient]
"""Of the server of the moment."""


def bodies(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """The requests of the streams, all different."""
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
    """What a stream told, and when."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0
    told_at: list[float] = field(default_factory=list)
    error: str | None = None
    stream_id: str | None = None
    last_event_id: str = ""
    num_connections: int = 0

    def same_as(self, other: Answer) -> bool:
        mine, others = ((self.text, self.logprobs, self.error), (other.text, other.logprobs, other.error))
        return mine == others and self.error is None

    def silence_s(self, since: float) -> float:
        """The longest time that it told nothing, of what ended after `since`."""
        pairs = itertools.pairwise(self.told_at)
        return max((later - max(earlier, since) for earlier, later in pairs if later > since), default=0.0)

    def take(self, line: str) -> None:
        """A line of a stream."""
        name, _, value = line.partition(": ")
        if name == "id":
            self.last_event_id = value
        if name != "data" or not value.startswith("{"):
            return
        event = json.loads(value)
        self.told_at.append(time.monotonic())
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]


async def read(client: Client, body: dict[str, Any], answer: Answer) -> None:
    """To its end, by as many connections as that takes; a server that is gone is asked until one is there."""
    while not answer.num_tokens and answer.error is None:
        try:
            await _read_on(client(), body, answer)
        except httpx.HTTPError:
            await asyncio.sleep(AGAIN_S)


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
