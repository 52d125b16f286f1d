"""Computes golden values: `PYTHONPATH=tests python -m families.make_golden [NAME ...]`, by default for all models.

Needs torch and transformers (see reference.py), which the project does not. A prompt is taken only if every greedy
token leads the next best by `LEAD` and is no end, and every router's last expert chosen leads the first one not chosen
by `EXPERT_LEAD`: an implementation that is right in float32 then chooses the same. At least `DIFFERENT` tokens differ.
The logits kept are those of float32, and within `NOISE` of what float64 gives.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
from families import models
from families.drawn import integers
from families.reference import Reference
from safetensors.numpy import save_file

LEAD, EXPERT_LEAD, DIFFERENT, NOISE = 0.01, 2e-4, 8, 1.5e-5
FIRST_PLAIN_TOKEN = 8


def prompt_of(name: str, length: int, attempt: int) -> list[int]:
    vocabulary = models.model(name).config["vocab_size"]
    return integers(f"{name}/prompt/{length}/{attempt}", length, FIRST_PLAIN_TOKEN, vocabulary).tolist()


def answer(reference: Reference, prompt: list[int], ends: list[int]) -> tuple[models.Prompt, float, float]:
    """The prompt's golden values, and the smallest lead of a token and of an expert."""
    text, lead = list(prompt), math.inf
    for _ in range(models.NEW_TOKENS):
        last = reference.logits(text)[-1]
        second, best = np.sort(last)[-2:]
        text.append(int(last.argmax()))
        lead = min(lead, 0.0 if text[-1] in ends else best - second)
    positions = np.array(sorted({0, len(prompt) // 2, len(prompt) - 1}), np.int32)
    logits = reference.logits(text)
    generated = np.array(text[len(prompt) :], np.int32)
    prompt_values = models.Prompt(np.array(prompt, np.int32), positions, logits[positions], generated)
    return prompt_values, lead, reference.expert_lead


def make(name: str, attempts: int = 40) -> str:
    """Writes the golden values of one model; returns a line about them."""
    model = models.model(name)
    tensors: dict[str, np.ndarray] = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        reference = Reference(Path(folder), model.served_length)
        precise = Reference(Path(folder), model.served_length, "float64")
    for length in model.lengths:
        for attempt in range(attempts):
            prompt, lead, experts = answer(reference, prompt_of(name, length, attempt), model.end_token_ids)
            different = len(set(prompt.generated.tolist()))
            noise = np.abs(precise.logits(prompt.token_ids.tolist())[prompt.positions] - prompt.logits).max()
            if lead >= LEAD and experts >= EXPERT_LEAD and different >= DIFFERENT and noise <= NOISE:
                break
        else:
            raise ValueError(f"{name}: none of {attempts} prompts of {length} tokens has clear choices")
        tensors |= {f"{length}.{part}": np.ascontiguousarray(value) for part, value in vars(prompt).items()}
        lines.append(
            f"{length}: lead {lead:.3f}/{experts:.1e}, noise {noise:.0e}, {different} different, try {attempt}"
        )
    facts = {"digest": models.digest(name), "origin": reference.origin, "served_length": model.served_length}
    models.GOLDEN.mkdir(exist_ok=True)
    # One value: safetensors writes several in an order of its own each time.
    save_file(tensors, models.GOLDEN / f"{name}.safetensors", {"facts": json.dumps(facts)})
    return f"{name:18} {'; '.join(lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    for name in parser.parse_args().names or models.names():
        sys.stdout.write(make(name) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
