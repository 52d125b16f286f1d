"""Check many schemas of mixed shapes: every complete answer must be JSON that fits its schema.

    .venv/bin/python tests/tools/grammar_cases.py --schemas 1000    # a random model, under load and preemption
    .venv/bin/python tests/tools/grammar_cases.py --schemas 1000 --model demo    # the shipped model

The exit code is 1 if an answer breaks its schema or ends with an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.scheduler import PreemptionMode
from llm_serving.text.structured_output import Grammar, GrammarError
from llm_serving.text.structured_output.grammars import json_grammar
from support.engine_harness import Harness
from support.fake_constraints import END, constraint_of, text_of
from support.fake_runner import SamplingRunner
from support.schemas import Schema, fault_of, random_schema

MAX_TOKENS = 160
AT_ONCE = 50


class Answered(NamedTuple):
    schema: Schema
    text: str
    finish_reason: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000, help="number of schemas")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schema")
    parser.add_argument("--model", choices=("random", "demo"), default="random", help="model that answers")
    options = parser.parse_args(arguments)
    answer = random_answers if options.model == "random" else demo_answers
    counts, faults = checked(answer(random_schema(options.seed + i) for i in range(options.schemas)))
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))  # noqa: T201
    for fault in faults:
        print(fault)  # noqa: T201
    return 1 if faults else 0


def checked(answers: Iterable[Answered]) -> tuple[Counter[str], list[str]]:
    """Return how many answers ended for each reason, and the answers that break their schemas."""
    counts, faults = Counter[str](), list[str]()
    for schema, text, reason in answers:
        counts[reason] += 1
        fault = fault_of(schema, text) if reason == "stop" else None if reason in ("length", "not compiled") else reason
        if fault is not None:
            faults.append(f"{json.dumps(schema)}: {text!r}: {fault}")
    return counts, faults


def random_answers(schemas: Iterable[Schema]) -> Iterator[Answered]:
    """Return answers of a random model, many at once in a small KV cache, so that most requests are preempted."""
    yield from _in_groups(schemas, _random_group)


def _random_group(schemas: Sequence[Schema], grammars: Sequence[Grammar]) -> Iterator[Answered]:
    harness = Harness(
        runner=SamplingRunner,
        num_blocks=48,
        num_swap_blocks=16,
        swap_block_cost_tokens=2.0,
        preemption_mode=PreemptionMode.AUTO,
    )
    requests = [
        Request(
            f"schema-{i}",
            [100, 101, 102],
            SamplingParams(max_tokens=MAX_TOKENS, seed=i, constraint=grammar.text),
            stop_token_ids=frozenset({END}),
            constraint=constraint_of(grammar),
        )
        for i, grammar in enumerate(grammars)
    ]
    for request in requests:
        harness.engine.submit(request)
    harness.run(max_steps=10**6)
    for schema, request in zip(schemas, requests, strict=True):
        reason = harness.last(request.request_id).finish_reason
        yield Answered(schema, text_of(harness.token_ids(request.request_id)), str(reason))


def demo_answers(schemas: Iterable[Schema]) -> Iterator[Answered]:
    """Return sampled answers of the shipped model."""
    from llm_serving.config import load_config
    from llm_serving.offline import LLM

    llm = LLM(load_config(None, ["pa_config.num_blocks=512"], Path("demo")))

    def group(schemas: Sequence[Schema], grammars: Sequence[Grammar]) -> Iterator[Answered]:
        samplings = [
            SamplingParams(max_tokens=MAX_TOKENS, seed=i, constraint=grammar.text) for i, grammar in enumerate(grammars)
        ]
        prompts = [f"Add {i} and 25." for i in range(len(schemas))]
        for schema, output in zip(schemas, llm.generate(prompts, samplings), strict=True):
            yield Answered(schema, output.text, str(output.finish_reason))

    yield from _in_groups(schemas, group)


def _in_groups(
    schemas: Iterable[Schema], answer: Callable[[Sequence[Schema], Sequence[Grammar]], Iterator[Answered]]
) -> Iterator[Answered]:
    some: list[tuple[Schema, Grammar]] = []
    for schema in schemas:
        grammar = json_grammar(json.dumps(schema), whitespace=" ")
        try:
            constraint_of(grammar)
        except GrammarError:  # for example two alternatives that cannot be distinguished
            yield Answered(schema, "", "not compiled")
            continue
        some.append((schema, grammar))
        if len(some) == AT_ONCE:
            yield from answer(*zip(*some, strict=True))
            some = []
    if some:
        yield from answer(*zip(*some, strict=True))


if __name__ == "__main__":
    sys.exit(main())
