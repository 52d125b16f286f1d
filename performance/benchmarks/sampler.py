"""Speed of sampling alone, in NumPy and by the operator library.

    python performance/run.py sampler [--rows 1,128] [--vocab-size 32000]

For each kind of sampling and number of rows: microseconds from logits to a step's output. Logits are drawn from a
normal distribution with a standard deviation of 2.5.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.machine_limits import least_seconds
from llm_serving.core.step import SamplingInput
from llm_serving.kernels import library
from llm_serving.worker import sampling_reference
from llm_serving.worker.sampler import LibrarySampler, sample

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1},
    "min_p=0.05": {"temperature": 1, "min_p": 0.05},
    "top_p=0.95": {"temperature": 1, "top_p": 0.95},
    "top_k=50 top_p=0.95": {"temperature": 1, "top_k": 50, "top_p": 0.95},
    "penalties, history 512": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "history": 512},
    "logprobs=5": {"num_logprobs": 5},
}
SECONDS_PER_FIGURE = 0.5
NO_TOKENS = np.empty(0, np.int32)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    kernels = library.load()
    print(f"{kernels.llm_isa().decode()}, {kernels.llm_num_threads()} threads, vocabulary {arguments.vocab_size}")
    print(f"{'':24} {'rows':>5} {'NumPy us':>10} {'library us':>10}")
    figures = []
    for num_rows in arguments.rows:
        logits = np.random.default_rng(0).normal(scale=2.5, size=(num_rows, arguments.vocab_size)).astype(np.float32)
        for kind, parameters in KINDS.items():
            sampling = _sampling_input(num_rows, arguments.vocab_size, **parameters)
            seconds = [
                least_seconds(partial(sample, 0, logits, sampling, NO_TOKENS, choose), SECONDS_PER_FIGURE)
                for choose in (sampling_reference.choose_tokens, LibrarySampler())
            ]
            print(f"{kind:24} {num_rows:5} {1e6 * seconds[0]:10,.0f} {1e6 * seconds[1]:10,.0f}", flush=True)
            figures.append({"kind": kind, "rows": num_rows, "numpy": seconds[0], "library": seconds[1]})
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _sampling_input(num_rows: int, vocab_size: int, history: int = 0, **fields: float) -> SamplingInput:
    """Return the same parameters for every row; half of a history is prompt."""

    def each(name: str, dtype: Any, default: float = 0) -> Any:
        return np.full(num_rows, fields.get(name, default), dtype)

    rng = np.random.default_rng(1)
    return SamplingInput(
        temperature=each("temperature", np.float32),
        top_k=each("top_k", np.int32),
        top_p=each("top_p", np.float32, 1),
        min_p=each("min_p", np.float32),
        typical_p=each("typical_p", np.float32, 1),
        repetition_penalty=each("repetition_penalty", np.float32, 1),
        presence_penalty=each("presence_penalty", np.float32),
        frequency_penalty=each("frequency_penalty", np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
        position=each("position", np.int32),
        num_logprobs=each("num_logprobs", np.int32, -1),
        history_offsets=np.arange(num_rows + 1, dtype=np.int32) * np.int32(history),
        history_token_ids=rng.integers(0, vocab_size, num_rows * history).astype(np.int32),
        history_prompt_lens=np.full(num_rows, history // 2, np.int32),
        bias_offsets=np.zeros(num_rows + 1, np.int32),
        bias_token_ids=NO_TOKENS,
        bias_values=np.empty(0, np.float32),
        allowed_offsets=np.zeros(num_rows + 1, np.int32),
        allowed_words=NO_TOKENS,
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_integers, default=(1, 128), metavar="S,S,...")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
