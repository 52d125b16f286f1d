"""Throughput of one master with many replicas, and of several masters, in simulation.

    python performance/run.py scaling [--replicas 1,2,4,8,16,32,48,64] [--masters 1,4,16,64,128] [--profile FILE]

No device computes. Admission, router, schedulers and caches are the shipped ones, under virtual time. A step takes as
long as published for Llama-2-7B in float16 on one NPU (profiles/contest_npu.yaml). All threads of a master share one
interpreter; its CPU time for a request, a step and a token comes from `run.py scheduler` and is given by arguments.

    one      one master with an increasing number of replicas and the same load for each, until the master is saturated
    several  several masters; each tenant belongs to the master that its name hashes to. Masters share no state, so each
             is a simulation of its own: the busiest one, the median one and the least busy one
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from llm_serving.config import load_config
from llm_serving.config.yaml_reader import read_value
from llm_serving_simulator.figures import Figures, Outcome, SimulationResult, figures_of
from llm_serving_simulator.profile import CostModel, CostTerm, Profile, read_profile
from llm_serving_simulator.report import profile_source
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, parse_workload

PUBLISHED: Final = Path(__file__).resolve().parents[1] / "profiles" / "contest_npu.yaml"
STREAM: Final = """
streams:
    chat: {rate: RATE, requests: COUNT, prompt_tokens: {median: 250, p99: 2000}, answer_tokens: {median: 120, p99: 500},
           tenants: TENANTS}
"""
RATE: Final = 3.2
"""Requests per second of a replica: about two thirds of its capacity."""
MIN_REQUESTS: Final = 320
"""Minimum number of requests of a workload."""
TENANTS_PER_MASTER: Final = 64
SETTINGS: Final = (
    "model_config.decode_batch_size=128",
    "model_config.max_generate_length=4096",
    "pa_config.block_size=16",
    "pa_config.num_blocks=4096",
    "scheduler_config.max_prefill_tokens=1024",
    "scheduler_config.max_waiting_queue=1000000",
    "serving_config.audit_every=0",
)


def with_master(profile: Profile, request_s: float, step_s: float, token_s: float) -> Profile:
    """Return the profile with the CPU time of one interpreter for a request, a step and a token."""
    step, tokens = CostModel((CostTerm("step", step_s),)), CostModel()
    return replace(
        profile, form=step, take=tokens, request_s=request_s, token_s=token_s, client_s=0.0, one_interpreter=True
    )


def load(num_replicas: float, num_requests: int, num_tenants: int, seed: int) -> Workload:
    numbers = {"RATE": RATE * num_replicas, "COUNT": num_requests, "TENANTS": num_tenants}
    text = STREAM
    for word, number in numbers.items():
        text = text.replace(word, f"{number:g}")
    return parse_workload(read_value(text, "chat"), "chat", seed)


def play(
    given: Workload,
    num_replicas: int,
    profile: Profile,
    seed: int = 1,
    samples: list[tuple[float, float]] | None = None,
) -> SimulationResult:
    """Simulate the workload on one master; append (time, CPU seconds of the master until then) to `samples`."""
    config = load_config(None, [*SETTINGS, f"cluster_config.replicas={num_replicas}"])
    simulation = Simulation(config, given, profile, seed)

    def look(outcomes: Sequence[Outcome], now: float) -> bool:
        del outcomes
        if samples is not None:
            samples.append((now, simulation.master_s))
        return False

    return simulation.run(look)


def shares_of_masters(num_masters: int, exponent: float) -> list[float]:
    """Return the load of each master relative to the mean, if tenants are hashed to masters.

    Args:
        num_masters: Number of masters, with `TENANTS_PER_MASTER` tenants each on average.
        exponent: Exponent of Zipf's law of the tenants' demand; 0: all demand the same.
    """
    num_tenants = TENANTS_PER_MASTER * num_masters
    weights = [(rank + 1) ** -exponent for rank in range(num_tenants)]
    loads = Counter(dict.fromkeys(range(num_masters), 0.0))
    for rank, weight in enumerate(weights):
        digest = hashlib.sha256(f"tenant-{rank}".encode()).digest()
        loads[int.from_bytes(digest[:8], "big") % num_masters] += weight
    mean = sum(weights) / num_masters
    return sorted(load / mean for load in loads.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=_numbers, default=[1, 2, 4, 8, 16, 32, 48, 64], help="numbers of replicas of one master"
    )
    parser.add_argument("--masters", type=_numbers, default=[1, 4, 16, 64, 128], help="numbers of masters")
    parser.add_argument("--replicas-per-master", type=int, default=32)
    parser.add_argument("--requests", type=int, default=60, help="requests of each replica")
    parser.add_argument("--profile", type=Path, default=PUBLISHED, help="profile of a replica without its master")
    parser.add_argument("--request-us", type=float, default=900.0, help="CPU time of the master for a request")
    parser.add_argument("--step-us", type=float, default=700.0)
    parser.add_argument("--token-us", type=float, default=35.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, metavar="SVG", help="plot of the replicas of one master; needs matplotlib")
    arguments = parser.parse_args(argv)
    costs = (arguments.request_us / 1e6, arguments.step_us / 1e6, arguments.token_us / 1e6)
    profile = with_master(read_profile(arguments.profile), *costs)
    write = sys.stdout.write
    write(
        f"Simulated, seed {arguments.seed}: {RATE:g} requests/s a replica, {arguments.requests} requests each; "
        f"{profile_source(profile)}; CPU time of a master: {arguments.request_us:g} us a request, "
        f"{arguments.step_us:g} a step, {arguments.token_us:g} a token\n\n"
        "| replicas | tokens/s | a replica | in time | TTFT p50, ms | p99 | TPOT p50, ms | p99 | master busy "
        "| fairness | simulated in, s |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    rows = []
    for num_replicas in arguments.replicas:
        rows.append(_row(num_replicas, profile, arguments))
        write(f"{rows[-1]}\n")
        sys.stdout.flush()
    if arguments.plot is not None:
        plot(rows, profile, arguments.plot)
    size = arguments.replicas_per_master
    write(
        f"\nMasters of {size} replicas, tenants by their names:\n\n| replicas | tenants ask for | busiest master, of "
        "the mean | in time: busiest | middle | idlest |\n| --- | --- | --- | --- | --- | --- |\n"
    )
    played: dict[float, Figures] = {}
    for exponent in (0.0, 0.5, 1.0):
        for num_masters in arguments.masters:
            shares = shares_of_masters(num_masters, exponent)
            chosen = [shares[-1], statistics.median_low(shares), shares[0]]
            cells = []
            for share in chosen:
                key = round(min(share, 3.0), 1)
                if key not in played:
                    played[key] = figures_of(_play_share(size, key, profile, arguments))
                cells.append(f"{played[key]['goodput_share']:.1%}")
            demand = "the same" if exponent == 0 else f"by Zipf's law, {exponent:g}"
            write(f"| {num_masters * size:,} | {demand} | {chosen[0]:.2f} | {' | '.join(cells)} |\n")
            sys.stdout.flush()
    return 0


def _play_share(
    size: int,
    share: float,
    profile: Profile,
    arguments: argparse.Namespace,
    samples: list[tuple[float, float]] | None = None,
) -> SimulationResult:
    count = max(MIN_REQUESTS, round(arguments.requests * size * share))
    given = load(size * share, count, TENANTS_PER_MASTER, arguments.seed)
    return play(given, size, profile, arguments.seed, samples)


class Row(NamedTuple):
    """Figures of one master with `size` replicas."""

    num_replicas: int
    tokens_per_s: float
    """Tokens per second during the arrivals, without their first quarter."""
    figures: Figures
    master_share: float
    """Share of that time in which the master's threads computed."""
    seconds: float
    """Seconds that the simulation took."""

    def __str__(self) -> str:
        each, size = self.figures, self.num_replicas
        return (
            f"| {size} | {self.tokens_per_s:,.0f} | {self.tokens_per_s / size:,.0f} | {each['goodput_share']:.1%} | "
            f"{each['ttft_p50_ms']:,.0f} | {each['ttft_p99_ms']:,.0f} | {each['tpot_p50_ms']:.0f} | "
            f"{each['tpot_p99_ms']:.0f} | {self.master_share:.0%} | {each['fairness']:.3f} | {self.seconds:.0f} |"
        )


def _row(size: int, profile: Profile, arguments: argparse.Namespace) -> Row:
    begin = time.perf_counter()
    samples: list[tuple[float, float]] = []
    result = _play_share(size, 1.0, profile, arguments, samples)
    seconds = time.perf_counter() - begin
    last = max(each.due_s for each in result.outcomes)
    times = [time for each in result.outcomes for time in each.token_times_s if last / 4 <= time < last]
    return Row(size, len(times) / (0.75 * last), figures_of(result), _share(samples, last), seconds)


def _share(samples: Sequence[tuple[float, float]], last: float) -> float:
    """Return the share of CPU time during the arrivals without their first quarter; samples are (time, CPU seconds)."""
    within = [each for each in samples if last / 4 <= each[0] < last]
    (begin, before), (end, after) = within[0], within[-1]
    return (after - before) / (end - begin)


def plot(rows: Sequence[Row], profile: Profile, path: Path) -> None:
    """Plot tokens per second of a replica, the master's utilization, and latencies over the number of replicas."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llm-serving"
    import matplotlib.pyplot as plt

    sizes = [each.num_replicas for each in rows]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    axes[0].plot(sizes, [each.tokens_per_s / each.num_replicas for each in rows], "o-")
    axes[0].set(ylabel="tokens/s a replica", ylim=(0, None))
    axes[1].plot(sizes, [100 * each.master_share for each in rows], "o-")
    axes[1].axhline(100, color="grey", linestyle=":")
    axes[1].set(ylabel="the master's one core, % of the time", ylim=(0, None))
    for style, name in (("o-", "ttft_p50_ms"), ("o--", "ttft_p99_ms"), ("s-", "tpot_p50_ms"), ("s--", "tpot_p99_ms")):
        label = name.removesuffix("_ms").replace("_", " ").upper()
        axes[2].plot(sizes, [each.figures[name] for each in rows], style, label=label)
    axes[2].set(ylabel="ms", yscale="log")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.set(xlabel="replicas of one master", xscale="log")
        axis.set_xticks(sizes, [str(each) for each in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"simulated; {profile_source(profile)}", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]
