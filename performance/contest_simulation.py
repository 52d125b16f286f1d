"""The older servers' contest in simulation: 1,500 alpaca-like prompts on a profile of the NPU they had.

    python contest_simulation.py [--num-prompts 1500] [--rate 10] [--seed 1] [--profile profiles/contest_npu.yaml]

Nothing runs on a device. The shipping scheduler forms every step under a virtual clock; how long a step takes is in the
profile, which says what was published and how it was fitted. The rows with a published figure, whose prompts are padded
to 4,096 tokens as they were, say how well it fits, and the others what it predicts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import alpaca_like
import numpy as np
from arrivals import poisson
from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.replica import build_scheduler
from llm_serving.scheduler import Schedule
from llm_serving.whatif.cost_model import CostModel
from llm_serving.whatif.profile import read_profile
from llm_serving.whatif.report import mark
from llm_serving.whatif.step_shape import shape_of_rows

PROFILE = Path(__file__).parent / "profiles" / "contest_npu.yaml"
PADDED = 4096
"""Tokens that every prompt was filled up to."""
FORK_S, BEST_FOUND_S = 674.0, 437.0
TOKENS_PER_WORD = 1.3
NUM_BLOCKS, SLOTS = 1024, 128


@dataclass(frozen=True)
class StepTime:
    """
    Attributes:
        model: Seconds of a step by its shape.
        padded: Tokens that every prompt is filled up to; 0: none.
    """

    model: CostModel
    padded: int = 0

    def parts(self, step: Schedule) -> tuple[float, float]:
        """Seconds that a step takes for its prompts, and for what decodes: what that would take alone."""
        prompts = [row for row in step.rows if row.num_computed < row.request.num_prompt_tokens]
        lengths = [(max(row.query_len, self.padded), row.num_computed) for row in prompts]
        decoding = [(1, row.num_computed) for row in step.rows if row.num_computed >= row.request.num_prompt_tokens]
        decode = self._seconds(decoding)
        return self._seconds(lengths + decoding) - decode, decode

    def _seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        if not rows:
            return 0.0
        query_lens, num_computed = (np.array(each, np.int32) for each in zip(*rows, strict=True))
        return self.model.seconds(shape_of_rows(query_lens, num_computed, len(rows), 0))


class Load(NamedTuple):
    """Of each request the tokens of prompt and answer, and when it comes, in seconds."""

    prompts: list[int]
    answers: list[int]
    arrivals: list[float]


class Result(NamedTuple):
    """Seconds on the virtual clock."""

    makespan: float
    prefill: float
    decode: float
    first_tokens: list[float]
    """Of each request, from its arrival."""


def load(num_prompts: int, rate: float, seed: int) -> Load:
    items = alpaca_like.generate(num_prompts, seed)
    prompts = [1 + _num_tokens(f"{item['instruction']} {item['input']}") for item in items]
    return Load(prompts, [_num_tokens(item["output"]) for item in items], poisson(rate, num_prompts, seed))


def _num_tokens(text: str) -> int:
    return max(1, round(TOKENS_PER_WORD * len(text.split())))


def simulate(given: Load, time: StepTime, settings: Sequence[str]) -> Result:
    """Every request through the shipping scheduler.

    Args:
        given: The requests.
        time: Of a step.
        settings: "section.key=value" each.
    """
    config = load_config(
        None, [*settings, "model_config.max_generate_length=2048", f"pa_config.num_blocks={NUM_BLOCKS}"]
    )
    scheduler = build_scheduler(config, NUM_BLOCKS, 0, 0, None)
    coming = sorted(((arrival, index) for index, arrival in enumerate(given.arrivals)), reverse=True)
    now, prefill_s, decode_s = 0.0, 0.0, 0.0
    first: dict[str, float] = {}
    while coming or scheduler.has_unfinished_requests:
        if not scheduler.has_unfinished_requests:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            arrival, index = coming.pop()
            scheduler.add(_request(index, given, arrival))
        step = scheduler.schedule(now)
        if step is None:
            raise RuntimeError("requests wait and no step can be formed")
        prefill, decode = time.parts(step)
        now, prefill_s, decode_s = now + prefill + decode, prefill_s + prefill, decode_s + decode
        for row in step.rows:
            if row.samples:
                first.setdefault(row.request.request_id, now - row.request.arrival_time)
        scheduler.update(step, [7] * step.num_samples)
    return Result(now, prefill_s, decode_s, list(first.values()))


def _request(index: int, given: Load, arrival: float) -> Request:
    rng = random.Random(index)
    return Request(
        request_id=str(index),
        prompt_token_ids=[rng.randrange(3, 32000) for _ in range(given.prompts[index])],
        sampling=SamplingParams(max_tokens=given.answers[index], temperature=0.0),
        stop_token_ids=frozenset(),
        arrival_time=arrival,
    )


UNCACHED = "scheduler_config.prefix_caching=False"
OLDER = (UNCACHED, "model_config.prefill_batch_size=1", "scheduler_config.enable_mixed_chunk=False")
"""A prompt alone in a step."""
SERIAL = (*OLDER, "model_config.decode_batch_size=1")
FORK = (*OLDER, f"model_config.decode_batch_size={SLOTS}", "scheduler_config.max_consecutive_prefill_steps=100000")
"""Prompts before everything else."""
STATIC = (*FORK, "model_config.batching_strategy=static")
"""Nobody joins a batch that has begun."""
OURS = (UNCACHED, f"model_config.decode_batch_size={SLOTS}", "device_config.device_target=Ascend")
POLICIES = ("prefill_first", "decode_first", "mixed", "throughput")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=10.0, help="arrivals a second, Poisson")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", type=Path, default=PROFILE, help="what a step takes; default: the contest's NPU")
    arguments = parser.parse_args(argv)
    given, profile = load(arguments.num_prompts, arguments.rate, arguments.seed), read_profile(arguments.profile)
    time = StepTime(profile.step, PADDED)
    out = sys.stdout
    out.write(
        f"{sum(given.prompts)} tokens of prompts, {sum(given.answers)} of answers; {mark(profile)}\n\n"
        "| served by | published, s | simulated, s | of it prompts, s | decoding, s | first token p50 / p99, s |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    unpadded = replace(time, padded=0)
    at_once = given._replace(arrivals=[0.0] * len(given.prompts))
    rows = [
        ("one request after the other, padded", "3,000-3,500", given, time, SERIAL),
        ("batches of 128 that run to their ends, a prompt a step, padded", "-", given, time, STATIC),
        ("128 slots, a prompt a step, padded (the fork)", f"{FORK_S:.0f}", given, time, FORK),
        ("the same, not padded", "-", given, unpadded, FORK),
    ]
    rows += [(f"ours, {name}", "-", given, unpadded, _policy(name)) for name in POLICIES]
    rows += [(f"ours, {name}, all at once", "-", at_once, unpadded, _policy(name)) for name in POLICIES]
    for name, published, each, cost, settings in rows:
        result = simulate(each, cost, settings)
        ordered = sorted(result.first_tokens)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
        cells = f"{result.makespan:,.0f} | {result.prefill:,.0f} | {result.decode:,.0f} | {p50:,.1f} / {p99:,.1f}"
        out.write(f"| {name} | {published} | {cells} |\n")
        out.flush()
    out.write(f"| packed prompts, delayed insertion (the best found) | {BEST_FOUND_S:.0f} | not simulated | | | |\n")


def _policy(name: str) -> tuple[str, ...]:
    return (*OURS, f"scheduler_config.policy={name}")


if __name__ == "__main__":
    main()
