"""A server process for a benchmark, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Final

START_S: Final = 300.0
"""Maximum seconds until a server is healthy."""


class NotStartedError(SystemExit):
    """A server did not start. `log`: all that it printed."""

    def __init__(self, program: str, log: str) -> None:
        super().__init__(f"{program} did not start:\n{log[-3000:]}")
        self.log = log


def complete(port: int, prompt: Sequence[int], max_tokens: int) -> float:
    """Return the duration in seconds of a greedy completion of exactly `max_tokens` tokens."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    if response.status != 200 or answer["usage"]["completion_tokens"] != max_tokens:
        raise SystemExit(f"the server did not answer with {max_tokens} tokens: HTTP {response.status} {answer}")
    return time.perf_counter() - begin


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server on a free port, and end it afterwards. Raise NotStartedError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)  # noqa: S603
        try:
            deadline = time.monotonic() + START_S
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise NotStartedError(command[0], log.read().decode(errors="replace"))
                time.sleep(0.2)
            yield port, process
        finally:
            process.terminate()
            process.wait()


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
