from __future__ import annotations

from collections import defaultdict
from itertools import count

import pytest
from factories import create_request, create_scheduler
from fake_runner import FakeRunner, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.engine import Engine
from llm_serving.engine.executor import LocalExecutor
from llm_serving.engine.metrics import Metrics
from llm_serving.errors import WorkerDiedError, WorkerError
from word_tokenizer import WordTokenizer


class AheadExecutor(LocalExecutor):
    """Takes a second step before the first is collected, as a WorkAgent does."""

    max_steps_in_flight = 2

    def submit(self, step: StepInput) -> None:
        assert len(self._submitted) < 2
        super().submit(step)


class Harness:
    """An engine over a fake model, run by hand."""

    def __init__(self, *, ahead: bool = True, **scheduler) -> None:
        self.scheduler = create_scheduler(**scheduler)
        self.runner = FakeRunner(self.scheduler.blocks.pool.num_blocks, self.scheduler.blocks.block_size)
        self.executor = (AheadExecutor if ahead else LocalExecutor)(self.runner)
        self.pieces: dict[str, list[RequestOutput]] = defaultdict(list)
        self.metrics = Metrics()
        ticks = count()
        self.engine = Engine(
            self.scheduler,
            self.executor,
            WordTokenizer(),
            self.metrics,
            self._publish,
            clock=lambda: float(next(ticks)),
        )

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            self.pieces[piece.request_id].append(piece)

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            progressed = self.engine.step()
            self.scheduler.check_integrity()
            if not progressed:
                return
        raise AssertionError("the engine does not come to an end")

    def token_ids(self, request_id: str) -> list[int]:
        return [token for piece in self.pieces[request_id] for token in piece.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(piece.text for piece in self.pieces[request_id])

    def last(self, request_id: str) -> RequestOutput:
        assert self.pieces[request_id][-1].finished
        assert not any(piece.finished for piece in self.pieces[request_id][:-1])
        return self.pieces[request_id][-1]


@pytest.mark.parametrize("ahead", [False, True])
def test_one_request_gets_the_model_s_answer(ahead: bool) -> None:
    harness = Harness(ahead=ahead)
    request = create_request(6, max_tokens=5)
    harness.engine.submit(request)
    harness.run()
    expected = expected_output(request.prompt_token_ids, 5)
    assert harness.token_ids(request.request_id) == expected
    assert harness.text(request.request_id) == "".join(f"{token} " for token in expected)
    assert harness.last(request.request_id).finish_reason is FinishReason.LENGTH


load = st.lists(
    st.tuples(st.integers(0, 10), st.integers(1, 30), st.integers(1, 10), st.integers(-1, 1)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(
    load=load,
    ahead=st.booleans(),
    budget=st.integers(8, 40),
    num_blocks=st.integers(10, 24),
    policy=st.sampled_from(["prefill_first", "fcfs"]),
    static=st.booleans(),
)
def test_answers_do_not_depend_on_load_chunks_or_preemption(
    load: list[tuple[int, int, int, int]], ahead: bool, budget: int, num_blocks: int, policy: str, static: bool
) -> None:
    harness = Harness(
        ahead=ahead,
        policy=policy,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        static_batching=static,
    )
    requests = [(at, create_request(p, max_tokens=o, priority=prio, seed=i)) for i, (at, p, o, prio) in enumerate(load)]
    for step in range(11):
        for at, request in requests:
            if at == step:
                harness.engine.submit(request)
        harness.engine.step()
    harness.run()
    for _, request in requests:
        expected = expected_output(request.prompt_token_ids, request.sampling.max_tokens, request.sampling.seed)
        assert harness.token_ids(request.request_id) == expected


def test_a_stop_token_ends_the_text_before_it() -> None:
    harness = Harness()
    prompt = create_request(4).prompt_token_ids
    answer = expected_output(prompt, 4)
    request = create_request(4, max_tokens=10, stop_token_ids=frozenset({answer[2]}))
    harness.engine.submit(request)
    harness.run()
    last = harness.last(request.request_id)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
    assert harness.token_ids(request.request_id) == answer[:3]
    assert harness.text(request.request_id) == f"{answer[0]} {answer[1]} "


def test_a_stop_string_ends_the_request_and_frees_its_blocks() -> None:
    harness = Harness()
    answer = expected_output(create_request(4).prompt_token_ids, 4)
    request = create_request(4, max_tokens=10, stop=(f" {answer[2]} ",))
    harness.engine.submit(request)
    harness.run()
    last = harness.last(request.request_id)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, f" {answer[2]} ")
    assert harness.text(request.request_id) == f"{answer[0]} {answer[1]}"
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize("steps", range(4))
def test_abort_is_legal_at_every_moment(steps: int) -> None:
    harness = Harness(max_num_batched_tokens=8)
    request, other = create_request(12, max_tokens=6), create_request(3, max_tokens=6)
    harness.engine.submit(request)
    harness.engine.submit(other)
    for _ in range(steps):
        harness.engine.step()
    harness.engine.abort(request.request_id)
    harness.engine.abort("never heard of")
    harness.run()
    assert harness.last(request.request_id).finish_reason is FinishReason.ABORT
    assert harness.token_ids(other.request_id) == expected_output(other.prompt_token_ids, 6)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_step_ends_only_its_requests(ahead: bool) -> None:
    harness = Harness(ahead=ahead, max_prefill_seqs=1, max_decode_gap=1)
    doomed, later = create_request(4), create_request(4)
    execute = harness.runner.execute

    def fail_once(step: StepInput) -> StepOutput:
        output = execute(step)
        if step.step == 1:
            raise WorkerError("bad luck")
        return output

    harness.runner.execute = fail_once  # type: ignore[method-assign]
    harness.engine.submit(doomed)
    harness.engine.step()
    harness.engine.step()
    harness.engine.submit(later)
    harness.run()
    assert harness.last(doomed.request_id).finish_reason is FinishReason.ERROR
    assert harness.last(doomed.request_id).error == "WorkerError: bad luck"
    assert harness.token_ids(later.request_id) == expected_output(later.prompt_token_ids, 8)


def test_a_dead_work_agent_ends_every_request_and_refuses_more() -> None:
    harness = Harness(max_num_seqs=1)
    requests = [create_request(4) for _ in range(3)]
    for request in requests:
        harness.engine.submit(request)

    def die() -> StepOutput:
        raise WorkerDiedError("killed")

    harness.executor.collect = die  # type: ignore[method-assign]
    harness.engine.run()
    for request in requests:
        assert harness.last(request.request_id).finish_reason is FinishReason.ERROR
        assert "killed" in (harness.last(request.request_id).error or "")
    with pytest.raises(WorkerDiedError, match="killed"):
        harness.engine.submit(create_request(4))
    harness.engine.abort(requests[0].request_id)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_without_a_token_fails_alone(ahead: bool) -> None:
    harness = Harness(ahead=ahead)
    bad, good = create_request(4), create_request(5)
    execute = harness.runner.execute

    def spoil(step: StepInput) -> StepOutput:
        output = execute(step)
        return StepOutput(
            output.step,
            output.token_ids,
            output.logprobs,
            output.top_token_ids,
            output.top_logprobs,
            {0: "all logits are NaN"} if step.step == 0 else {},
        )

    harness.runner.execute = spoil  # type: ignore[method-assign]
    harness.engine.submit(bad)
    harness.engine.submit(good)
    harness.run()
    assert harness.last(bad.request_id).error == "all logits are NaN"
    assert harness.token_ids(good.request_id) == expected_output(good.prompt_token_ids, 8)
