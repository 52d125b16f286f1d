"""What guesses bring and cost: python performance/speculation_benchmark.py [--model FOLDER] [--pairs N]

The same engine twice in one process, with and without `speculative_method: ngram`; both take turns at every piece of
work, and what counts is the ratio of tokens per second within a pair. Every answer of one is compared with that of the
other, and a difference ends the run.

    first time   one stream: the long answers of the shipped model's questions, which nobody has had before
    again        the same questions once more
    noise N      N streams at once, sampled at a temperature at which nothing can be guessed

Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM
from workload import DEMO_QUESTIONS, load

METHODS = ("none", "ngram")
MAX_TOKENS = 384
NOISE_TOKENS = 48


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    engines = [_engine(arguments.model, arguments.set, method) for method in METHODS]
    recitations = [each.text for each in load(DEMO_QUESTIONS) if len(each.reference) > 100]
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    ratios = [_compare(engines, [text], greedy, turn) for turn, text in enumerate(recitations[: arguments.pairs])]
    _show("first time", ratios, engines)
    ratios = [_compare(engines, [text], greedy, turn) for turn, text in enumerate(recitations[: arguments.pairs])]
    _show("again", ratios, engines)
    for count in arguments.rows:
        noise = SamplingParams(temperature=2.0, seed=count, max_tokens=NOISE_TOKENS, ignore_eos=True)
        _compare(engines, _noise(engines[0], count, 0), noise, 0)  # not counted: memory is touched
        ratios = [
            _compare(engines, _noise(engines[0], count, 1 + turn), noise, turn) for turn in range(arguments.pairs)
        ]
        _show(f"noise {count}", ratios, engines)
    return 0


def _engine(model: Path, settings: Sequence[str], method: str) -> LLM:
    overrides = [*settings, f"scheduler_config.speculative_method={method}", "model_config.decode_batch_size=128"]
    return LLM(load_config(None, overrides, model))


def _noise(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Prompts of 32 random tokens."""
    drawn = np.random.default_rng(1000 * count + seed).integers(3, llm.model_spec.vocab_size, (count, 32))
    return [[int(token_id) for token_id in prompt] for prompt in drawn]


def _compare(
    engines: Sequence[LLM], prompts: Sequence[str] | Sequence[list[int]], params: SamplingParams, turn: int
) -> tuple[float, float]:
    """Tokens per second without and with guesses; the order changes from turn to turn."""
    rates = [0.0, 0.0]
    answers: list[list[object]] = [[], []]
    for index in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        outputs = engines[index].generate(list(prompts), params)
        rates[index] = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - began)
        answers[index] = [(output.text, output.token_ids, output.finish_reason) for output in outputs]
    if answers[0] != answers[1]:
        raise SystemExit("an answer with guesses differs from the one without")
    return rates[0], rates[1]


def _show(name: str, rates: Sequence[tuple[float, float]], engines: Sequence[LLM]) -> None:
    ratios = [guessing / plain for plain, guessing in rates]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain, guessing = (statistics.median(each) for each in zip(*rates, strict=True))
    checked, right = (_count(engines[1], f"vllm:spec_decode_num_{each}_tokens_total") for each in ("draft", "accepted"))
    print(
        f"{name:12} {plain:8.0f} tok/s, with guesses {guessing:8.0f}: {middle:.2f} x ({low:.2f}-{high:.2f});"
        f" so far {checked:.0f} guesses, {right:.0f} right",
        flush=True,
    )


def _count(llm: LLM, counter: str) -> float:
    lines = llm.metrics.render()[0].decode().splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(counter))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"), metavar="FOLDER", help="or `demo`")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
