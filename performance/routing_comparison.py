"""Which replica gets a request: the rules of `serving_config.routing` against each other, in simulation.

    python routing_comparison.py [--replicas 4] [--requests 600] [--seed 1] [--profile profile.json]

Nothing runs on a device. The shipping door, router, schedulers and caches serve under a virtual clock. Without a
profile of one's own a step takes what was published of Llama-2-7B in float16 on one NPU (profiles/contest_npu.yaml):
such a device was not at hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llm_serving.config import load_config
from llm_serving.config.yaml_reader import read_value
from llm_serving.core.choices import RoutingName
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.load import Load
from llm_serving.whatif.profile import Profile, read_profile
from llm_serving.whatif.simulation import Result, Simulation
from llm_serving.whatif.workload import workload

PUBLISHED: Final = Path(__file__).parent / "profiles" / "contest_npu.yaml"
LOADS: Final = {
    "shared prefixes": """
streams:
    agents: {rate: RATE, requests: COUNT, prompt_tokens: {low: 1060, high: 1300}, answer_tokens: {low: 20, high: 120},
             prefix_tokens: 1024, prefixes: 48}
""",
    "mixed": """
streams:
    agents: {rate: HALF, requests: HALF_COUNT, prompt_tokens: {low: 1060, high: 1300},
             answer_tokens: {low: 20, high: 120}, prefix_tokens: 1024, prefixes: 48}
    chat: {rate: HALF, requests: HALF_COUNT, prompt_tokens: {median: 250, p99: 2500},
           answer_tokens: {median: 80, p99: 400}}
""",
    "skewed": """
streams:
    one: {rate: HALF, requests: HALF_COUNT, prompt_tokens: {low: 1060, high: 1300},
          answer_tokens: {low: 20, high: 120}, prefix_tokens: 1024, prefixes: 1}
    others: {rate: HALF, requests: HALF_COUNT, prompt_tokens: {low: 1060, high: 1300},
             answer_tokens: {low: 20, high: 120}, prefix_tokens: 1024, prefixes: 48}
""",
}
"""RATE requests a second a replica, in all COUNT; HALF of both."""
RATES: Final = {"shared prefixes": 11.0, "mixed": 8.0, "skewed": 12.0}
"""Requests a second a replica."""
SETTINGS: Final = (
    "model_config.decode_batch_size=64",
    "model_config.max_generate_length=4096",
    "pa_config.block_size=16",
    "pa_config.num_blocks=2560",
    "scheduler_config.max_prefill_tokens=1024",
    "scheduler_config.max_waiting_queue=100000",
    "serving_config.audit_every=0",
)
COLUMNS: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "goodput_share", "output_tokens_per_s")


def load(name: str, num_replicas: int, num_requests: int, seed: int) -> Load:
    """The load of this name for so many replicas."""
    rate = RATES[name] * num_replicas
    numbers = {"HALF_COUNT": num_requests // 2, "COUNT": num_requests, "RATE": rate, "HALF": rate / 2}
    text = LOADS[name]
    for word, number in numbers.items():
        text = text.replace(word, f"{number:g}")
    return workload(read_value(text, name), name, seed)


def play(given: Load, routing: str, num_replicas: int, profile: Profile, seed: int) -> Result:
    """The load, served by so many replicas among which requests are routed so."""
    config = load_config(
        None, [*SETTINGS, f"cluster_config.replicas={num_replicas}", f"serving_config.routing={routing}"]
    )
    return Simulation(config, given, profile, seed, routing).run()


def cached_share(result: Result) -> float:
    """Of the tokens of all prompts, those that were found computed."""
    num_tokens = sum(each.num_prompt_tokens for each in result.outcomes)
    return sum(each.num_cached_tokens for each in result.outcomes) / num_tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, default=PUBLISHED, help="as `llm-serving profile` writes it")
    arguments = parser.parse_args(argv)
    profile = read_profile(arguments.profile)
    out = sys.stdout
    out.write(
        f"Simulated: {arguments.replicas} replicas, {arguments.requests} requests a load, seed {arguments.seed}; "
        f"{profile}\n\n"
        "| load | routing | TTFT p50, ms | TTFT p99, ms | TPOT p50, ms | of prompts cached | in time | tokens/s |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    for name in LOADS:
        given = load(name, arguments.replicas, arguments.requests, arguments.seed)
        for routing in reversed(RoutingName):
            result = play(given, routing, arguments.replicas, profile, arguments.seed)
            figures = figures_of(result)
            p50, p99, tpot, good, tokens = (figures[column] for column in COLUMNS)
            cells = f"{p50:,.0f} | {p99:,.0f} | {tpot:.1f} | {cached_share(result):.0%} | {good:.1%} | {tokens:,.0f}"
            out.write(f"| {name} | {routing} | {cells} |\n")
            out.flush()


if __name__ == "__main__":
    main()
