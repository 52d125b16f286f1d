"""What it takes to bring blocks from one machine to another: python performance/moves_between_machines.py

Two WorkAgents, one that is `prefill` and one that is `decode`, come in at the cluster's port by TLS, as those of other
machines do; a process between them and the master hands all bytes on, each of `--delays-ms` later, in both directions.
Told for each: milliseconds that `--blocks` blocks take through the master, the middle one of some runs, and MB a
second, for so many frames under way on each connection.

Then, without the relay, the steps of the one that is `decode`, in which 8 rows decode: microseconds from reply to reply
while nothing moves, and while blocks come in all the time, whose way through the master gives way to steps
(`engine/fleet/migration.py`) or does not; taken in turns, and MB a second that come in.

With `--pairs 1,2,4` instead: so many pairs of such WorkAgents at once, all of them as busy as before, an engine in a
thread for each that is `decode` as in a server. Told beside steps and MB a second: the share of one core that all
threads of the master together had which bring blocks, and that the whole master had. Needs the package with [ray]: run
it with its interpreter.
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
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.migration import Carrier, Pace
from llm_serving.engine.replica import build_engine
from llm_serving.executor.cluster.placement import ClusterPlacement
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import WorkAgentProcess, start_work_agent
from llm_serving.executor.worker_process import LocalProcess
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.transport.messages import Blocks
from llm_serving.transport.tls_identity import ClusterIdentity

NUM_RUNS: Final = 9
NUM_ROWS: Final = 8
CONTEXT: Final = 64
STEPS_A_TURN: Final = 200
STEPS_BEFORE: Final = 30
COME_S: Final = 120.0

SECONDS_A_TURN: Final = 5.0

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
def work_agents(config: ServingConfig, delay_s: float | None) -> Iterator[list[Pair]]:
    """Of a configuration whose replicas are `prefill`, `decode`, `prefill`, `decode`, .."""
    with tempfile.TemporaryDirectory(prefix="moves-") as folder, contextlib.ExitStack() as undo:
        secret_file = Path(folder) / "secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(secrets.token_hex(32))
        placement = ClusterPlacement(
            "127.0.0.1", ClusterIdentity(secret_file.read_text()), Machines(secret_file, delay_s)
        )
        undo.callback(placement.close)
        agents = []
        for index in range(config.num_replicas):
            agents.append(start_work_agent(config, index, lambda text: None, placement=placement))
            undo.callback(agents[-1].stop)
        yield list(zip(agents[::2], agents[1::2], strict=True))


class Mover:
    """Brings the same blocks of the first WorkAgent to the second one, again and again."""

    def __init__(
        self, agents: Pair, count: int, rest: Callable[[], None] = lambda: None, carrier: Carrier | None = None
    ) -> None:
        source, target = (agent.block_link for agent in agents)
        assert source is not None and target is not None
        self.source, self.target = source, target
        self.num_bytes = count * agents[0].loaded.block_bytes
        self.blocks = [(each, 1) for each in range(count)]
        self.seconds, self.num_brought = 0.0, 0
        """Of all that were brought beside steps."""
        self._carrier = Carrier(rest) if carrier is None else carrier
        content = bytes(agents[0].loaded.block_bytes)
        with source.held(source.timeout_s):
            source.write(Blocks([each], [1], [1], content) for each in range(count))

    def bring(self, replica: int = 0) -> float:
        """Seconds that it took, from this replica."""
        came: SimpleQueue[bool] = SimpleQueue()
        began = time.perf_counter()
        self._carrier.carry(replica, self.blocks, self.source, self.target, came.put)
        assert came.get(timeout=COME_S), "the blocks were lost on their way"
        return time.perf_counter() - began

    def bring_until(self, end: threading.Event, replica: int = 0) -> None:
        while not end.is_set():
            self.seconds += self.bring(replica)
            self.num_brought += 1


def tell_rates(config: ServingConfig, count: int, delays_ms: Sequence[float], frames: Sequence[int]) -> None:
    print(f"| delay each way, ms | {' | '.join(f'{each} under way: ms | MB/s' for each in frames)} |")
    print(f"| ---: |{' ---: | ---: |' * len(frames)}")
    for delay_ms in delays_ms:
        with work_agents(config, delay_ms / 1e3) as (agents,):
            mover = Mover(agents, count)
            taken: dict[int, list[float]] = {each: [] for each in frames}
            for _, under_way in itertools.product(range(NUM_RUNS), frames):  # in turns, as the machine's speed changes
                mover.source.frames_under_way = mover.target.frames_under_way = under_way
                taken[under_way].append(mover.bring())
            middle = [statistics.median(taken[each]) for each in frames]
            cells = [f"{1e3 * each:,.0f} | {mover.num_bytes / each / 1e6:,.0f}" for each in middle]
            print(f"| {delay_ms:g} | {' | '.join(cells)} |", flush=True)


def tell_steps(config: ServingConfig, count: int, turns: int) -> None:
    with work_agents(config, None) as (agents,):
        engine = an_engine(config, agents[1])
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


def an_engine(config: ServingConfig, decoder: WorkAgentProcess) -> Engine:
    assert config.model.model_path is not None
    tokenizer = Tokenizer.load(config.model.model_path)
    executor = RemoteExecutor(decoder.channel, decoder.buffers)
    num_blocks = decoder.loaded.num_blocks
    return build_engine(config, num_blocks, executor, tokenizer, Metrics(), lambda pieces: None, decoder.index)


class Rests:
    """What threads that bring blocks have computed, which they tell whenever they rest."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._computed: dict[int, float] = {}

    def __call__(self) -> None:
        self._computed[threading.get_ident()] = time.thread_time()
        self._rest()

    @property
    def seconds(self) -> float:
        return sum(self._computed.values())


class Decoder:
    """Steps of an engine in a thread of its own, in which rows decode without end."""

    def __init__(self, config: ServingConfig, agent: WorkAgentProcess) -> None:
        self.engine = an_engine(config, agent)
        self.taken: list[float] = []
        """Seconds from reply to reply, while it is measured."""
        self.is_measured = False
        self._end = threading.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        longest = self.engine.scheduler.blocks.longest - CONTEXT - 1
        params = SamplingParams(max_tokens=min(longest, 1000), temperature=0.0, ignore_eos=True)
        before, num_steps = time.perf_counter(), 0
        while not self._end.is_set():
            while self.engine.num_running + self.engine.num_waiting < NUM_ROWS:
                number = next(self._numbers)
                prompt = [5 + (number + each) % 200 for each in range(CONTEXT)]
                self.engine.submit(Request(f"{number}", prompt, params))
            self.engine.step()
            if self.engine.num_steps > num_steps:
                now = time.perf_counter()
                if self.is_measured:
                    self.taken.append(now - before)
                before, num_steps = now, self.engine.num_steps


def tell_pairs(settings: Sequence[str], model: Path, count: int, numbers: Sequence[int], turns: int) -> None:
    print("| pairs | steps | p50, us | p99, us | steps/s | MB/s | cores: bring blocks | cores: master |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in numbers:
        roles = ", ".join(["prefill, decode"] * number)
        more = [f"cluster_config.replicas={2 * number}", f"cluster_config.roles=[{roles}]"]
        config = load_config(None, [*settings, *more], model)
        with work_agents(config, None) as pairs, contextlib.ExitStack() as undo:
            decoders = [Decoder(config, pair[1]) for pair in pairs]
            for decoder in decoders:
                undo.callback(decoder.end)
            pace = Pace(lambda decoders=decoders: any(each.engine.has_steps for each in decoders))  # type: ignore[misc]
            kinds = {"alone": None, "beside moves that do not give way": Rests(lambda: None)}
            kinds |= {"beside moves": Rests(pace.rest)}
            movers = {}
            for kind, rests in kinds.items():
                if rests is not None:
                    carrier = undo.enter_context(contextlib.closing(Carrier(rests)))
                    movers[kind] = [Mover(pair, count, carrier=carrier) for pair in pairs]
            figures = {kind: _Figures() for kind in kinds}
            for _, (kind, rests) in itertools.product(range(turns), kinds.items()):
                _measure(decoders, movers.get(kind, []), rests, figures[kind])
        for kind, each in figures.items():
            print(f"| {number} | {kind} | {each.cells(number)} |", flush=True)


@dataclass
class _Figures:
    taken: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_bytes: int = 0
    brought_s: float = 0.0
    """Computed by threads that bring blocks."""
    master_s: float = 0.0

    def cells(self, number: int) -> str:
        p50, p99 = 1e6 * np.quantile(self.taken, (0.5, 0.99))
        return (
            f"{p50:,.0f} | {p99:,.0f} | {len(self.taken) / self.seconds:,.0f} | "
            f"{self.num_bytes / self.seconds / 1e6:,.1f} | {self.brought_s / self.seconds:.3f} | "
            f"{self.master_s / self.seconds:.3f}"
        )


def _measure(decoders: Sequence[Decoder], movers: Sequence[Mover], rests: Rests | None, figures: _Figures) -> None:
    """One turn, added to what there was."""
    end = threading.Event()
    threads = [threading.Thread(target=mover.bring_until, args=(end, index)) for index, mover in enumerate(movers)]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS_A_TURN / 10)
    brought = sum(each.num_brought * each.num_bytes for each in movers)
    began, own, computed = time.perf_counter(), time.process_time(), 0.0 if rests is None else rests.seconds
    for decoder in decoders:
        decoder.taken, decoder.is_measured = [], True
    time.sleep(SECONDS_A_TURN)
    for decoder in decoders:
        decoder.is_measured = False
        figures.taken += decoder.taken
    figures.seconds += time.perf_counter() - began
    figures.master_s += time.process_time() - own
    figures.brought_s += 0.0 if rests is None else rests.seconds - computed
    figures.num_bytes += sum(each.num_brought * each.num_bytes for each in movers) - brought
    end.set()
    for thread in threads:
        thread.join()


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"))
    parser.add_argument("--blocks", type=int, default=512, help="that are brought at once (default: 512)")
    parser.add_argument("--delays-ms", type=_numbers, default=[0.0, 0.2, 1.0, 5.0], help="empty: none")
    parser.add_argument("--frames", type=_numbers, default=[1.0, 2.0, 4.0], help="under way (default: 1,2,4)")
    parser.add_argument("--turns", type=int, default=10, help="of steps, of each kind; 0: none (default: 10)")
    parser.add_argument("--pairs", type=_numbers, default=[], help="of WorkAgents at once, in place of all else")
    arguments = parser.parse_args()
    settings = [
        "pa_config.num_blocks=300",
        "device_config.num_threads=1",
        "serving_config.audit_every=0",
        "serving_config.log_level=ERROR",
        "scheduler_config.speculative_method=none",  # a step is a token of each row
        f"cluster_config.num_transfer_blocks={arguments.blocks}",
    ]
    if arguments.pairs:
        tell_pairs(
            settings, arguments.model, arguments.blocks, [int(each) for each in arguments.pairs], arguments.turns
        )
        return
    two = ["cluster_config.replicas=2", "cluster_config.roles=[prefill, decode]"]
    config = load_config(None, [*settings, *two], arguments.model)
    if arguments.delays_ms:
        tell_rates(config, arguments.blocks, arguments.delays_ms, [int(each) for each in arguments.frames])
    if arguments.turns:
        tell_steps(config, arguments.blocks, arguments.turns)


if __name__ == "__main__":
    main()
