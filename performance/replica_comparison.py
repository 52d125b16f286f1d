"""What `roles_comparison.py` and `routing_comparison.py` share: a device, the settings of replicas on it, a table.

Nothing runs on a device. The shipping door, router, schedulers and caches serve under a virtual clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from llm_serving.config import load_config
from llm_serving.whatif.load import Load
from llm_serving.whatif.profile import Profile, read_profile
from llm_serving.whatif.simulation import Result, Simulation

PUBLISHED: Final = Path(__file__).parent / "profiles" / "contest_npu.yaml"
"""What was published of Llama-2-7B in float16 on one NPU."""
SETTINGS: Final = (
    "model_config.decode_batch_size=64",
    "model_config.max_generate_length=4096",
    "pa_config.block_size=16",
    "pa_config.num_blocks=2560",
    "scheduler_config.max_prefill_tokens=1024",
    "scheduler_config.max_waiting_queue=100000",
    "serving_config.audit_every=0",
)
"""Of every replica."""


def parser_of(description: str | None, num_requests: int) -> argparse.ArgumentParser:
    """Options that every comparison has; `num_requests` a load where none are told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=num_requests)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, default=PUBLISHED, help="as `llm-serving profile` writes it")
    return parser


def play(given: Load, overrides: Iterable[str], profile: Profile, seed: int, name: str) -> Result:
    """The load, served by replicas of `SETTINGS` and these overrides (`section.key=value`)."""
    return Simulation(load_config(None, [*SETTINGS, *overrides]), given, profile, seed, name).run()


def begin_table(arguments: argparse.Namespace, num_replicas: int, columns: Sequence[str]) -> Profile:
    """Prints what is compared and the heading of its table.

    Returns:
        The profile that was asked for.
    """
    profile = read_profile(arguments.profile)
    sys.stdout.write(
        f"Simulated: {num_replicas} replicas, {arguments.requests} requests a load, seed {arguments.seed}; "
        f"{profile}\n\n"
    )
    add_row(columns)
    add_row(["---"] * len(columns))
    return profile


def add_row(cells: Sequence[str]) -> None:
    """Prints a row at once: the next one may take minutes."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()
