"""Prompts and answers at replicas of their own, against replicas that do both, in simulation.

    python roles_comparison.py [--requests 400] [--seed 1] [--profile profile.json]

Nothing runs on a device. The shipping door, router, schedulers and caches serve under a virtual clock. Without a
profile of one's own a step takes what was published of Llama-2-7B in float16 on one NPU (profiles/contest_npu.yaml):
such a device was not at hand. A block that is handed over takes what the profile says of a block that is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.config.yaml_reader import read_value
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.workload import workload
from replica_comparison import add_row, begin_table, parser_of, play

NUM_REPLICAS: Final = 4
LOADS: Final = {
    "long prompts": "rate: 8, prompt_tokens: {low: 1500, high: 3500}, answer_tokens: {low: 20, high: 80}",
    "chat": "rate: 24, prompt_tokens: {median: 250, p99: 2500}, answer_tokens: {median: 80, p99: 400}",
    "long answers": "rate: 12, prompt_tokens: {low: 64, high: 512}, answer_tokens: {low: 200, high: 600}",
}
"""Requests a second of all replicas together, and their tokens."""
ROLES: Final = (
    ("both",) * 4,
    ("prefill", "both", "both", "both"),
    ("prefill", "decode", "decode", "decode"),
    ("prefill", "prefill", "decode", "decode"),
    ("prefill", "prefill", "prefill", "decode"),
)
FIGURES: Final = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "output_tokens_per_s")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser_of(__doc__, num_requests=400).parse_args(argv)
    columns = ("load", "roles", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms", "tokens/s")
    profile = begin_table(arguments, NUM_REPLICAS, columns)
    for name, text in LOADS.items():
        streams = f"streams:\n    all: {{{text}, requests: {arguments.requests}}}\n"
        given = workload(read_value(streams, name), name, arguments.seed)
        for roles in ROLES:
            overrides = [f"cluster_config.replicas={NUM_REPLICAS}", f"cluster_config.roles=[{', '.join(roles)}]"]
            figures = figures_of(play(given, overrides, profile, arguments.seed, name))
            p50, p99, tpot, slow, tokens = (figures[column] for column in FIGURES)
            shown = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
            add_row([name, shown, f"{p50:,.0f}", f"{p99:,.0f}", f"{tpot:.1f}", f"{slow:.1f}", f"{tokens:,.0f}"])


if __name__ == "__main__":
    main()
