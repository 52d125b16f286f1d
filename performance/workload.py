"""What is asked: prompt sets in alpaca form, a JSON list of `{instruction, input, output[, task]}`."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO_QUESTIONS = Path(__file__).resolve().parents[1] / "llm-serving/llm_serving/demo_model/questions.json"
DEFAULT_MAX_TOKENS = 300


class DatasetError(Exception):
    """A prompt set that cannot be read, and what to do about it."""


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        reference: What somebody once answered; it gives the length to generate. May be empty.
        task: The kind of question, which says that `reference` is the one right answer; empty where it is not.
    """

    text: str
    reference: str = ""
    task: str = ""

    @property
    def expected(self) -> str | None:
        return self.reference if self.task else None


def load(path: Path) -> list[Prompt]:
    """Reads a prompt set.

    Raises:
        DatasetError: No such file, or not a prompt set.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DatasetError(
            f"cannot read the prompt set {path}: {error.strerror}. "
            "`python alpaca_like.py --out FILE` makes one; `--dataset alpaca-like` takes the same without a file."
        ) from error
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from error
    return parse(items, str(path))


def parse(items: Any, source: str) -> list[Prompt]:
    """Reads a decoded prompt set; `source` names it in errors.

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
    """Draws prompts in a seeded order; no prompt comes again before all others have come."""
    rng = random.Random(seed)
    chosen: list[Prompt] = []
    while len(chosen) < num_prompts:
        chosen += rng.sample(prompts, len(prompts))
    return chosen[:num_prompts]


def max_tokens(prompt: Prompt, num_reference_tokens: int | None) -> int:
    """How many tokens to ask for.

    Args:
        prompt: The prompt, with or without a reference.
        num_reference_tokens: Tokens of `prompt.reference`, None where the server cannot tell.

    Returns:
        The length of the reference. One more for a right answer, since the token that ends it must fit too; and where
        its tokens are not known, its bytes, because a right answer must never be cut off and no tokenizer makes more.
        Other references of unknown length are taken at 1.3 tokens a word. Without a reference, the routes' default.
    """
    if not prompt.reference:
        return DEFAULT_MAX_TOKENS
    if num_reference_tokens is not None:
        return max(1, num_reference_tokens + bool(prompt.task))
    if prompt.task:
        return len(prompt.reference.encode()) + 2
    return 8 + round(1.3 * len(prompt.reference.split()))
