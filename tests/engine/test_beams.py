"""Beam search in the engine: the answer equals the one computed without engine, scheduler or cache."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.executor.executor import StepFailedError
from support.engine_harness import Harness
from support.expected_beams import expected_beams
from support.factories import create_classes, create_request
from support.fake_runner import expected_output, most_likely, next_logprobs

STOPS = frozenset(range(0, 1000, 6))
"""Every sixth token ends the fake model's text."""


def create_beams(num_prompt_tokens: int, width: int, max_tokens: int = 6, **arguments) -> Request:
    request = create_request(num_prompt_tokens, max_tokens=max_tokens, stop_token_ids=STOPS, **arguments)
    request.beam_search = BeamSearchParams(width=width, num_returned=width)
    return request


def answer_alone(request: Request) -> list[tuple[int, ...]]:
    assert request.beam_search is not None
    return expected_beams(
        request.prompt_token_ids, request.beam_search, request.sampling.max_tokens, request.stop_token_ids
    )


def token_ids(last: RequestOutput) -> list[tuple[int, ...]]:
    return [output.token_ids for output in last.beams]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 10])
def test_beam_search_sink_equals_the_search_on_the_model_itself(width: int, ahead: bool) -> None:
    harness = Harness(ahead=ahead, max_num_seqs=10)
    request = create_beams(9, width, logprobs=3)
    harness.engine.submit(request)
    harness.run()
    last = harness.last(request.request_id)
    assert token_ids(last) == answer_alone(request)
    assert last.token_ids == last.beams[0].token_ids
    best = last.beams[0]
    assert best.num_output_tokens == len(best.token_ids) == len(best.logprobs)
    for place, token in enumerate(best.logprobs):
        context = request.prompt_token_ids + list(best.token_ids[:place])
        logprobs = next_logprobs(context)
        assert token.token_id == best.token_ids[place]
        assert token.logprob == logprobs[token.token_id]
        assert token.top_token_ids == tuple(most_likely(context)[:3].tolist())
    for output in last.beams:
        stopped = output.token_ids[-1] in STOPS
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        shown = output.token_ids[:-1] if stopped else output.token_ids
        assert output.text == "".join(f"{token} " for token in shown)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def num_preempted(harness: Harness) -> float:
    value = harness.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "model"})
    assert value is not None
    return value


searches = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 20), st.integers(1, 5), st.integers(1, 8), st.integers(-1, 1)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(
    searches=searches,
    ahead=st.booleans(),
    budget=st.integers(8, 40),
    num_blocks=st.integers(8, 24),
    num_swap_blocks=st.sampled_from([0, 12]),
    max_num_seqs=st.integers(1, 8),
    policy=st.sampled_from(["prefill_first", "fcfs", "mixed"]),
    prefix_caching=st.booleans(),
    separate=st.booleans(),
    num_spare_states=st.sampled_from([None, 0, 5]),
)
def test_beam_search_answers_do_not_depend_on_load_chunks_slots_or_preemption(
    searches,
    ahead,
    budget,
    num_blocks,
    num_swap_blocks,
    max_num_seqs,
    policy,
    prefix_caching,
    separate,
    num_spare_states,
) -> None:
    harness = Harness(
        ahead=ahead,
        policy=policy,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        separate=separate,
        num_spare_states=num_spare_states,
    )
    requests: list[tuple[int, Request]] = []
    for index, (at, num_prompt, width, max_tokens, priority) in enumerate(searches):
        requests.append((at, create_beams(num_prompt, width, max_tokens, priority=priority)))
        requests.append((at, create_request(num_prompt, max_tokens=max_tokens, priority=priority, seed=index)))
    for step in range(9):
        for at, request in requests:
            if at == step:
                harness.engine.submit(request)
        harness.engine.step()
    harness.run()
    for _, request in requests:
        if request.beam_search is not None:
            assert token_ids(harness.last(request.request_id)) == answer_alone(request)
        else:
            sampling = request.sampling
            expected = expected_output(request.prompt_token_ids, sampling.max_tokens, sampling.seed)
            assert harness.token_ids(request.request_id) == expected
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_beams_share_the_blocks_of_their_prompt() -> None:
    # 40 tokens are 10 blocks; four copies of them would not fit into 20.
    harness = Harness(num_blocks=20, max_num_batched_tokens=64)
    request = create_beams(40, 4)
    harness.engine.submit(request)
    most = 0
    while harness.engine.step():
        most = max(most, harness.scheduler.blocks.pool.num_used_blocks)
    assert token_ids(harness.last(request.request_id)) == answer_alone(request)
    assert 10 < most <= 10 + 4 * 2
    assert num_preempted(harness) == 0


@pytest.mark.parametrize("num_steps", range(8))
def test_abort_at_any_moment_frees_all_beams(num_steps: int) -> None:
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=3)
    request, other = create_beams(12, 4), create_request(3, max_tokens=12)
    harness.engine.submit(request)
    harness.engine.submit(other)
    for _ in range(num_steps):
        harness.engine.step()
    harness.engine.abort(request.request_id)
    harness.run()
    assert harness.last(request.request_id).finish_reason is FinishReason.ABORT
    assert harness.token_ids(other.request_id) == expected_output(other.prompt_token_ids, 12)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
    assert not harness.scheduler.has_unfinished_requests


def test_beams_keep_their_priority_unless_all_can_change() -> None:
    """The higher class may hold a tenth of the slots: one beam would fit, further beams would not."""
    harness = Harness(max_num_seqs=10, classes=create_classes(high={"max_running_share": 0.1}))
    request = create_beams(12, 4, max_tokens=12)
    harness.engine.submit(request)
    while len(harness.scheduler.running) < 4:
        harness.engine.step()
    assert not harness.engine.set_priority(request.request_id, -1)
    assert request.priority == 0
    while harness.engine.step():
        assert harness.scheduler.slots_by_class["high"] == 0
    assert token_ids(harness.last(request.request_id)) == answer_alone(request)


def test_beam_search_is_unchanged_by_a_lost_step() -> None:
    harness = Harness(max_num_seqs=3)
    request = create_beams(12, 4)
    harness.engine.submit(request)
    execute, calls = harness.runner.execute, 0

    def fail_once(step):
        nonlocal calls
        calls += 1
        output = execute(step)
        if calls == 5:
            raise StepFailedError("once")
        return output

    harness.runner.execute = fail_once  # type: ignore[method-assign]
    harness.run()
    assert calls > 5
    assert token_ids(harness.last(request.request_id)) == answer_alone(request)


def test_beam_search_emits_an_empty_output_with_the_first_token() -> None:
    harness = Harness()
    request = create_beams(5, 2, max_tokens=3)
    harness.engine.submit(request)
    harness.run()
    pieces = harness.pieces[request.request_id]
    assert len(pieces) > 1
    assert all(not piece.text and not piece.token_ids and not piece.beams for piece in pieces[:-1])
