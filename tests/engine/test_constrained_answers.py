"""Constraints hold in every answer, and answers under load equal the reference answers."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import WorkerDiedError
from llm_serving.scheduler import PreemptionMode
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.text.structured_output.grammars import Grammar, choice_grammar, json_grammar, regex_grammar
from support.engine_harness import Harness
from support.fake_constraints import END, constraint_of, text_of
from support.fake_runner import VOCAB_SIZE, SamplingRunner, most_likely
from support.fake_speculation import KnownAnswerDrafts
from support.fragile_harness import FragileHarness

_names = (f"constrained-{number}" for number in count())
PROMPT = [100, 101, 102]
MAX_TOKENS = 10


def greedy_tokens(**constraints: Any) -> list[int]:
    return run_alone(SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, **constraints))


def run_alone(sampling: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    harness = Harness(runner=SamplingRunner, ahead=False)
    request = create(sampling, prompt)
    harness.engine.submit(request)
    harness.run()
    return harness.token_ids(request.request_id)


def create(sampling: SamplingParams, prompt: list[int], priority: int = 0) -> Request:
    ends = frozenset() if sampling.constraint is None else frozenset({END})
    constraint = None if sampling.constraint is None else constraint_of(Grammar(sampling.constraint))
    return Request(next(_names), list(prompt), sampling, stop_token_ids=ends, priority=priority, constraint=constraint)


PLAIN = greedy_tokens()
OBJECTS = constraint_of(
    json_grammar(
        """{"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 20]}, "maxItems": 3}},
        "required": ["a"], "additionalProperties": false}""",
        whitespace=" ",
    )
)
GRAMMARS = [OBJECTS.grammar.text, choice_grammar(["on", "off"]).text, regex_grammar("[a-c]{2,9}").text]


def test_bad_word_of_one_token_is_never_sampled():
    tokens = greedy_tokens(bad_words=((PLAIN[2],),))
    assert tokens[:2] == PLAIN[:2]
    assert PLAIN[2] not in tokens
    assert tokens[2] == most_likely([*PROMPT, *PLAIN[:2]])[1]


@pytest.mark.parametrize("length", [2, 3, 5])
def test_bad_word_of_several_tokens_is_excluded_at_its_last_token(length):
    tokens = greedy_tokens(bad_words=(tuple(PLAIN[1 : 1 + length]),))
    assert tokens[:length] == PLAIN[:length]
    assert tokens[length] == most_likely([*PROMPT, *PLAIN[:length]])[1]


def test_only_allowed_tokens_are_sampled():
    allowed = (*range(40, 80), 999)
    assert set(greedy_tokens(allowed_token_ids=allowed)) <= {*allowed}
    assert greedy_tokens(allowed_token_ids=(7,)) == [7] * MAX_TOKENS
    assert greedy_tokens(allowed_token_ids=tuple(range(VOCAB_SIZE))) == PLAIN


def test_constrained_answer_matches_and_ends_with_its_constraint():
    for seed in range(8):
        tokens = run_alone(SamplingParams(max_tokens=60, seed=seed, constraint=OBJECTS.grammar.text))
        assert tokens[-1] == END
        assert {*json.loads(text_of(tokens))["a"]} <= {1, 20}


def test_truncated_constrained_answer_has_finish_reason_length():
    harness = Harness(runner=SamplingRunner)
    request = create(SamplingParams(max_tokens=3, constraint=OBJECTS.grammar.text), PROMPT)
    harness.engine.submit(request)
    harness.run()
    assert (harness.last(request.request_id).finish_reason, len(harness.token_ids(request.request_id))) == ("length", 3)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_constrained_answers_equal_the_reference_after_worker_kills(mode):
    """The WorkAgent dies at every third step with two steps in flight; a new one has no state."""
    harness = FragileHarness(
        new_runner=lambda: SamplingRunner(24, 4, 8),
        runner=SamplingRunner,
        num_blocks=24,
        num_swap_blocks=8,
        preemption_mode=mode,
        max_num_seqs=3,
    )

    def die(step):
        if harness.executor.num_collected % 3 == 0:
            raise WorkerDiedError("killed")

    harness.executor.spoil = die
    samplings = [SamplingParams(max_tokens=24, seed=seed, constraint=GRAMMARS[seed % 3]) for seed in range(6)]
    requests = [create(sampling, PROMPT) for sampling in samplings]
    harness.submit(*requests)
    harness.run()
    assert harness.executor.num_restarts > 3
    for request, sampling in zip(requests, samplings, strict=True):
        assert harness.token_ids(request.request_id) == run_alone(sampling)


@pytest.mark.parametrize("known", [True, False])
def test_drafts_save_steps_of_constrained_answers(known):
    """Drafts are correct proposals, or tokens that the grammar forces."""
    num_steps = num_tokens = 0
    for seed in range(6):
        sampling = SamplingParams(max_tokens=60, seed=seed, constraint=OBJECTS.grammar.text)
        request, answer = create(sampling, PROMPT), run_alone(sampling)
        known_drafts = KnownAnswerDrafts(random.Random(seed), {request.request_id: answer}, wrong=0.0)
        drafter = known_drafts if known else SpeculationController(8, NgramProposer(3))
        harness = Harness(runner=SamplingRunner, block_size=16, drafter=drafter, clock=lambda: 0.0)
        harness.engine.submit(request)
        harness.run()
        assert harness.token_ids(request.request_id) == answer
        num_steps += len(harness.runner.steps)
        num_tokens += len(answer)
    assert num_steps < (0.6 if known else 0.9) * num_tokens


class NeverPays(SpeculationController):
    pays = property(lambda self: False, lambda self, value: None)


def test_constrained_answer_is_not_delayed_while_drafts_have_no_gain():
    num_steps = []
    for drafter in (None, NeverPays(8, NgramProposer(3))):
        harness = Harness(runner=SamplingRunner, block_size=16, drafter=drafter)
        bound = create(SamplingParams(max_tokens=60, seed=0, constraint=OBJECTS.grammar.text), PROMPT)
        for request in (bound, *(create(SamplingParams(max_tokens=60, seed=seed), PROMPT) for seed in range(4))):
            harness.engine.submit(request)
        while not bound.is_finished:
            harness.engine.step()
        num_steps.append(len(harness.runner.steps))
        harness.run()
    assert num_steps[0] == num_steps[1]


def constraints() -> st.SearchStrategy[dict[str, Any]]:
    """Draw constraints over few tokens, so that bad words often match."""
    few = st.integers(0, 5)
    words = st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
    usual = {
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
    }
    tokens = st.fixed_dictionaries(
        {
            "allowed_token_ids": st.just((0, 1, 2, 3, 4, 5, 40)) | st.none(),
            "bad_words": words,
            **usual,
        }
    )
    return tokens | st.fixed_dictionaries({"constraint": st.sampled_from(GRAMMARS), **usual})


@settings(max_examples=60)
@given(
    load=st.lists(st.tuples(constraints(), st.integers(0, 8), st.integers(-1, 1), st.integers(1, 9)), max_size=6),
    mode=st.sampled_from(PreemptionMode),
    ahead=st.booleans(),
    draft_seed=st.none() | st.integers(0),
)
def test_constrained_answers_under_load_equal_the_reference_answers(load, mode, ahead, draft_seed):
    """Drafts, whether allowed or not, change no answer."""
    answers = {}
    harness = Harness(
        runner=SamplingRunner,
        ahead=ahead,
        drafter=None if draft_seed is None else KnownAnswerDrafts(random.Random(draft_seed), answers),
        preemption_mode=mode,
        num_blocks=10,
        num_swap_blocks=5,
        swap_block_cost_tokens=2.0,
        max_num_seqs=3,
        max_num_batched_tokens=6,
        prefix_caching=True,
    )
    requests = []
    for fields, arrival, priority, num_prompt in load:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, **fields)
        prompt = list(range(100, 100 + num_prompt))
        requests.append((arrival, create(sampling, prompt, priority)))
        answers[requests[-1][1].request_id] = run_alone(sampling, prompt)
    for step in range(10):
        for arrival, request in requests:
            if arrival == step:
                harness.engine.submit(request)
        harness.engine.step()
    harness.run()
    for _, request in requests:
        tokens, sampling = harness.token_ids(request.request_id), request.sampling
        assert tokens == answers[request.request_id]
        assert sampling.allowed_token_ids is None or set(tokens) <= {*sampling.allowed_token_ids}
        for word in sampling.bad_words:
            assert all(tuple(tokens[i : i + len(word)]) != word for i in range(len(tokens)))
