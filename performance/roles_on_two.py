"""Two WorkAgents that both do all, beside one of prompts and one of answers, on the real server in turns.

    .venv/bin/python performance/roles_on_two.py [--runs 2] [--seconds 8]     # on an idle machine; some three minutes

The load: 8 clients read streams of 200 tokens, one after the other, while prompts come that want 4 tokens each, so many
a second of so many tokens. Told for each: time to the first token of the prompts, time between tokens of the streams,
tokens a second of all, requests that moved and how long that took, from the reply at one replica to the step formed at
the other. Each WorkAgent has one core.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Final

import uvloop
from http_client import HttpClient
from llm_serving.cli.own_server import own_server
from llm_serving.config.yaml_reader import read_value
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.http_player import play
from llm_serving.whatif.load import Load
from llm_serving.whatif.profile import read_profile
from llm_serving.whatif.simulation import Result
from llm_serving.whatif.workload import workload
from replica_comparison import PUBLISHED

ROLES: Final = ("both, both", "prefill, decode")
SETTINGS: Final = (
    "cluster_config.replicas=2",
    "device_config.num_threads=1",
    "model_config.decode_batch_size=32",
    "pa_config.num_blocks=1500",
    "scheduler_config.prefix_caching=false",
)
LOADS: Final = {"short prompts": (20, 100), "middle prompts": (8, 500), "long prompts": (3, 1500)}
"""Of prompts: requests a second, tokens of each."""
STREAMS_A_SECOND: Final = 4
"""Read by 8 clients at most; so few that they end before the prompts do."""
COLUMNS: Final = (
    "standard.ttft_p50_ms",
    "standard.ttft_p99_ms",
    "interactive.itl_p50_ms",
    "interactive.itl_p99_ms",
    "output_tokens_per_s",
)
MOVED: Final = ("moved_requests", "moved_blocks", "move_seconds")


def load(name: str, seconds: float, seed: int) -> Load:
    rate, length = LOADS[name]
    text = (
        "vocab_size: 1024\nstreams:\n"
        f"    people: {{concurrency: 8, requests: {round(STREAMS_A_SECOND * seconds)}, class: interactive,"
        " prompt_tokens: 40, answer_tokens: 200}\n"
        f"    prompts: {{rate: {rate}, ends_s: {seconds}, class: standard, prompt_tokens: {length},"
        " answer_tokens: 4}\n"
    )
    return workload(read_value(text, name), name, seed)


async def moved(url: str) -> list[float]:
    """What the server tells of `MOVED`."""
    response = await HttpClient.from_url(url).request("GET", "/metrics")
    totals = dict.fromkeys(MOVED, 0.0)
    for line in response.body.decode().splitlines():
        name = line.partition("{")[0].removeprefix("llm_serving:").removesuffix("_total")
        if name in totals:
            totals[name] += float(line.split()[-1])
    return list(totals.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="of each, in turns (default: 2)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a load (default: 8)")
    arguments = parser.parse_args()
    profile = read_profile(PUBLISHED)
    titles = ["load", "roles", *COLUMNS, "moved", "blocks", "ms a move"]
    sys.stdout.write(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}\n")
    for run in range(arguments.runs):
        for roles in ROLES:
            with own_server(None, [*SETTINGS, f"cluster_config.roles=[{roles}]"], "demo") as served:
                url, classes = served.serving.url, served.request_classes
                uvloop.run(play(url, load("middle prompts", 1.0, 99), classes, "warm"))
                for name in LOADS:
                    before = asyncio.run(moved(url))
                    played = uvloop.run(play(url, load(name, arguments.seconds, run), classes, name.replace(" ", "-")))
                    figures = figures_of(Result(roles, name, profile, played.outcomes))
                    requests, blocks, seconds = (
                        after - then for after, then in zip(asyncio.run(moved(url)), before, strict=True)
                    )
                    cells = [f"{figures[column]:,.1f}" for column in COLUMNS]
                    cells += [f"{requests:.0f}", f"{blocks:.0f}", f"{1000 * seconds / max(requests, 1):.1f}"]
                    sys.stdout.write(f"| {name} | {roles} | {' | '.join(cells)} |\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
