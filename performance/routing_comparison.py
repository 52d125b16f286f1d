"""Which replica gets a request: the rules of `serving_config.routing` against each other, in simulation.

    python routing_comparison.py [--replicas 4] [--requests 600] [--seed 1] [--profile profile.json]

Nothing runs on a device. The shipping door, router, schedulers and caches serve under a virtual clock. Without a
profile of one's own a step takes what was published of Llama-2-7B in float16 on one NPU (profiles/contest_npu.yaml):
such a device was not at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.config.yaml_reader import read_value
from llm_serving.core.enums import RoutingName
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.load import Load
from llm_serving.whatif.profile import Profile
from llm_serving.whatif.simulation import Result
from llm_serving.whatif.workload import workload
from replica_comparison import add_row, begin_table, parser_of, play

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
FIGURES: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "goodput_share", "output_tokens_per_s")


def load(name: str, num_replicas: int, num_requests: int, seed: int) -> Load:
    """The load of this name for so many replicas."""
    rate = RATES[name] * num_replicas
    numbers = {"HALF_COUNT": num_requests // 2, "COUNT": num_requests, "RATE": rate, "HALF": rate / 2}
    text = LOADS[name]
    for word, number in numbers.items():
        text = text.replace(word, f"{number:g}")
    return workload(read_value(text, name), name, seed)


def play_routed(given: Load, routing: str, num_replicas: int, profile: Profile, seed: int) -> Result:
    """The load, served by so many replicas among which requests are routed so."""
    overrides = [f"cluster_config.replicas={num_replicas}", f"serving_config.routing={routing}"]
    return play(given, overrides, profile, seed, routing)


def cached_share(result: Result) -> float:
    """Of the tokens of all prompts, those that were found computed."""
    num_tokens = sum(each.num_prompt_tokens for each in result.outcomes)
    return sum(each.num_cached_tokens for each in result.outcomes) / num_tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, num_requests=600)
    parser.add_argument("--replicas", type=int, default=4)
    arguments = parser.parse_args(argv)
    columns = ("load", "routing", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "of prompts cached", "in time")
    profile = begin_table(arguments, arguments.replicas, [*columns, "tokens/s"])
    for name in LOADS:
        given = load(name, arguments.replicas, arguments.requests, arguments.seed)
        for routing in reversed(RoutingName):
            result = play_routed(given, routing, arguments.replicas, profile, arguments.seed)
            figures = figures_of(result)
            p50, p99, tpot, good, tokens = (figures[column] for column in FIGURES)
            cached = cached_share(result)
            of_time = [f"{p50:,.0f}", f"{p99:,.0f}", f"{tpot:.1f}"]
            add_row([name, routing, *of_time, f"{cached:.0%}", f"{good:.1%}", f"{tokens:,.0f}"])


if __name__ == "__main__":
    main()
