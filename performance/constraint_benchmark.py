"""Cost of constraints: .venv/bin/python performance/constraint_benchmark.py [--rows 32,128] [--model FOLDER]

For each form and number of rows: microseconds a row to find the allowed tokens, over the tokens of a model, and, with
`--steps`, milliseconds a token of the whole engine beside the same rows without a form. Rows say what a random model
would. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.constraint import Walk
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.models.spec import ModelSpec
from llm_serving.offline import LLM
from llm_serving.text.constraints import ConstraintCompiler, Grammar
from llm_serving.text.constraints.grammars import any_grammar, json_grammar, regex_grammar
from llm_serving.text.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "size": {"type": "number"},
        "parts": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
    },
    "required": ["name", "tags", "size", "parts"],
    "additionalProperties": False,
}
FORMS = {
    "any text": regex_grammar("(?s:.)*"),
    "any JSON object": json_grammar('{"type": "object"}'),
    "JSON of a schema": json_grammar(json.dumps(RECORD)),
    "arithmetic": any_grammar('start: sum\nsum: sum "+" N | sum "*" "(" sum ")" | N\nN: /[0-9]{1,6}/'),
}
NUM_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    folder = arguments.model or load_config(None, [], Path("demo")).model.model_path
    assert folder is not None
    tokenizer, spec = Tokenizer.load(folder), ModelSpec.from_folder(folder)
    compiler = ConstraintCompiler(tokenizer, frozenset(tokenizer.eos_token_ids), spec.vocab_size)
    print(f"{tokenizer.vocab_size} tokens; {NUM_TOKENS} of each row")
    print(f"{'':20} {'rows':>5} {'compiled, ms':>13} {'mask, us a row':>15} {'p99':>8}")
    for name, grammar in FORMS.items():
        began = time.perf_counter()
        constraint = compiler.compiled(grammar)
        compiled_s = time.perf_counter() - began
        for num_rows in arguments.rows:
            walks = [constraint.begin() for _ in range(num_rows)]
            seconds = _mask_seconds(walks, tokenizer.eos_token_ids[0])
            us = 1e6 * np.array(seconds)
            print(
                f"{name:20} {num_rows:5} {1e3 * compiled_s:13.1f} {us.mean():15.1f} {np.percentile(us, 99):8.1f}",
                flush=True,
            )
    if arguments.steps:
        _measure_steps(folder, arguments.rows)
    return 0


def _mask_seconds(walks: Sequence[Walk], end_id: int) -> list[float]:
    """Of each mask, all rows in turns as in steps; a row that comes to its end begins again."""
    choice = random.Random(0).choice
    outputs: list[list[int]] = [[] for _ in walks]
    seconds: list[float] = []
    for _ in range(NUM_TOKENS):
        for walk, output in zip(walks, outputs, strict=True):
            began = time.perf_counter()
            words = walk.allowed_words(output)
            seconds.append(time.perf_counter() - began)
            token_id = choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
            if token_id == end_id:
                output.clear()
            else:
                output.append(token_id)
    return seconds


def _measure_steps(folder: Path, all_rows: Sequence[int]) -> None:
    print(f"\n{'':20} {'rows':>5} {'ms a step':>10} {'tokens/s':>10}")
    for num_rows in all_rows:
        llm = LLM(load_config(None, [f"model_config.decode_batch_size={num_rows}"], folder))
        for name, grammar in {"none": None, **FORMS}.items():
            seconds, num_tokens = _step_seconds(llm, num_rows, grammar)
            print(
                f"{name:20} {num_rows:5} {1e3 * seconds / NUM_TOKENS:10.2f} {num_tokens / seconds:10,.0f}", flush=True
            )


def _step_seconds(llm: LLM, num_rows: int, grammar: Grammar | None) -> tuple[float, int]:
    constraint = None if grammar is None else grammar.text
    samplings = [
        SamplingParams(max_tokens=NUM_TOKENS, seed=row, ignore_eos=grammar is None, constraint=constraint)
        for row in range(num_rows)
    ]
    prompts = [[row % 100 + 10] for row in range(num_rows)]
    llm.generate(prompts, samplings)
    began = time.perf_counter()
    outputs = llm.generate(prompts, samplings)
    return time.perf_counter() - began, sum(each.num_output_tokens for each in outputs)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_integers, default=(32, 128), metavar="R,R,...")
    parser.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    parser.add_argument("--steps", action="store_true", help="run the model, too")
    return parser.parse_args(argv)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
