"""Answers with drafts are bit-identical to answers without, under any load."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.scheduler import PreemptionMode
from llm_serving.text.structured_output.grammars import json_grammar, regex_grammar
from support.engine_harness import Harness, bytes_of
from support.fake_constraints import END, constraint_of
from support.fake_runner import SamplingRunner
from support.fake_speculation import KnownAnswerDrafts

MAX_TOKENS = 14
FEW = tuple(range(8))
"""Tokens of most answers: so few that bad words, stop tokens and penalties interact."""
FORMS = [constraint_of(each) for each in (json_grammar('{"type": "object"}'), regex_grammar("[a-c ]{2,12}"))]


def draw_sampling(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice
    fields: dict[str, Any] = {
        "temperature": choice([0.0, 0.7, 1.5]),
        "top_p": choice([1.0, 0.8]),
        "seed": rng.randrange(10),
        "repetition_penalty": choice([1.0, 1.3]),
        "presence_penalty": choice([0.0, 0.5]),
        "frequency_penalty": choice([0.0, 0.5]),
        "logprobs": choice([None, 0, 2]),
        "stop": tuple(rng.sample(["5 ", "3 4 ", "7 7"], rng.choice([0, 0, 1, 2]))),
    }
    if rng.random() < 0.3:
        return fields | {"constraint": choice(FORMS).grammar.text}
    words = [tuple(rng.choices(FEW, k=rng.randint(1, 3))) for _ in range(rng.randrange(3))]
    return fields | {
        "allowed_token_ids": FEW,
        "logit_bias": tuple((token_id, rng.uniform(-2, 2)) for token_id in rng.sample(FEW, rng.randrange(3))),
        "bad_words": tuple(words),
        "min_tokens": rng.randrange(7),
        "stop_token_ids": choice([(), (6,)]),
    }


class Asked(NamedTuple):
    """A request of a random load."""

    fields: dict[str, Any]
    num_prompt: int
    priority: int
    arrival: int
    """Step."""
    num_choices: int
    """0: a beam search."""


def draw_load(rng: random.Random) -> list[Asked]:
    return [
        Asked(draw_sampling(rng), rng.randint(1, 9), rng.randint(-1, 1), rng.randrange(7), rng.choice([0, 1, 1, 2]))
        for _ in range(5)
    ]


def requests_of(place: int, asked: Asked) -> list[Request]:
    fields, priority = asked.fields, asked.priority
    prompt = list(range(100, 100 + asked.num_prompt))
    if asked.num_choices == 0:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=4)
        return [
            Request(
                f"{place}", prompt, sampling, priority=priority, beam_search=BeamSearchParams(width=2, num_returned=2)
            )
        ]
    requests = []
    for choice in range(asked.num_choices):
        sampling = SamplingParams(**{"max_tokens": MAX_TOKENS, **fields, "seed": fields["seed"] + choice})
        bound = next((each for each in FORMS if each.grammar.text == sampling.constraint), None)
        ends = frozenset({END} if bound else sampling.stop_token_ids)
        fork_of = f"{place}-0" if choice else None
        requests.append(
            Request(f"{place}-{choice}", prompt, sampling, ends, fork_of=fork_of, constraint=bound, priority=priority)
        )
    return requests


def outcomes_of(harness: Harness, requests: Iterable[Request]) -> dict[str, Any]:
    outcomes = {}
    for request in requests:
        last = harness.last(request.request_id)
        pieces = [(each.text, each.num_output_tokens) for each in harness.pieces[request.request_id]]
        answer = bytes_of(harness.answer(request.request_id))
        outcomes[request.request_id] = answer, pieces, last.finish_reason, last.stop_reason, last.error
    return outcomes


def run(requests: Iterable[Request]) -> Harness:
    harness = Harness(runner=SamplingRunner)
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    return harness


def given_without(load: list[Asked]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return the answers of a load without drafts, and the tokens that drafts may propose."""
    expected: dict[str, Any] = {}
    known: dict[str, list[int]] = {}
    for place, asked in enumerate(load):
        requests = requests_of(place, asked)
        expected |= outcomes_of(run(requests), requests)
        # No text ends these, so that drafts after a stop string are right.
        requests = requests_of(place, asked._replace(fields=asked.fields | {"stop": ()}))
        harness = run(requests)
        known |= {request.request_id: harness.token_ids(request.request_id) for request in requests}
    return expected, known


def with_drafts(rng: random.Random, known: dict[str, list[int]], ahead: bool) -> Harness:
    return Harness(
        runner=SamplingRunner,
        ahead=ahead,
        drafter=KnownAnswerDrafts(rng, known, rng.choice([0.0, 0.3])),
        preemption_mode=rng.choice([*PreemptionMode]),
        num_blocks=16,
        num_swap_blocks=6,
        swap_block_cost_tokens=2.0,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        prefix_caching=True,
    )


def submit(harness: Harness, load: list[Asked], step: int) -> list[Request]:
    """Submit the requests that arrive at a step."""
    arrived = [place for place, asked in enumerate(load) if asked.arrival == step]
    requests = [request for place in arrived for request in requests_of(place, load[place])]
    for request in requests:
        harness.engine.submit(request)
    return requests


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6])
def test_answers_with_drafts_equal_those_without(seed: int) -> None:
    rng = random.Random(seed)
    load = draw_load(rng)
    expected, known = given_without(load)
    harness = with_drafts(rng, known, ahead=rng.random() < 0.5)
    requests: list[Request] = []
    for step in range(10):
        requests += submit(harness, load, step)
        harness.engine.step()
    harness.run()
    assert outcomes_of(harness, requests) == expected
    assert sum(harness.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"].values()) > 0
    assert harness.metrics._counts["llm_serving:bound_violations_total"] == 0
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_a_request_aborted_during_verification_changes_no_other_answer() -> None:
    rng = random.Random(1)
    num_cancelled = num_compared = 0
    for _ in range(8):
        load = draw_load(rng)
        expected, known = given_without(load)
        harness = with_drafts(rng, known, ahead=True)
        requests: list[Request] = []
        cancelled: set[str] = set()
        for step in range(30):
            requests += submit(harness, load, step)
            checked = [row.request for each in harness.engine._in_flight for row in each.rows if row.num_drafts]
            if checked:
                request_id = rng.choice(checked).request_id
                harness.engine.abort(request_id)
                cancelled.add(request_id)
            harness.engine.step()
            harness.scheduler.check_integrity()
        harness.run()
        outcomes = outcomes_of(harness, [each for each in requests if each.request_id not in cancelled])
        assert outcomes == {request_id: expected[request_id] for request_id in outcomes}
        assert harness.scheduler.blocks.pool.num_used_blocks == 0
        num_cancelled += len(cancelled)
        num_compared += len(outcomes)
    assert num_cancelled >= 5 and num_compared >= 15
