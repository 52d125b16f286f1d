"""Perplexity and greedy tokens of each weight and KV cache format compared with float32.

    python performance/run.py perplexity --model FILE_OR_FOLDER [--formats bfloat16,w8a8+kv8] [--tokens 3000]

The texts are English prose and Python code of the standard library, the licence of this repository, and a Chinese
text of this folder, in windows of at most 1,024 tokens. float32 is the network in float32, with the weights of a GGUF
file dequantised, or with those of `--reference`, which for a quantised folder is the model before it was quantised.
`stored` serves a GGUF file in its own blocks, `bfloat16` dequantises it, `bfloat16+kv8` has an int8 KV cache as well.
The table has for each format:

- perplexity, and how much larger it is than in float32, with the standard error of this difference over the tokens;
- the share of float32's greedy tokens that the format chooses too, after the same tokens: 30 answers of 64 tokens;
- the same share over all texts, where both choose the token that follows each token of a text;
- the mean and the largest difference between the log-probability of a text's token and that in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import inspect
import json
import math
import pydoc_data.topics
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from benchmarks.accuracy import formats, load_format
from llm_serving.core.request_output import PromptLogprobs
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.offline import LLM
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 1024
NUM_BLOCKS = 2048
NUM_PROMPTS = 30
PROMPT_TOKENS = 64
ANSWER_TOKENS = 64
DEFAULT = "bfloat16,stored,w8a8,w8a16,w4a16,w4a8,bfloat16+kv8"


@dataclass(frozen=True)
class Scores:
    """What one format computes for the windows and for float32's answers.

    Attributes:
        logprobs: Log-probability of each token of the windows after the first, float64.
        top: Most likely token in the place of each of them.
        agreed: For each token of the answers, whether the format chooses it.
    """

    logprobs: NDArray[np.float64]
    top: NDArray[np.int32]
    agreed: NDArray[np.bool_]

    @property
    def perplexity(self) -> float:
        return math.exp(-float(self.logprobs.mean()))


@dataclass(frozen=True)
class Row:
    """One line of the table, compared with float32; shares are between 0 and 1."""

    perplexity: float
    increase: float
    standard_error: float
    greedy: float
    top: float
    mean_error: float
    largest_error: float

    @classmethod
    def of(cls, scores: Scores, reference: Scores) -> Row:
        losses = reference.logprobs - scores.logprobs
        errors = np.abs(losses)
        return cls(
            scores.perplexity,
            scores.perplexity / reference.perplexity - 1,
            float(losses.std()) / math.sqrt(len(losses)),
            float(scores.agreed.mean()),
            float((scores.top == reference.top).mean()),
            float(errors.mean()),
            float(errors.max()),
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    compared = argparse.Namespace(**{**vars(arguments), "model": arguments.reference or arguments.model})
    reference = load_format(compared, "float32", NUM_BLOCKS)
    texts = text_set()
    windows = cut(reference.tokenizer, texts.values(), arguments.tokens, min(WINDOW, _max_tokens(reference)))
    print(f"{arguments.model.name}: {sum(map(len, windows)):,} tokens in {len(windows)} windows, {fingerprint(texts)}")
    prompts = prompts_of(windows)
    answers = generate(reference, prompts)
    scores = score(reference, windows, prompts, answers)
    del reference
    rows = {"float32": Row.of(scores, scores)}
    print_header()
    print_row("float32", rows["float32"])
    for name in arguments.formats:
        rows[name] = Row.of(score(load_format(arguments, name, NUM_BLOCKS), windows, prompts, answers), scores)
        print_row(name, rows[name])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}, indent=2) + "\n")
    return 0


def text_set() -> dict[str, str]:
    """Return the texts by name."""
    topics = pydoc_data.topics.topics
    code = [inspect.getsource(module) for module in (heapq, textwrap, statistics)]
    chinese = ROOT / "performance" / "texts" / "chinese.txt"
    return {
        "prose": "".join(topics[name] for name in sorted(topics)),
        "code": "".join(code),
        "licence": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "chinese": chinese.read_text(encoding="utf-8"),
    }


def fingerprint(texts: dict[str, str]) -> str:
    """Return a short hash of the texts: figures of different texts cannot be compared."""
    return f"texts {hashlib.sha256(''.join(texts.values()).encode()).hexdigest()[:12]}"


def cut(tokenizer: Tokenizer, texts: Iterable[str], tokens: int, window: int) -> list[list[int]]:
    """Cut texts into windows of equal length, `tokens` in all or somewhat more, each text giving windows in turn.

    Each window begins with the tokens that the model expects at the beginning.
    """
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    begin = tokenizer.encode("")
    length = max(2, min(window, -(-tokens // len(plain))) - len(begin))
    windows: list[list[int]] = []
    for start in range(0, max(map(len, plain)), length):
        for ids in plain:
            if sum(map(len, windows)) < tokens and len(ids) - start >= min(length, 256):
                windows.append([*begin, *ids[start : start + length]])
    return windows


def prompts_of(windows: Sequence[list[int]]) -> list[list[int]]:
    """Return `NUM_PROMPTS` pieces of the windows, spread evenly."""
    starts = [(window, at) for window in windows for at in range(0, len(window) - PROMPT_TOKENS + 1, PROMPT_TOKENS)]
    chosen = [starts[i * len(starts) // NUM_PROMPTS] for i in range(NUM_PROMPTS)]
    return [window[at : at + PROMPT_TOKENS] for window, at in chosen]


def generate(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the greedy answers."""
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts, greedy)]


def score(llm: LLM, windows: Sequence[list[int]], prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Scores:
    """Compute the windows and the prompts with their answers."""
    of_windows = _logprobs(llm, windows)
    of_answers = _logprobs(llm, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    agreed = [each.ranks[-len(answer) :] == 1 for each, answer in zip(of_answers, answers, strict=True)]
    return Scores(
        np.concatenate([each.logprobs for each in of_windows]).astype(np.float64),
        np.concatenate([each.top_token_ids[:, 0] for each in of_windows]),
        np.concatenate(agreed),
    )


def _logprobs(llm: LLM, prompts: Sequence[list[int]]) -> list[PromptLogprobs]:
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    found = [output.prompt_logprobs for output in llm.generate(prompts, scored)]
    return [each for each in found if each is not None]


def print_header() -> None:
    print("| format | perplexity | vs float32 | greedy tokens equal | top tokens equal | mean error | largest error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")


def print_row(name: str, row: Row) -> None:
    increase = "" if name == "float32" else f"{100 * row.increase:+.2f} ± {100 * row.standard_error:.2f} %"
    shares = f"{100 * row.greedy:.1f} % | {100 * row.top:.1f} %"
    print(f"| {name} | {row.perplexity:.4f} | {increase} | {shares} | {row.mean_error:.4f} | {row.largest_error:.3f} |")


def _max_tokens(llm: LLM) -> int:
    return llm.config.model.max_generate_length - 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"), metavar="FILE_OR_FOLDER")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="model of the row float32, for example before quantisation; default: --model",
    )
    parser.add_argument("--formats", type=formats, default=formats(DEFAULT), metavar="NAME,NAME,...")
    parser.add_argument("--tokens", type=int, default=20_000, metavar="N", help="of the texts; 3000 for a first look")
    parser.add_argument("--group-size", type=int, default=128, metavar="32|64|128", help="of weights of 4 bits")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)
