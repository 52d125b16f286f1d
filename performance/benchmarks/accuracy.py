"""Accuracy and perplexity of each weight and KV cache format.

    python performance/run.py accuracy [--formats bfloat16,w8a8,kv8] [--model FOLDER]

`kv8` is an int8 KV cache, `w8a8+kv8` an int8 KV cache with W8A8 weights. For each format: the exact-match rate of a set
of questions, by task and in total (greedy decoding, no chat template), and the perplexity of all questions followed by
their reference answers, over the model's own tokens. `--model demo` is the shipped model with its 408 held-out
questions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import QuantizationName
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM
from load_test.workload import DEMO_QUESTIONS, Prompt, load

_QUANTIZATION = "quant_config.quantization"
KEYS = {
    "stored": (f"{_QUANTIZATION}=null",),
    **{name: (f"model_config.model_dtype={name}", f"{_QUANTIZATION}=dequantized") for name in MODEL_DTYPES},
    **{name.value: (f"{_QUANTIZATION}={name}",) for name in QuantizationName},
    "kv8": ("quant_config.kv_cache_dtype=int8",),
}
"""Name of a format -> its configuration overrides. `stored`: the blocks of a GGUF file."""

NUM_BLOCKS = 4096


class Accuracy(NamedTuple):
    """Result of one format: exact answers by task, and exp of the mean negative log-probability of a token."""

    right: Counter[str]
    perplexity: float


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    prompts = load(arguments.dataset)
    tasks = Counter(prompt.task for prompt in prompts)
    found = {name: measure(load_format(arguments, name, NUM_BLOCKS), prompts) for name in arguments.formats}
    print(f"{'task':22} {'questions':>9}" + "".join(f"{name:>12}" for name in found))
    for task, count in sorted(tasks.items()):
        print(f"{task:22} {count:9}" + "".join(f"{each.right[task]:12}" for each in found.values()))
    rights = [each.right.total() for each in found.values()]
    print(f"{'all':22} {len(prompts):9}" + "".join(f"{right:12}" for right in rights))
    print(f"{'right, %':32}" + "".join(f"{100 * right / len(prompts):12.2f}" for right in rights))
    print(f"{'perplexity':32}" + "".join(f"{each.perplexity:12.5f}" for each in found.values()))
    if arguments.json is not None:
        figures = {name: {"right": each.right, "perplexity": each.perplexity} for name, each in found.items()}
        arguments.json.write_text(json.dumps({"questions": tasks, "formats": figures}, indent=2) + "\n")
    return 0


def measure(llm: LLM, prompts: Sequence[Prompt]) -> Accuracy:
    """Answer all questions and score them with their reference answers."""
    lengths = [len(llm.tokenizer.encode(prompt.reference)) + 8 for prompt in prompts]
    asked = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    answers = llm.generate([prompt.text for prompt in prompts], asked)
    pairs = zip(prompts, answers, strict=True)
    right = Counter(prompt.task for prompt, answer in pairs if answer.text.strip() == prompt.reference)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([f"{prompt.text} {prompt.reference}" for prompt in prompts], scored)
    logprobs = [each.prompt_logprobs.logprobs for each in outputs if each.prompt_logprobs is not None]
    return Accuracy(right, math.exp(-float(np.concatenate(logprobs).astype(np.float64).mean())))


def load_format(arguments: argparse.Namespace, name: str, num_blocks: int) -> LLM:
    """Load the model of the command line in a format, with so many blocks in its KV cache."""
    kept = [key for part in name.split("+") for key in KEYS[part]]
    group = f"quant_config.group_size={arguments.group_size}"
    return LLM(load_config(None, [*kept, group, f"pa_config.num_blocks={num_blocks}", *arguments.set], arguments.model))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"), metavar="FOLDER")
    parser.add_argument(
        "--formats", type=formats, default=("bfloat16", *QuantizationName, "kv8"), metavar="NAME,NAME,..."
    )
    parser.add_argument("--group-size", type=int, default=128, metavar="32|64|128", help="of weights of 4 bits")
    parser.add_argument("--dataset", type=Path, default=DEMO_QUESTIONS, metavar="FILE", help="a prompt set with tasks")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def formats(text: str) -> tuple[str, ...]:
    """Read names of formats, separated by commas.

    Raises:
        ArgumentTypeError: A format is unknown.
    """
    names = tuple(text.split(","))
    if unknown := [part for name in names for part in name.split("+") if part not in KEYS]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(KEYS)}, joined by +. Given: {', '.join(unknown)}")
    return names
