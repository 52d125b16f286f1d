"""Prompt log-probabilities and vectors equal the model's, are sent once, and do not depend on load or faults."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import PromptLogprobs, join_pieces
from llm_serving.core.step import ResultKind, StepInput, StepOutput
from llm_serving.errors import WorkerDiedError
from support.engine_harness import Harness
from support.factories import create_request
from support.fake_runner import FakeRunner, expected_output, most_likely, next_logprobs, vector_of
from support.fragile_harness import FragileHarness


def check_prompt_logprobs(harness: Harness, request: Request) -> None:
    """Check that log-probabilities of all prompt tokens except the first were sent, and that the output is correct."""
    answer = join_pieces(harness.pieces[request.request_id])
    assert answer.finish_reason is FinishReason.LENGTH
    prompt, count = request.prompt_token_ids, request.sampling.prompt_logprobs
    assert list(answer.token_ids) == expected_output(prompt, request.sampling.max_tokens)
    found = answer.prompt_logprobs
    if count is None or len(prompt) == 1:
        assert found is None
        return
    assert isinstance(found, PromptLogprobs)
    assert found.token_ids.tolist() == prompt[1:]
    for index in range(len(prompt) - 1):
        before = prompt[: index + 1]
        likely = most_likely(before)
        assert found.logprobs[index] == next_logprobs(before)[prompt[index + 1]]
        assert likely[found.ranks[index] - 1] == prompt[index + 1]
        assert found.top_token_ids[index].tolist() == likely[:count].tolist()
        assert found.top_logprobs[index].tolist() == next_logprobs(before)[likely[:count]].tolist()


def run(*requests: Request, **settings: object) -> Harness:
    harness = Harness(**settings)
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    for request in requests:
        check_prompt_logprobs(harness, request)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
    return harness


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [64, 5, 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_prompt_logprobs_do_not_depend_on_chunks(ahead, budget, max_tokens):
    run(create_request(11, prompt_logprobs=2, max_tokens=max_tokens), ahead=ahead, max_num_batched_tokens=budget)


def test_prompt_logprobs_are_sent_only_on_request():
    requests = [create_request(9, prompt_logprobs=0), create_request(7), create_request(1, prompt_logprobs=1)]
    harness = run(*requests)
    # Two of the seven tokens that follow one another in a step give no result.
    assert sum((step.result_tokens[:, 2] == ResultKind.LOGPROBS).sum() for step in harness.runner.steps) == 8


def test_request_without_output_tokens_finishes_with_its_prompt():
    request = create_request(9, max_tokens=0)
    harness = run(request, max_num_batched_tokens=4)
    assert harness.last(request.request_id).token_ids == ()
    assert [len(step.result_tokens) for step in harness.runner.steps] == [0, 0, 0]


def test_prefix_cache_hits_end_where_prompt_logprobs_are_missing():
    first, scored = create_request(12, max_tokens=1), create_request(12, max_tokens=1, prompt_logprobs=1)
    again = create_request(12, max_tokens=1)
    harness = Harness(prefix_caching=True)
    for request in (first, scored, again):
        harness.engine.submit(request)
        harness.run()
        check_prompt_logprobs(harness, request)
    cached = [harness.last(each.request_id).num_cached_tokens for each in (first, scored, again)]
    assert cached == [0, 0, 8]


def test_preempted_prompt_sends_no_prompt_logprobs_twice():
    """Two prompts need more blocks than there are; the preempted one reuses cached blocks whose results were sent."""
    low = create_request(24, max_tokens=8, prompt_logprobs=1, priority=1)
    low.prompt_token_ids[0] = 7
    high = create_request(24, max_tokens=8, priority=-1)
    harness = Harness(num_blocks=9, prefix_caching=True, max_num_batched_tokens=8, ahead=True)
    harness.engine.submit(low)
    for _ in range(5):
        harness.engine.step()
    harness.engine.submit(high)
    harness.run()
    assert low.num_preemptions > 0
    for request in (low, high):
        check_prompt_logprobs(harness, request)


class TestVectors:
    def test_vector_is_the_hidden_state_of_the_last_prompt_token(self):
        requests = [wanting_vector(9), wanting_vector(6), wanting_vector(14)]
        harness = run(*requests, max_num_batched_tokens=10)
        for request in requests:
            vector = harness.last(request.request_id).vector
            assert vector is not None
            assert vector.tolist() == vector_of(request.prompt_token_ids).tolist()

    def test_vector_is_unchanged_by_prefix_cache_hits(self):
        harness = Harness(prefix_caching=True)
        for _ in range(2):
            request = wanting_vector(9)
            harness.engine.submit(request)
            harness.run()
        last = harness.last(request.request_id)
        assert last.num_cached_tokens == 8
        assert last.vector is not None
        assert last.vector.tolist() == vector_of(request.prompt_token_ids).tolist()

    def test_vector_may_be_combined_with_logprobs_and_output_tokens(self):
        request = wanting_vector(9, max_tokens=2, prompt_logprobs=1)
        harness = run(request, max_num_batched_tokens=4)
        vector = next(piece.vector for piece in harness.pieces[request.request_id] if piece.vector is not None)
        assert vector.tolist() == vector_of(request.prompt_token_ids).tolist()

    def test_vector_is_unchanged_by_recomputation(self):
        """After the recomputation, the row that completes the prompt continues with output tokens."""
        request, high = wanting_vector(8, max_tokens=16), create_request(24, max_tokens=8, priority=-1)
        high.prompt_token_ids[0] = 7
        harness = Harness(num_blocks=9, max_num_batched_tokens=40, ahead=True)
        harness.engine.submit(request)
        for _ in range(10):
            harness.engine.step()
        harness.engine.submit(high)
        harness.run()
        assert request.num_preemptions > 0
        vector = harness.answer(request.request_id).vector
        assert vector.tolist() == vector_of(request.prompt_token_ids).tolist()


def wanting_vector(num_prompt_tokens: int, max_tokens: int = 0, **sampling: int) -> Request:
    request = create_request(num_prompt_tokens, max_tokens=max_tokens, **sampling)
    request.wants_vector = True
    return request


class _Spoilt(FakeRunner):
    """A model runner that fails to produce one result of a kind in each step that has one."""

    kind = ResultKind.LOGPROBS

    def execute(self, step: StepInput) -> StepOutput:
        output = super().execute(step)
        for index in np.flatnonzero(step.result_tokens[:, 2] == self.kind).tolist()[-1:]:
            output.row_errors[index] = "not a number"
        return output


class _WithoutVectors(_Spoilt):
    kind = ResultKind.VECTOR


@pytest.mark.parametrize("runner", [_Spoilt, _WithoutVectors])
def test_missing_prompt_result_ends_only_its_own_request(runner):
    fine = [create_request(6, max_tokens=3), create_request(9, prompt_logprobs=1, max_tokens=2)]
    spoilt = wanting_vector(9, prompt_logprobs=1)  # the last row of its step
    if runner is _Spoilt:
        fine = fine[:1]
    harness = Harness(runner=runner)
    for request in (*fine, spoilt):
        harness.engine.submit(request)
    harness.run()
    for request in fine:
        check_prompt_logprobs(harness, request)
    last = harness.last(spoilt.request_id)
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "not a number")


@pytest.mark.parametrize("seed", range(8))
def test_prompt_results_do_not_depend_on_load_or_lost_steps(seed):
    rng = random.Random(seed)
    harness = FragileHarness(
        num_blocks=rng.randint(14, 24),
        block_size=rng.choice([2, 4]),
        prefix_caching=rng.random() < 0.7,
        num_swap_blocks=rng.choice([0, 20]),
        preemption_mode=rng.choice(["recompute", "auto"]),
        max_num_batched_tokens=rng.choice([3, 7, 30]),
        max_num_seqs=rng.randint(2, 5),
    )

    def die(step: StepInput) -> None:
        if rng.random() < 0.08:
            raise WorkerDiedError("killed")

    harness.executor.spoil = die
    requests = []
    for _ in range(8):
        asked = rng.choice([None, 0, 2])
        request = create_request(
            rng.randint(1, 20), max_tokens=rng.randint(0, 6), prompt_logprobs=asked, priority=rng.randint(-1, 1)
        )
        if rng.random() < 0.5:
            request.prompt_token_ids[0] = rng.randint(0, 3)
        requests.append(request)
        harness.engine.submit(request)
        for _ in range(rng.randint(0, 3)):
            harness.engine.step()
    harness.run()
    for request in requests:
        check_prompt_logprobs(harness, request)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
