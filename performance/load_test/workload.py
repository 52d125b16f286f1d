"""Prompt sets in alpaca form (a JSON list of `{instruction, input, output[, task]}`), read from files or generated.

The generated set has lengths like alpaca's: instructions of about ten words, two in five with an input, and outputs
around forty words, up to about five hundred tokens. Lengths are log-normal with these medians.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_QUESTIONS = Path(__file__).resolve().parents[2] / "llm-serving/llm_serving/demo_model/questions.json"
DEFAULT_MAX_TOKENS = 300


class DatasetError(Exception):
    """A prompt set cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        reference: A reference answer, which gives the length to generate. May be empty.
        task: The kind of question, if `reference` is the only right answer; else empty.
    """

    text: str
    reference: str = ""
    task: str = ""

    @property
    def expected(self) -> str | None:
        return self.reference if self.task else None


def load(path: Path) -> list[Prompt]:
    """Read a prompt set.

    Raises:
        DatasetError: No such file, or not a prompt set.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(
            f"cannot read the prompt set {path}: {error.strerror}. `--dataset alpaca-like` generates one."
        ) from error
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from error
    return parse(items, str(path))


def parse(items: Any, source: str) -> list[Prompt]:
    """Parse a decoded prompt set; `source` names it in errors.

    Raises:
        DatasetError: Not a prompt set.
    """
    if not isinstance(items, list) or not items:
        raise DatasetError(f"{source} must hold a list of at least one prompt")
    return [_prompt(item, f"{source}, item {number}") for number, item in enumerate(items)]


def _prompt(item: Any, where: str) -> Prompt:
    if not isinstance(item, dict):
        raise DatasetError(f"{where} must be an object with `instruction`. Given: {str(item)[:80]}")
    fields = {name: item.get(name, "") for name in ("instruction", "input", "output", "task")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise DatasetError(f"{where}: `{name}` must be a string. Given: {str(value)[:80]}")
    text = f"{fields['instruction']} {fields['input']}".strip()
    if not text:
        raise DatasetError(f"{where}: `instruction` and `input` must not both be empty")
    return Prompt(text, fields["output"], fields["task"])


def choose(prompts: Sequence[Prompt], num_prompts: int, seed: int) -> list[Prompt]:
    """Draw prompts in a seeded order; a prompt is repeated only after all others were drawn."""
    rng = random.Random(seed)
    chosen: list[Prompt] = []
    while len(chosen) < num_prompts:
        chosen += rng.sample(prompts, len(prompts))
    return chosen[:num_prompts]


def max_tokens(prompt: Prompt, num_reference_tokens: int | None) -> int:
    """Return the number of tokens to ask for.

    Args:
        prompt: The prompt, with or without a reference.
        num_reference_tokens: Tokens of `prompt.reference`; None if unknown.

    Returns:
        The length of the reference, and one more for a right answer, because its end token must fit too. If the length
        in tokens is unknown: the bytes of a right answer, which must not be cut off, and 1.3 tokens a word of any other
        reference. Without a reference, the default of the routes.
    """
    if not prompt.reference:
        return DEFAULT_MAX_TOKENS
    if num_reference_tokens is not None:
        return max(1, num_reference_tokens + bool(prompt.task))
    if prompt.task:
        return len(prompt.reference.encode()) + 2
    return 8 + round(1.3 * len(prompt.reference.split()))


_OPENINGS = "Describe Explain Compare List Summarize Rewrite Classify Suggest Name Translate Outline Discuss".split()
_WORDS = (
    "the a of and to in for with on is that it as are from by an be this which more can used other time people water "
    "world system number small large new different between about many each how why what when where main important "
    "following given sentence story example reason method energy plant animal music city country language school "
    "computer data health food market history light sound river mountain ocean weather machine garden letter color "
    "simple common best early modern natural public local short three five process result change growth power work"
).split()


def generate_alpaca_like(num_prompts: int, seed: int) -> list[dict[str, str]]:
    """Return `{instruction, input, output}` items."""
    rng = random.Random(seed)
    return [_item(rng) for _ in range(num_prompts)]


def _item(rng: random.Random) -> dict[str, str]:
    instruction = f"{rng.choice(_OPENINGS)} {_words(rng, 9, 0.35, 3, 40)}."
    has_input = rng.random() < 0.4
    return {
        "instruction": instruction,
        "input": _words(rng, 12, 0.8, 2, 120) if has_input else "",
        "output": _words(rng, 36, 0.95, 1, 380) + ".",
    }


def _words(rng: random.Random, median: float, sigma: float, shortest: int, longest: int) -> str:
    length = round(rng.lognormvariate(math.log(median), sigma))
    return " ".join(rng.choices(_WORDS, k=min(max(length, shortest), longest)))
