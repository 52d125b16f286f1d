"""Upgrade a server while clients read streams.

    python tests/tools/rolling_upgrade.py [--requests 100] [--set cluster_config.engine=ray ...]

A server of other code starts beside the old one and gets the new requests; the old one ends when its requests have
finished. The newer code is a copy of the package with an additional source file, so its fingerprint differs and neither
master accepts a WorkAgent of the other. Like a proxy, the front end sends a request to the newest server first, and to
the one before if that is not reachable or refuses (503). Every answer is compared with the reference answer (batch size
1).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import llm_serving
from support.cluster_streams import Answer, bodies
from support.server_process import Server, start_server

NUM_AT_ONCE: Final = 16
NUM_TOKENS: Final = 120
RECONNECT_S: Final = 0.05


@dataclass
class Front:
    """A front end for several servers, the newest last."""

    clients: list[httpx.AsyncClient] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    """Number of requests that each server answered."""
    num_passed_on: int = 0

    async def read(self, body: dict[str, Any]) -> Answer:
        while True:
            for number, client in sorted(enumerate(self.clients), reverse=True):
                answer = await _read(client, body)
                if answer is not None:
                    self.answered["older" if number == 0 else "newer"] += 1
                    return answer
                self.num_passed_on += 1
            await asyncio.sleep(RECONNECT_S)


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer | None:
    """Return the answer, or None if the server refused the request. A stream that breaks off is an error."""
    answer = Answer()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 503:
                return None
            response.raise_for_status()
            async for line in response.aiter_lines():
                answer.take(line)
    except httpx.ConnectError:
        return None
    except httpx.HTTPError as error:
        answer.error = repr(error)
    if not answer.num_tokens and answer.error is None:
        answer.error = "it has no end"
    return answer


def copy_with_other_fingerprint(folder: Path) -> Path:
    """Copy the package and change its fingerprint; return the folder for PYTHONPATH."""
    package = Path(llm_serving.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / package.name / "newer.py").write_text('"""Makes this another version."""\n')
    return folder


async def upgrade(older: Server, settings: list[str], newer: Path, num_requests: int) -> bool:
    front, asked = Front([older.client()]), bodies(NUM_AT_ONCE, NUM_TOKENS)
    reference = [await front.read(body) for body in asked]
    front.answered.clear()
    answers: list[tuple[Answer, Answer]] = []
    slots = itertools.cycle(range(len(asked)))

    async def ask() -> None:
        while front.answered["newer"] < num_requests:
            slot = next(slots)
            answers.append((await front.read(asked[slot]), reference[slot]))

    began = time.monotonic()
    asking = asyncio.gather(*(ask() for _ in range(NUM_AT_ONCE)))
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(newer), os.environ.get("PYTHONPATH", "")])):
        server = await asyncio.to_thread(start_server, *settings)
    try:
        front.clients.append(server.client())
        while not (await front.clients[1].get("/health")).is_success:
            await asyncio.sleep(RECONNECT_S)
        ready_s, before = time.monotonic() - began, front.answered["older"]
        older.processes[0].terminate()  # it ends when its requests have finished
        await asyncio.to_thread(older.processes[0].wait)
        ended_s = time.monotonic() - began
        await asking
    finally:
        await asyncio.to_thread(server.stop)
    num_equal = sum(answer.same_as(expected) for answer, expected in answers)
    for error in {answer.error for answer, _ in answers} - {None}:
        sys.stderr.write(f"{error}\n")
    by = front.answered
    sys.stdout.write(
        f"{len(answers)} requests, {NUM_AT_ONCE} at once: {num_equal} equal to the reference answers\n"
        f"the newer server served after {ready_s:.1f} s, the old server ended after {ended_s:.1f} s\n"
        f"answered by the old server {by['older']}, {by['older'] - before} of them after SIGTERM; "
        f"by the new server {by['newer']}; refused and passed on {front.num_passed_on}\n"
    )
    return num_equal == len(answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="requests to the newer server (default: 100)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="setting of both servers"
    )
    arguments = parser.parse_args()
    settings = list(itertools.chain.from_iterable(("--set", each) for each in arguments.set))
    with tempfile.TemporaryDirectory(prefix="rolling-upgrade-") as folder:
        newer = copy_with_other_fingerprint(Path(folder))
        older = start_server(*settings)
        try:
            return 0 if asyncio.run(upgrade(older, settings, newer, arguments.requests)) else 1
        finally:
            if older.processes[0].is_running():
                older.stop()


if __name__ == "__main__":
    sys.exit(main())
