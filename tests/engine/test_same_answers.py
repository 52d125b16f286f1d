"""Batch invariance: an answer equals the reference answer, whatever the scheduler does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import Request
from llm_serving.scheduler import PreemptionMode
from llm_serving.scheduler.policies import POLICIES
from support.engine_harness import Harness
from support.factories import create_request, create_scheduler
from support.fake_runner import expected_output
from support.fake_speculation import RandomDrafts
from support.scheduler_loads import arrivals, create_load, scheduler_options


def assert_answers_are_those_given_alone(harness: Harness, requests: list[Request]) -> None:
    for request in requests:
        sampling, window = request.sampling, harness.scheduler.blocks.groups.windows[0].num_tokens
        expected = expected_output(request.prompt_token_ids, sampling.max_tokens, sampling.seed, window)
        assert harness.token_ids(request.request_id) == expected
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
    assert harness.scheduler.blocks.host_pool.num_used_blocks == 0
    states = harness.scheduler.blocks.states
    assert states is None or states.pool.num_used_blocks == 0


@settings(max_examples=120)
@given(arrivals=arrivals, options=scheduler_options(), ahead=st.booleans(), draft_seed=st.none() | st.integers(0))
def test_answers_do_not_depend_on_load_or_configuration(
    arrivals: list[tuple[Any, ...]], options: dict[str, Any], ahead: bool, draft_seed: int | None
) -> None:
    """Drafts change no answer."""
    drafter = None
    if draft_seed is not None:
        window = create_scheduler(**options).blocks.groups.windows[0].num_tokens
        drafter = RandomDrafts(random.Random(draft_seed), window=window)
    harness = Harness(ahead=ahead, drafter=drafter, **options)
    load = create_load(arrivals)
    for step in range(26):
        for arrival, abort, request in load:
            if arrival == step:
                harness.engine.submit(request)
            if abort == step:
                harness.engine.abort(request.request_id)
        harness.engine.step()
    harness.run()
    assert_answers_are_those_given_alone(harness, [request for _, abort, request in load if abort is None])


@pytest.mark.parametrize("num_spare_states", [None, 0, 4])
@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fcfs"}))
def test_answers_do_not_depend_on_the_moment_of_preemption(
    policy: str, separate: bool, mode: PreemptionMode, num_spare_states: int | None
) -> None:
    """Every `period` steps, a request of a higher class preempts the only running one; prefill is chunked."""
    for period in range(2, 7):
        for prefix_caching in (False, True):
            harness = Harness(
                policy=policy,
                separate=separate,
                preemption_mode=mode,
                prefix_caching=prefix_caching,
                num_blocks=12,
                num_swap_blocks=6,
                swap_block_cost_tokens=2.0,
                max_num_seqs=1,
                max_num_batched_tokens=5,
                num_spare_states=num_spare_states,
            )
            low = create_request(14, max_tokens=12, priority=1, seed=1)
            requests = [low]
            harness.engine.submit(low)
            for step in range(60):
                if step % period == period - 1 and not low.is_finished:
                    requests.append(create_request(3, max_tokens=1, priority=-1, seed=step))
                    harness.engine.submit(requests[-1])
                harness.engine.step()
            harness.run()
            assert low.num_preemptions > 0
            assert_answers_are_those_given_alone(harness, requests)
