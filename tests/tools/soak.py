"""Run a real server for a long time with all kinds of clients and faults at once.

    python tests/tools/soak.py --minutes 30    # prints a section for docs/results/correctness.md

Clients are honest, hostile, leave early, read slowly, or send malformed requests. WorkAgents are killed or stopped from
time to time. Every answer that a client reads completely is compared with the reference answer (batch size 1). The
memory of the master and of its WorkAgents is sampled. At the end the KV cache must be free, no bound exceeded, and no
process or shared memory left.

After SIGTERM or SIGINT the tool ends the load, makes the final checks and prints its report; the exit code is then 2 if
no check failed.

It may be suspended (SIGSTOP) and resumed (SIGCONT), so that other programs can use the machine. Its time does not
advance meanwhile, and connections that time out because of it are counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
from support.server_process import Server, metric, shared_memory_names, start_server, unwind_on_sigterm

SETTINGS = {
    "pa_config.num_blocks": 100,
    "pa_config.num_swap_blocks": 40,
    "scheduler_config.preemption_mode": "auto",
    "model_config.decode_batch_size": 16,
    "scheduler_config.max_prefill_tokens": 64,
    "serving_config.step_timeout_s": 5.0,
}
TASKS = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Name the days of the week.")
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 1.1, "seed": 4, "top_p": 0.9, "n": 3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0, "use_beam_search": True, "n": 2},
)
HOSTILE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"priority": -(2**31)},
    {"priority": 2**31 - 1},
    {"priority_class": "interactive"},
    {"priority_class": "batch", "user": "x" * 40},
)
MALFORMED: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[" * 10_000,
    b'{"prompt": "hello", "max_tokens": 1e400}',
    b'{"prompt": [[], [99999999]], "max_tokens": 4}',
    b'{"prompt": "hello", "n": 1000000, "max_tokens": 4}',
    b'{"prompt": "hello", "temperature": NaN}',
    b'{"prompt": "\xff\xfe"}',
)
BROKEN_HTTP: tuple[bytes, ...] = (
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    b"GET / HTTP/9.9\r\n\r\n",
)
NUM_CLIENTS = {"honest": 10, "hostile": 4, "leaving": 4, "slow": 3, "malformed": 1, "broken": 1}
SAMPLE_EVERY_S = 2.0
CLIENT_TIMEOUT_S = 600.0
"""It is long, because bounds count steps: on a busy machine the lowest class waits for minutes."""
SUSPENDED_S = 10.0
"""If an iteration of the event loop takes longer, the process was suspended."""
LAST_ANSWERS_S = 60.0
"""Timeout of each request after the load."""
MAX_GROWTH_MB = 32.0
"""Maximum growth of the master from the second quarter of the run to the last: caches are filled by then."""

Answer = list[tuple[str, str | None, list[float]]]
"""Text, finish reason and log-probabilities of each choice."""


@dataclass
class Soak:
    """One run against a server."""

    server: Server
    seconds: float
    kill_every_s: float | None = None
    """Mean time between kills of a WorkAgent; None: no kills."""
    seed: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Checks that failed."""
    samples: list[tuple[float, float, float, int]] = field(default_factory=list)
    """(seconds, MB of the master, MB of all WorkAgents, open descriptors of the master) of each sample."""
    reference: list[Answer] = field(default_factory=list)
    elapsed_s: float = 0.0
    """Seconds of load, without those in which the process was suspended."""
    is_cut_short: bool = False
    """Whether a signal ended the load early."""

    def __post_init__(self) -> None:
        self.bodies = [body_of(index) for index in range(len(TASKS) * len(KINDS) * 2)]

    async def run(self) -> None:
        async with self.server.client() as client:
            client.timeout = CLIENT_TIMEOUT_S
            load = asyncio.create_task(self._load(client))
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, load.cancel)
            await asyncio.wait([load])
            self.is_cut_short = load.cancelled()
            client.timeout = LAST_ANSWERS_S
            try:
                if not load.cancelled():
                    load.result()
                await self._check_end(client)
            except (httpx.HTTPError, OSError) as error:
                self.wrong.append(f"the run ended with {type(error).__name__}: {error}")

    async def _load(self, client: httpx.AsyncClient) -> None:
        """Run all clients and kills for `seconds`; leave no task behind if cancelled."""
        for body in self.bodies:
            self.reference.append(await whole_answer(client, body))
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._keep_time()), group.create_task(self._watch())]
            clients = {"honest": self._honest, "hostile": self._hostile, "leaving": self._leaving, "slow": self._slow}
            clients |= {"malformed": self._malformed, "broken": self._broken}
            loops = [
                group.create_task(self._loop(clients[kind], client, random.Random(f"{self.seed} {kind} {index}")))
                for kind, count in NUM_CLIENTS.items()
                for index in range(count)
            ]
            if self.kill_every_s is not None:
                rng = random.Random(f"{self.seed} kills")
                loops.append(group.create_task(self._loop(self._lose_work_agent, client, rng)))
            await asyncio.wait(loops)
            for task in beside:
                task.cancel()

    @property
    def running(self) -> bool:
        return self.elapsed_s < self.seconds

    async def _keep_time(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            last, before = time.monotonic(), last
            if last - before < SUSPENDED_S:
                self.elapsed_s += last - before
            else:
                self.counts["times the process was suspended"] += 1

    async def _loop(
        self,
        act: Callable[[httpx.AsyncClient, random.Random], Awaitable[None]],
        client: httpx.AsyncClient,
        rng: random.Random,
    ) -> None:
        while self.running:
            suspended = self.counts["times the process was suspended"]
            try:
                await act(client, rng)
            except (httpx.HTTPError, OSError) as error:
                await asyncio.sleep(1.0)
                if self.counts["times the process was suspended"] > suspended:
                    self.counts["connections lost while suspended"] += 1
                    continue
                self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")
                self.counts["connections lost"] += 1

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _honest(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        await self._ask(client, rng, "honest", {})

    async def _hostile(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        await self._ask(client, rng, "hostile", rng.choice(HOSTILE_OPTIONS))

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random, kind: str, options: dict[str, Any]) -> None:
        index = rng.randrange(len(self.bodies))
        body = self.bodies[index] | options
        if rng.random() < 0.6 and not body.get("use_beam_search"):
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                answer = await streamed_answer(response) if response.is_success else None
        else:
            response = await client.post("/v1/completions", json=body)
            answer = answer_in(response.json()["choices"]) if response.is_success else None
        await self._compare(response, answer, index, kind)

    async def _slow(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        index = rng.choice([i for i, body in enumerate(self.bodies) if not body.get("use_beam_search")])
        async with client.stream("POST", "/v1/completions", json=self.bodies[index] | {"stream": True}) as response:
            answer = await streamed_answer(response, pause_s=0.05) if response.is_success else None
        await self._compare(response, answer, index, "slow")

    async def _leaving(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        body = self.bodies[rng.randrange(len(self.bodies))] | {"stream": True, "max_tokens": 300, "ignore_eos": True}
        if body.pop("use_beam_search", None):
            body["n"] = 1
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_success:
                lines = response.aiter_lines()
                with contextlib.suppress(StopAsyncIteration):
                    for _ in range(rng.randrange(60)):
                        await anext(lines)
                self.counts["clients that left"] += 1
            else:
                await self._refused(response, "leaving")

    async def _malformed(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"))
        headers = {"content-type": "application/json"}
        response = await client.post(path, content=rng.choice(MALFORMED), headers=headers)
        self.counts["malformed bodies"] += 1
        # without a WorkAgent no request can be served
        if not 400 <= response.status_code < 500 and response.status_code != 503:
            self.wrong.append(f"a malformed body to {path} got status {response.status_code}")
        await asyncio.sleep(0.02)

    async def _broken(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(rng.choice(BROKEN_HTTP))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.counts["broken connections"] += 1

    async def _compare(self, response: httpx.Response, answer: Answer | None, index: int, kind: str) -> None:
        if answer is None:
            await self._refused(response, kind)
        elif answer == self.reference[index]:
            self.counts[f"exact answers of {kind} clients"] += 1
        else:
            self.counts["different answers"] += 1
            self.wrong.append(f"wrong answer to {self.bodies[index]} of a {kind} client: {answer}")

    async def _refused(self, response: httpx.Response, kind: str) -> None:
        self.counts[f"refusals with status {int(response.status_code)}"] += 1
        refused = (400, 403) if kind == "hostile" else ()  # a tenant may not use every class and priority
        if response.status_code not in (*refused, 429, 503):
            self.wrong.append(f"a {kind} client got status {response.status_code}: {(await response.aread())[:200]!r}")
        await asyncio.sleep(0.2)

    # --- the server
    # -------------------------------------------------------------------------------------------------------

    async def _lose_work_agent(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        assert self.kill_every_s is not None
        await asyncio.sleep(self.kill_every_s * rng.uniform(0.5, 1.5))
        if not self.running:
            return
        deadline = self.elapsed_s + 120
        sent = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
        before = await metric(client, "llm_serving:worker_restarts_total")
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            rng.choice(self.server.work_agents()).send_signal(sent)
            self.counts[f"WorkAgents that got {sent.name}"] += 1
        while await metric(client, "llm_serving:worker_restarts_total") == before:
            if self.elapsed_s > deadline:
                self.wrong.append(f"no restart in 120 s after a WorkAgent got {sent.name}")
                return
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        master = self.server.processes[0]
        while True:
            agents = 0.0
            for agent in self.server.work_agents():
                with contextlib.suppress(psutil.NoSuchProcess):
                    agents += agent.memory_info().rss / 1e6
            self.samples.append((self.elapsed_s, master.memory_info().rss / 1e6, agents, master.num_fds()))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def _check_end(self, client: httpx.AsyncClient) -> None:
        # An audit may still recompute an answer: until it ends it has a running slot and blocks.
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        try:
            async with asyncio.timeout(60):
                while any([await metric(client, name) for name in names]):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            self.wrong.append("requests run after their clients left, or blocks are used after the last request")
        for name in ("llm_serving:bound_violations_total", "llm_serving:audit_mismatch_total"):
            if await metric(client, name):
                self.wrong.append(f"{name} is not 0")
        self.counts["restarts"] = int(await metric(client, "llm_serving:worker_restarts_total"))
        self.counts["preemptions"] = int(await metric(client, "vllm:num_preemptions_total"))
        if (health := await client.get("/health")).status_code != 200:
            self.wrong.append(f"/health returns {health.text}")
        for body in self.bodies[:4]:
            if await whole_answer(client, body) != self.reference[self.bodies.index(body)]:
                self.wrong.append("an answer after the load differs")

    # --- the report ---------------------------------------------------------------------------------------------------

    @property
    def growth_mb(self) -> float:
        """Growth of the master: mean of the last quarter of samples minus the mean of the second quarter."""
        quarter = len(self.samples) // 4
        sizes = [master for _, master, _, _ in self.samples]
        if quarter == 0:
            return 0.0
        return sum(sizes[-quarter:]) / quarter - sum(sizes[quarter : 2 * quarter]) / quarter

    def slope_mb_an_hour(self, column: int) -> float:
        """Return the slope of a least-squares line through the last three quarters of the samples."""
        points = [(each[0], each[column]) for each in self.samples[len(self.samples) // 4 :]]
        if len(points) < 2:
            return 0.0
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread

    def report(self) -> str:
        cut = f", cut short of {self.seconds / 60:.1f}" if self.is_cut_short else ""
        lines = [f"## A soak of {self.elapsed_s / 60:.1f} minutes{cut}", "", "| event | count |", "| --- | ---: |"]
        lines += [f"| {name} | {count:,} |" for name, count in sorted(self.counts.items())]
        lines += [
            "",
            "| memory, MB | after a quarter | at the end | maximum | slope, MB an hour |",
            "| --- " + "| ---: " * 4 + "|",
        ]
        start = self.samples[len(self.samples) // 4 :]
        for column, name in ((1, "master"), (2, "WorkAgent"), (3, "open descriptors of the master")):
            values = [each[column] for each in start] or [0.0]
            ends = f"{values[0]:,.0f} | {values[-1]:,.0f} | {max(values):,.0f}"
            lines.append(f"| {name} | {ends} | {self.slope_mb_an_hour(column):+.1f} |")
        lines += [
            "",
            "Every answer equals the reference answer, and no check failed."
            if not self.wrong
            else "**Failed checks:**",
            "",
        ]
        lines += [f"- {text}: {count:,} times" for text, count in Counter(each[:300] for each in self.wrong).items()][
            :50
        ]
        return "\n".join(lines)


def body_of(index: int) -> dict[str, Any]:
    task = TASKS[index % len(TASKS)]
    kind = KINDS[index // len(TASKS) % len(KINDS)]
    prompt = " ".join([task] * (1 + index % 5))
    return {"prompt": prompt, "max_tokens": 12 + index, "ignore_eos": True, **kind}


def answer_in(choices: list[dict[str, Any]]) -> Answer:
    ordered = sorted(choices, key=lambda choice: choice["index"])
    return [
        (each["text"], each["finish_reason"], list((each.get("logprobs") or {}).get("token_logprobs") or []))
        for each in ordered
    ]


async def whole_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    return answer_in(response.json()["choices"])


async def streamed_answer(response: httpx.Response, pause_s: float = 0.0) -> Answer:
    """Return the events of each choice joined."""
    choices: dict[int, tuple[str, str | None, list[float]]] = {}
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for piece in event.get("choices", []):
            text, _, logprobs = choices.get(piece["index"], ("", None, []))
            new = list((piece.get("logprobs") or {}).get("token_logprobs") or [])
            choices[piece["index"]] = (text + piece["text"], piece["finish_reason"], logprobs + new)
        if pause_s:
            await asyncio.sleep(pause_s)
    return [choices[index] for index in sorted(choices)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the load lasts (default: 30)")
    parser.add_argument("--kill-every", type=float, default=20.0, help="mean seconds between losses of a WorkAgent")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    unwind_on_sigterm()
    before = shared_memory_names()
    settings = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in SETTINGS.items())
    server = start_server(*settings)
    soak = Soak(server, 60 * args.minutes, args.kill_every, args.seed)
    try:
        asyncio.run(soak.run())
    finally:
        server.stop()
    if psutil.wait_procs(server.processes, timeout=10)[1]:
        soak.wrong.append("processes are left")
    if new := shared_memory_names() - before:
        soak.wrong.append(f"new in /dev/shm: {sorted(new)}")
    if soak.growth_mb > MAX_GROWTH_MB:
        soak.wrong.append(f"the master grew by {soak.growth_mb:.0f} MB")
    sys.stdout.write(f"{soak.report()}\n")
    return 1 if soak.wrong else 2 if soak.is_cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
