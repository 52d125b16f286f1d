"""Throughput of two versions or two configurations of the package, measured in turns.

    python performance/run.py versions --other PYTHON --model FOLDER

The speed of a machine changes more within a minute than it differs between versions. So both versions are loaded at
once, each in a process of its own interpreter, and take turns at every piece of work; the result is the ratio within
a pair of neighbours. Without `--other`, one version runs with two configurations: `--other-set KEY=VALUE` applies to
the other one only.

    A     tokens per second of one stream after its first token: prompt 128, output 128
    B32   output tokens per second of 32 requests at once (any number), prefill included: prompt 128, output 32
    C     prompt tokens per second of one prompt of 1,024

A ratio above 1 means that the version of this interpreter, without `--other-set`, is faster. The median ratio is shown
with its quartiles and with a sign test: the probability that chance alone favours one version in so many pairs.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT_LEN, OUTPUT_LEN, BATCH_OUTPUT_LEN, LONG_PROMPT_LEN = 128, 128, 32, 1024


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    versions = [
        Version(python, [str(arguments.model), *settings])
        for python, settings in zip((sys.executable, arguments.other), settings_of(arguments), strict=True)
    ]
    try:
        for test in arguments.tests:
            for version in versions:
                version.measure(test)  # a warm-up: graphs are compiled, memory is touched
            pairs = []
            for pair in range(arguments.pairs):
                order = versions if pair % 2 == 0 else versions[::-1]
                rates = {version: version.measure(test) for version in order}
                pairs.append((rates[versions[0]], rates[versions[1]]))
            print(summary(test, pairs), flush=True)
    finally:
        for version in versions:
            version.close()
    return 0


def settings_of(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the "section.key=value" overrides of this version and of the other."""
    settings = [f"model_config.model_dtype={arguments.dtype}", f"pa_config.num_blocks={arguments.num_blocks}"]
    settings.append("model_config.decode_batch_size=128")
    if arguments.quantization:
        settings.append(f"quant_config.quantization={arguments.quantization}")
    settings += arguments.set
    return settings, settings + arguments.other_set


def summary(test: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Return the summary line of the rates (this, other) of all pairs of a test."""
    ratios = [this / other for this, other in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    this, other = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    wins = sum(ratio > 1 for ratio in ratios)
    return (
        f"{test:5} {this:9.1f} tok/s, other {other:9.1f}; ratio {middle:.3f} ({low:.3f}-{high:.3f});"
        f" faster in {wins} of {len(pairs)} pairs (by chance: {sign_test(wins, len(pairs)):.2f})"
    )


def sign_test(wins: int, pairs: int) -> float:
    """Return the probability that a fair coin favours one side in at least as many of `pairs` throws."""
    most = max(wins, pairs - wins)
    tail = sum(math.comb(pairs, count) for count in range(most, pairs + 1))
    return min(1.0, tail / 2.0 ** (pairs - 1))


class Version:
    """A process with a version of the package and a model.

    Args:
        python: The interpreter that has the package.
        settings: The model's folder, followed by "section.key=value" overrides.
    """

    def __init__(self, python: str, settings: Sequence[str]) -> None:
        self._python = python
        command = [python, str(Path(__file__).resolve()), *settings]
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def measure(self, test: str) -> float:
        """Run a test and return its tokens per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{test}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                rate: float = json.loads(line)["rate"]
                return rate
        raise RuntimeError(f"the process of {self._python} ended with code {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _work(folder: str, *settings: str) -> None:
    """Run the test that each line of standard input names, and print its rate."""
    import numpy as np
    from llm_serving.config import load_config
    from llm_serving.core.sampling_params import SamplingParams
    from llm_serving.offline import LLM

    llm = LLM(load_config(None, settings, Path(folder)))
    numbers = np.random.default_rng(0)

    def run(count: int, prompt_len: int, output_len: int) -> list[float]:
        """Return the start time followed by the time of each token."""
        prompts = numbers.integers(3, llm.model_spec.vocab_size, (count, prompt_len)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        return [time.perf_counter()] + [time.perf_counter() for _ in llm.stream(prompts, params)]

    for line in sys.stdin:
        match line.strip():
            case "A":
                _, first, *_, last = run(1, PROMPT_LEN, OUTPUT_LEN)
                rate = (OUTPUT_LEN - 1) / (last - first)
            case "C":
                first, *_, last = run(1, LONG_PROMPT_LEN, 1)
                rate = LONG_PROMPT_LEN / (last - first)
            case batch:
                first, *_, last = run(int(batch[1:]), PROMPT_LEN, BATCH_OUTPUT_LEN)
                rate = int(batch[1:]) * BATCH_OUTPUT_LEN / (last - first)
        print(json.dumps({"rate": rate}), flush=True)


def _tests(text: str) -> list[str]:
    tests = text.split(",")
    if not all(re.fullmatch("A|B[1-9][0-9]*|C", test) for test in tests):
        raise argparse.ArgumentTypeError(f"must be A, C or B with a number of requests, such as A,B32,C. Given: {text}")
    return tests


def _pairs(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be an integer >= 2. Given: {text}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", default=sys.executable, metavar="PYTHON", help="interpreter of the other version")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder, or `demo`")
    parser.add_argument("--tests", type=_tests, default=["A", "B32", "B128", "C"], metavar="A,B32,C")
    parser.add_argument("--pairs", type=_pairs, default=15, help="measured pairs, at least 2 for the quartiles")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantization", default="", metavar="FORMAT", help="as in the YAML, where both know it")
    parser.add_argument("--num-blocks", type=int, default=2304, help="blocks of 16 tokens in the cache")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for both")
    parser.add_argument(
        "--other-set", action="append", default=[], metavar="KEY=VALUE", help="override for the other one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":  # the process of one version, started by `run.py versions`
    _work(*sys.argv[1:])
