"""Cost of constraints: .venv/bin/python performance/constraint_benchmark.py [--rows 32,128] [--model FOLDER]

For each form and number of rows: microseconds a row to find the allowed tokens, over the tokens of a model, where rows
say what a random model would. With `--steps` tokens a second of an engine and its WorkAgent, beside the same rows
without a form, in turns; forms are lists there that do not end, so that all rows run in every step. Needs the package:
run it with its interpreter.
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
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.engine import Engine
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.text.structured_output import ConstraintCompiler, TokenConstraint
from llm_serving.text.structured_output.grammars import any_grammar, json_grammar, regex_grammar
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from load_benchmark import started

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
ENDLESS = {
    "any JSON objects": json_grammar('{"type": "array", "items": {"type": "object"}, "minItems": 100}'),
    "JSON of a schema": json_grammar(json.dumps({"type": "array", "items": RECORD, "minItems": 100})),
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
        _measure_steps(folder, arguments.rows, compiler, arguments.rounds)
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


def _measure_steps(folder: Path, all_rows: Sequence[int], compiler: ConstraintCompiler, num_rounds: int) -> None:
    """Each form beside none within a round: medians of tokens per second and of the ratio."""
    print(f"\n{'':20} {'rows':>5} {'tokens/s':>10} {'of none':>9} {'quarters':>12}")
    constraints = {name: compiler.compiled(grammar) for name, grammar in ENDLESS.items()}
    for num_rows in all_rows:
        config = load_config(None, [f"model_config.decode_batch_size={num_rows}"], folder)
        with started(config) as agent:
            executor = RemoteExecutor(agent.channel, agent.buffers)
            tokenizer = Tokenizer.load(folder)
            engine = build_engine(config, agent.loaded.num_blocks, executor, tokenizer, Metrics(), lambda pieces: None)
            rounds = [
                {
                    name: _rate(engine, num_rows, constraint)
                    for name, constraint in (("none", None), *constraints.items())
                }
                for _ in range(1 + num_rounds)
            ][1:]
        for name in rounds[0]:
            rates, ratios = zip(*((each[name], each[name] / each["none"]) for each in rounds), strict=True)
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            spread = f"{low:.2f}-{high:.2f}"
            print(f"{name:20} {num_rows:5} {np.median(rates):10,.0f} {middle:9.2f} {spread:>12}", flush=True)


def _rate(engine: Engine, num_rows: int, constraint: TokenConstraint | None) -> float:
    """Tokens per second."""
    for row in range(num_rows):
        grammar = None if constraint is None else constraint.grammar.text
        sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=row, ignore_eos=grammar is None, constraint=grammar)
        engine.submit(Request(f"row-{row}", [row % 100 + 10], sampling, constraint=constraint))
    began = time.perf_counter()
    while engine.step():
        pass
    return num_rows * NUM_TOKENS / (time.perf_counter() - began)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_integers, default=(32, 128), metavar="R,R,...")
    parser.add_argument("--model", type=Path, help="folder of a model; default: the shipped one")
    parser.add_argument("--steps", action="store_true", help="run the model, too")
    parser.add_argument("--rounds", type=int, default=5, help="of --steps (default: 5)")
    return parser.parse_args(argv)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
