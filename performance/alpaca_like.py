"""Makes a prompt set with the lengths of alpaca's and no right answers, the same for the same seed.

    python alpaca_like.py --num-prompts 1500 --seed 1 --out prompts.json

Alpaca's instructions have about ten words, two in five come with an input, and outputs are spread widely around forty
words, up to about five hundred tokens. Lengths are drawn from log-normal distributions of these medians.
"""

import argparse
import json
import math
import random
from pathlib import Path

_OPENINGS = "Describe Explain Compare List Summarize Rewrite Classify Suggest Name Translate Outline Discuss".split()
_WORDS = (
    "the a of and to in for with on is that it as are from by an be this which more can used other time people water "
    "world system number small large new different between about many each how why what when where main important "
    "following given sentence story example reason method energy plant animal music city country language school "
    "computer data health food market history light sound river mountain ocean weather machine garden letter color "
    "simple common best early modern natural public local short three five process result change growth power work"
).split()


def generate(num_prompts: int, seed: int) -> list[dict[str, str]]:
    """Returns `{instruction, input, output}` items."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a seeded prompt set with alpaca-like lengths.")
    parser.add_argument("--num-prompts", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    items = generate(args.num_prompts, args.seed)
    args.out.write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")
    print(f"{len(items)} prompts written to {args.out}")


if __name__ == "__main__":
    main()
