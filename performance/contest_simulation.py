"""The older servers' contest in simulation: 1,500 alpaca-like prompts on a step-time model of the NPU they had.

    python contest_simulation.py [--num-prompts 1500] [--rate 10] [--seed 1]

Nothing runs on a device. The shipping scheduler forms every step under a virtual clock; how long a step takes follows
from figures that were published of the older server (Llama-2-7B in float16, one NPU, prompts padded to 4,096 tokens):

- a prompt of 128 tokens took 35, 21, 17, 13 and 11 ms in batches of 1, 2, 4, 8 and 16 (`PREFILL_MS`);
- one request after the other took 3,000 to 3,500 s for all of them, which leaves what decoding one request costs;
- with 128 requests at a time it took 674 s, 76 % of it for prompts and 22 % for decoding, which leaves what each
  further request in a step costs.

So the first two rows of the table say how well the model fits, and the others what it predicts.
"""

from __future__ import annotations

import argparse
import bisect
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import alpaca_like
from arrivals import poisson
from llm_serving.config import load_config
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.replica import build_scheduler
from llm_serving.scheduler import Schedule

PREFILL_MS = ((128, 35.0), (256, 42.0), (512, 68.0), (1024, 104.0), (2048, 176.0))
"""Tokens of a step, and its published time: batches of prompts of 128 tokens."""
PADDED = 4096
SERIAL_S = (3000.0, 3500.0)
FORK_S, FORK_DECODE_SHARE = 674.0, 0.22
BEST_FOUND_S = 437.0
TOKENS_PER_WORD = 1.3
NUM_BLOCKS, SLOTS = 1024, 128


def prefill_ms(num_tokens: int) -> float:
    """Of a step: along the published points, and beyond them on the line of the last two; never less than the first."""
    at = min(len(PREFILL_MS) - 2, max(0, bisect.bisect([tokens for tokens, _ in PREFILL_MS], num_tokens) - 1))
    (x, y), (x1, y1) = PREFILL_MS[at : at + 2]
    return max(PREFILL_MS[0][1], y + (num_tokens - x) * (y1 - y) / (x1 - x))


@dataclass(frozen=True)
class StepTime:
    """
    Attributes:
        decode_ms: Of a step with one request.
        per_request_ms: What each further one adds.
        padded: Tokens that every prompt is filled up to; 0: none.
    """

    decode_ms: float
    per_request_ms: float
    padded: int = 0

    def decode(self, num_requests: int) -> float:
        """Milliseconds."""
        return self.decode_ms + self.per_request_ms * (num_requests - 1) if num_requests else 0.0

    def prefill(self, lengths: Sequence[int]) -> float:
        """Milliseconds of the prompts, or parts of them, in one step."""
        return prefill_ms(sum(max(length, self.padded) for length in lengths)) if lengths else 0.0


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
    num_decode_steps: int
    num_further: int
    """Requests in decode steps beside the first of each."""
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

    Prompts and decoding in one step take the sum of both: how much less they take together is not known.

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
    now, prefill_s, decode_s, num_decode_steps, num_further = 0.0, 0.0, 0.0, 0, 0
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
        prompts, num_decoding = _parts(step)
        prefill, decode = time.prefill(prompts) / 1e3, time.decode(num_decoding) / 1e3
        now, prefill_s, decode_s = now + prefill + decode, prefill_s + prefill, decode_s + decode
        num_decode_steps += num_decoding > 0
        num_further += max(0, num_decoding - 1)
        for row in step.rows:
            if row.samples:
                first.setdefault(row.request.request_id, now - row.request.arrival_time)
        scheduler.update(step, [7] * step.num_samples)
    return Result(now, prefill_s, decode_s, num_decode_steps, num_further, list(first.values()))


def _request(index: int, given: Load, arrival: float) -> Request:
    rng = random.Random(index)
    return Request(
        request_id=str(index),
        prompt_token_ids=[rng.randrange(3, 32000) for _ in range(given.prompts[index])],
        sampling=SamplingParams(max_tokens=given.answers[index], temperature=0.0),
        stop_token_ids=frozenset(),
        arrival_time=arrival,
    )


def _parts(step: Schedule) -> tuple[list[int], int]:
    """Tokens of each prompt, or part of one, and how many requests decode."""
    prompts = [row.query_len for row in step.rows if row.num_computed < row.request.num_prompt_tokens]
    return prompts, len(step.rows) - len(prompts)


UNCACHED = "scheduler_config.prefix_caching=False"
OLDER = (UNCACHED, "model_config.prefill_batch_size=1", "scheduler_config.composition=separate")
"""A prompt alone in a step."""
SERIAL = (*OLDER, "model_config.decode_batch_size=1")
FORK = (*OLDER, f"model_config.decode_batch_size={SLOTS}", "scheduler_config.max_consecutive_prefill_steps=100000")
"""Prompts before everything else."""
OURS = (UNCACHED, f"model_config.decode_batch_size={SLOTS}", "device_config.device_target=Ascend")
POLICIES = ("prefill_first", "decode_first", "mixed", "throughput")


def fitted(given: Load) -> StepTime:
    """What decoding costs, from the two totals that were published."""
    num_tokens = sum(given.answers) - len(given.answers)  # a prompt's step gives the first token
    left_ms = 1e3 * statistics.mean(SERIAL_S) - len(given.prompts) * prefill_ms(PADDED)
    decode_ms = left_ms / num_tokens
    time = StepTime(decode_ms, 0.0, PADDED)
    wanted_ms = 1e3 * FORK_S * FORK_DECODE_SHARE
    for _ in range(2):  # the steps of the fork hardly depend on it
        fork = simulate(given, time, FORK)
        per_request_ms = (wanted_ms - fork.num_decode_steps * decode_ms) / fork.num_further
        time = replace(time, per_request_ms=per_request_ms)
    return time


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=10.0, help="arrivals a second, Poisson")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    given = load(arguments.num_prompts, arguments.rate, arguments.seed)
    time = fitted(given)
    out = sys.stdout
    out.write(
        f"{sum(given.prompts)} tokens of prompts, {sum(given.answers)} of answers; a decode step takes "
        f"{time.decode_ms:.1f} ms, and {time.per_request_ms:.2f} ms more for each further request\n\n"
        "| served by | published, s | simulated, s | of it prompts, s | decoding, s | first token p50 / p99, s |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    unpadded = replace(time, padded=0)
    at_once = given._replace(arrivals=[0.0] * len(given.prompts))
    rows = [
        ("one request after the other, padded", "3,000-3,500", given, time, SERIAL),
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
