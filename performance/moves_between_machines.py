"""What it takes to bring blocks from one machine to another: python performance/moves_between_machines.py

Two WorkAgents, one that is `prefill` and one that is `decode`, come in at the cluster's port by TLS, as those of other
machines do; a process between them and the master hands all bytes on, each of `--delays-ms` later, in both directions.
Told for each: milliseconds that `--blocks` blocks take through the master, the middle one of some runs, and MB a
second, for so many frames under way on each connection.

Then, without the relay, the steps of the one that is `decode`, in which 8 rows decode: microseconds from reply to reply
while nothing moves, and while blocks come in all the time, whose way through the master gives way to steps
(`engine/pace.py`) or does not; taken in turns, and MB a second that come in. Needs the
package with [ray]: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import numpy as np
from delaying_relay import relay
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.carrier import Carrier
from llm_serving.engine.pace import Pace
from llm_serving.engine.replica import build_engine
from llm_serving.executor.agent_process import LocalProcess
from llm_serving.executor.cluster_placement import ClusterPlacement
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import WorkAgentProcess, start_work_agent
from llm_serving.observe.metrics import Metrics
from llm_serving.text.tokenizer import Tokenizer
from llm_serving.transport.cluster_identity import ClusterIdentity
from llm_serving.transport.messages import Blocks

NUM_RUNS: Final = 9
NUM_ROWS: Final = 8
CONTEXT: Final = 64
STEPS_A_TURN: Final = 200
STEPS_BEFORE: Final = 30
COME_S: Final = 120.0

Pair = tuple[WorkAgentProcess, WorkAgentProcess]
"""Whoever blocks come from, and where they go."""


@dataclass
class Machines:
    """Starts WorkAgents as `RayStarter` does; each reaches the master by a relay, unless the delay is None."""

    secret_file: Path
    delay_s: float | None
    relays: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> LocalProcess:
        (arguments,) = ranks
        command = [sys.executable, "-m", "llm_serving.work_agent", *arguments, "--secret-file", str(self.secret_file)]
        if self.delay_s is not None:
            place = command.index("--connect") + 1
            host, _, port = command[place].rpartition(":")
            host, number = self.relays.enter_context(relay((host, int(port)), self.delay_s))
            command[place] = f"{host}:{number}"
        return LocalProcess(command, stdin=subprocess.PIPE)

    def close(self) -> None:
        self.relays.close()


@contextlib.contextmanager
def two_work_agents(config: ServingConfig, delay_s: float | None) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="moves-") as folder, contextlib.ExitStack() as undo:
        secret_file = Path(folder) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
        placement = ClusterPlacement(
            "127.0.0.1", ClusterIdentity(secret_file.read_text()), Machines(secret_file, delay_s)
        )
        undo.callback(placement.close)
        agents = []
        for index in range(2):
            agents.append(start_work_agent(config, index, lambda text: None, placement=placement))
            undo.callback(agents[-1].stop)
        yield agents[0], agents[1]


class Mover:
    """Brings the same blocks of the first WorkAgent to the second one, again and again."""

    def __init__(self, agents: Pair, count: int, rest: Callable[[], None] = lambda: None) -> None:
        source, target = (agent.block_link for agent in agents)
        assert source is not None and target is not None
        self.source, self.target = source, target
        self.num_bytes = count * agents[0].loaded.block_bytes
        self.blocks = [(each, 1) for each in range(count)]
        self.seconds, self.num_brought = 0.0, 0
        """Of all that were brought beside steps."""
        self._carrier = Carrier(rest)
        content = bytes(agents[0].loaded.block_bytes)
        with source.held(source.timeout_s):
            source.write(Blocks([each], [1], [1], content) for each in range(count))

    def bring(self) -> float:
        """Seconds that it took."""
        came: SimpleQueue[bool] = SimpleQueue()
        began = time.perf_counter()
        self._carrier.carry(0, self.blocks, self.source, self.target, came.put)
        assert came.get(timeout=COME_S), "the blocks were lost on their way"
        return time.perf_counter() - began

    def bring_until(self, end: threading.Event) -> None:
        while not end.is_set():
            self.seconds += self.bring()
            self.num_brought += 1


def tell_rates(config: ServingConfig, count: int, delays_ms: Sequence[float], frames: Sequence[int]) -> None:
    print(f"| delay each way, ms | {' | '.join(f'{each} under way: ms | MB/s' for each in frames)} |")
    print(f"| ---: |{' ---: | ---: |' * len(frames)}")
    for delay_ms in delays_ms:
        with two_work_agents(config, delay_ms / 1e3) as agents:
            mover = Mover(agents, count)
            taken: dict[int, list[float]] = {each: [] for each in frames}
            for _, under_way in itertools.product(range(NUM_RUNS), frames):  # in turns, as the machine's speed changes
                mover.source.frames_under_way = mover.target.frames_under_way = under_way
                taken[under_way].append(mover.bring())
            middle = [statistics.median(taken[each]) for each in frames]
            cells = [f"{1e3 * each:,.0f} | {mover.num_bytes / each / 1e6:,.0f}" for each in middle]
            print(f"| {delay_ms:g} | {' | '.join(cells)} |", flush=True)


def tell_steps(config: ServingConfig, count: int, turns: int) -> None:
    with two_work_agents(config, None) as agents:
        decoder = agents[1]
        assert config.model.model_path is not None
        tokenizer = Tokenizer.load(config.model.model_path)
        executor = RemoteExecutor(decoder.channel, decoder.buffers)
        engine = build_engine(config, decoder.loaded.num_blocks, executor, tokenizer, Metrics(), lambda pieces: None, 1)
        params = SamplingParams(max_tokens=STEPS_BEFORE + STEPS_A_TURN + 30, temperature=0.0, ignore_eos=True)
        movers = {
            "alone": None,
            "beside moves that do not give way": Mover(agents, count),
            "beside moves": Mover(agents, count, Pace(lambda: engine.has_steps).rest),
        }
        taken: dict[str, list[float]] = {kind: [] for kind in movers}
        for turn, (kind, mover) in enumerate([*movers.items()] * turns):
            for index in range(NUM_ROWS):
                engine.submit(Request(f"{turn} {index}", list(range(5 + index, 5 + index + CONTEXT)), params))
            for _ in range(STEPS_BEFORE):
                engine.step()
            end, num_before = threading.Event(), engine.num_steps
            thread = None if mover is None else threading.Thread(target=mover.bring_until, args=(end,))
            before = time.perf_counter()
            if thread is not None:
                thread.start()
            while engine.num_steps < num_before + STEPS_A_TURN:
                engine.step()
                now = time.perf_counter()
                taken[kind].append(now - before)
                before = now
            end.set()
            while engine.step():
                pass
            if thread is not None:
                thread.join()
        print("| steps | p50, us | p90, us | p99, us | longest, us | MB/s came in |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for kind, mover in movers.items():
            figures = 1e6 * np.quantile(taken[kind], (0.5, 0.9, 0.99, 1.0))
            came = 0.0 if mover is None else mover.num_brought * mover.num_bytes / mover.seconds / 1e6
            print(f"| {kind} | {' | '.join(f'{each:,.0f}' for each in figures)} | {came:,.1f} |")


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--blocks", type=int, default=512, help="that are brought at once (default: 512)")
    parser.add_argument("--delays-ms", type=_numbers, default=[0.0, 0.2, 1.0, 5.0], help="empty: none")
    parser.add_argument("--frames", type=_numbers, default=[1.0, 2.0, 4.0], help="under way (default: 1,2,4)")
    parser.add_argument("--turns", type=int, default=10, help="of steps, of each kind; 0: none (default: 10)")
    arguments = parser.parse_args()
    settings = [
        "pa_config.num_blocks=300",
        "device_config.num_threads=1",
        "serving_config.audit_every=0",
        "scheduler_config.speculative_method=none",  # a step is a token of each row
        "cluster_config.replicas=2",
        "cluster_config.roles=[prefill, decode]",
        f"cluster_config.num_transfer_blocks={arguments.blocks}",
    ]
    config = load_config(None, settings, arguments.model)
    if arguments.delays_ms:
        tell_rates(config, arguments.blocks, arguments.delays_ms, [int(each) for each in arguments.frames])
    if arguments.turns:
        tell_steps(config, arguments.blocks, arguments.turns)


if __name__ == "__main__":
    main()
