"""How near every family comes to its reference, as a table: largest error of a logit, and of 24 greedy tokens how many.

    PYTHONPATH=tests .venv/bin/python -m families.precision [NAME ...] [--kernels mindformers] [--dtypes float16]

An error is given as a share of the largest logit of the prompt. `plain` is asked in a process of its own, without the
operator library, which would take the place of MindSpore's products. Needs no device and no torch; a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from families import models
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import Quantization
from support.graph_model import BLOCK_SIZE, GraphModel, backend, implementation_of
from support.without_library import cell_of, is_without_library


def served(
    name: str,
    folder: Path,
    kernels: str,
    dtype: str,
    changes: dict[str, Any] | None = None,
    quantization: Quantization | None = None,
) -> tuple[GraphModel, models.Golden, int]:
    """The model as it is served, its golden values, and the longest served context.

    Args:
        changes: Changes of its config.json; the golden values do not apply then.
        quantization: Format of the weights; likewise.
    """
    models.write(name, folder, changes=changes)
    golden = models.golden(name)
    longest = golden.served_length or max(golden.prompts) + models.NEW_TOKENS
    spec = dataclasses.replace(ModelSpec.from_folder(folder), max_position_embeddings=longest)
    made = backend("plain" if kernels == "plain" else "cpu", dtype)
    num_blocks = -(-longest // BLOCK_SIZE)
    ways = {"as_program": kernels == "program", "implementation": implementation_of(kernels)}
    model = GraphModel(spec, folder, made, num_blocks=num_blocks, quantization=quantization, **ways)
    return model, golden, longest


def greedy(model: GraphModel, prompt: models.Prompt, longest: int) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, and as many greedy tokens as fit."""
    token_ids = prompt.token_ids.tolist()
    blocks = list(range(min(-(-longest // BLOCK_SIZE), -(-(len(token_ids) + models.NEW_TOKENS) // BLOCK_SIZE))))
    logits = model.logits((token_ids, 0, blocks))
    tokens = [int(logits[-1].argmax())]
    for position in range(len(token_ids), min(len(token_ids) + models.NEW_TOKENS - 1, longest)):
        tokens.append(int(model.logits(([tokens[-1]], position, blocks))[-1].argmax()))
    return logits, tokens


def cell(name: str, kernels: str, dtype: str) -> str:
    """Largest error and equal tokens over all prompts of a model."""
    if kernels == "plain" and not is_without_library():
        return cell_of(["families.precision", name, "--kernels", kernels, "--dtypes", dtype])
    error, equal, of = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, golden, longest = served(name, Path(folder), kernels, dtype)
        except ModelError as refusal:
            return f"refused: {refusal}"
        for prompt in golden.prompts.values():
            logits, tokens = greedy(model, prompt, longest)
            error = max(
                error, float(np.abs(logits[prompt.positions] - prompt.logits).max() / np.abs(prompt.logits).max())
            )
            # Behind a token that differs everything may.
            pairs = list(zip(tokens, prompt.generated.tolist(), strict=False))
            equal += next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
            of += len(pairs)
    return f"{error:.1e}, {equal} of {of}"


def main() -> None:
    dtypes = ("float32", "bfloat16", "float16")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; default: all")
    kernels = ("program", "primitives", "plain", "mindformers", "mindformers-legacy")
    parser.add_argument("--kernels", nargs="+", default=["program"], choices=kernels)
    parser.add_argument("--dtypes", nargs="+", default=dtypes[:2], choices=dtypes)
    arguments = parser.parse_args()
    columns = [(kernels, dtype) for kernels in arguments.kernels for dtype in arguments.dtypes]
    sys.stdout.write(f"| model | {' | '.join(', '.join(column) for column in columns)} |\n")
    sys.stdout.write(f"| --- |{' --- |' * len(columns)}\n")
    for name in arguments.names or models.names():
        sys.stdout.write(f"| {name} | {' | '.join(cell(name, *column) for column in columns)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
