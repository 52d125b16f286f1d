"""A server with the device, and requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from acceptance.device.outcome import PartError, reason

COMMAND = Path(sys.executable).with_name("llm-serving")
START_S = 1800.0
STOP_S = 120.0
ANSWER_S = 600.0
_STREAMED = {"stream": True, "return_token_ids": True}
_UNLIMITED = httpx.Limits(max_connections=None)
PROMISE = re.compile(r"device_config\.exactness: ((?:exact|fast): .*)")
"""Log line with the WorkAgent's guarantee, as opposed to a notice about the configuration."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request, with the time of each event in seconds from sending the request."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token, if the request asks for them."""
    arrivals: tuple[float, ...]
    """Arrival time of each token."""

    def same(self, other: Answer) -> bool:
        """Return whether both have the same text and tokens."""
        return (self.text, self.token_ids) == (other.text, other.token_ids)


@dataclass(frozen=True)
class Server:
    port: int
    folder: Path
    """Folder of its log and its record."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def promise(self) -> str:
        """Return the guarantee of exactness in the server's log."""
        found = PROMISE.search((self.folder / "server.log").read_text(errors="replace"))
        return "nothing is said" if found is None else found[1]

    def work_agents(self) -> list[int]:
        """Return the ids of the processes with the model."""
        master = psutil.Process(json.loads((self.folder / "server.json").read_text())["pid"])
        return [each.pid for each in master.children(recursive=True) if "llm_serving.work_agent" in each.cmdline()]

    def killer(self) -> Callable[[], None]:
        """Return a function that kills a WorkAgent, whose process it finds in advance so that the kill is immediate."""
        found = self.work_agents()
        if not found:
            raise PartError("no WorkAgent is running")
        pid = found[0]
        return lambda: os.kill(pid, signal.SIGKILL)

    def restarts(self) -> int:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("llm_serving:worker_rest")))

    def longest(self) -> int:
        """Return the maximum number of tokens of a request, prompt and answer."""
        return int(httpx.get(f"{self.url}/info", timeout=60).json()["max_total_tokens"])


@contextmanager
def serving(arguments: Sequence[str], folder: Path, command: str | Path = COMMAND) -> Iterator[Server]:
    """Run a server during the context.

    Args:
        arguments: Arguments of `llm-serving start`.
        folder: Folder of its log, which is kept.
        command: The program.

    Raises:
        PartError: The server does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--run-dir", str(folder), "--port", str(port)]
    log = folder / str(port) / "server.log"
    try:
        done = subprocess.run(
            [command, "start", *options, *arguments], capture_output=True, text=True, timeout=START_S, check=False
        )
        if done.returncode != 0:
            why = reason(done.stderr)
            raise PartError(f"the server does not start, exit code {done.returncode}: {why}; its log is {log}")
        yield Server(port, log.parent)
    except subprocess.TimeoutExpired:
        raise PartError(f"the server does not answer within {START_S:.0f} s; its log is {log}") from None
    finally:
        with suppress(subprocess.TimeoutExpired):  # a hanging device keeps its processes
            subprocess.run([command, "stop", *options], capture_output=True, timeout=STOP_S, check=False)


def ask(url: str, bodies: Sequence[dict[str, object]], when_begun: Callable[[], None] | None = None) -> list[Answer]:
    """Send requests at once and return their answers.

    Args:
        url: URL of the server.
        bodies: Bodies for `/v1/completions`.
        when_begun: Called once, at the first event of any answer.

    Raises:
        PartError: A request is refused or breaks off.
    """
    waiting = [when_begun] if when_begun else []

    async def one(client: httpx.AsyncClient, body: dict[str, object]) -> Answer:
        text, ids, logprobs, arrivals = "", list[int](), list[float](), list[float]()
        sent = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body | _STREAMED) as response:
            if response.status_code != 200:
                refusal = (await response.aread()).decode(errors="replace")
                raise PartError(f"a request is refused with {response.status_code}: {refusal[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise PartError(f"an answer breaks off: {str(event['error'])[:200]}")
                for choice in event.get("choices", ()):
                    text += choice["text"]
                    ids += choice.get("token_ids") or []
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
                arrivals += [time.perf_counter() - sent] * (len(ids) - len(arrivals))
                while waiting:
                    waiting.pop()()
        return Answer(text, tuple(ids), tuple(logprobs), tuple(arrivals))

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=_UNLIMITED) as client:
            return list(await asyncio.gather(*(one(client, body) for body in bodies)))

    try:
        return asyncio.run(run())
    except httpx.HTTPError as error:
        raise PartError(f"the server is gone: {type(error).__name__}: {error}") from None
