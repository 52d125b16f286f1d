from __future__ import annotations

import os

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.engine import SHORT_STEP_S
from llm_serving.errors import WorkerDiedError
from llm_serving.scheduler import PreemptionMode, Schedule
from support.engine_harness import Harness
from support.factories import create_classes, create_request
from support.fake_runner import expected_output


@pytest.mark.parametrize("ahead", [False, True])
def test_engine_returns_the_model_s_answer_for_one_request(ahead: bool) -> None:
    harness = Harness(ahead=ahead)
    request = create_request(6, max_tokens=5)
    harness.engine.submit(request)
    harness.run()
    expected = expected_output(request.prompt_token_ids, 5)
    assert harness.token_ids(request.request_id) == expected
    assert harness.text(request.request_id) == "".join(f"{token} " for token in expected)
    assert harness.last(request.request_id).finish_reason is FinishReason.LENGTH


def test_stop_token_is_not_part_of_the_text() -> None:
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


def test_stop_string_finishes_the_request_and_frees_its_blocks() -> None:
    harness = Harness()
    answer = expected_output(create_request(4).prompt_token_ids, 4)
    request = create_request(4, max_tokens=10, stop=(f" {answer[2]} ",))
    harness.engine.submit(request)
    harness.run()
    last = harness.last(request.request_id)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, f" {answer[2]} ")
    assert harness.text(request.request_id) == f"{answer[0]} {answer[1]}"
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_request_that_arrives_during_a_step_is_in_the_next_one() -> None:
    harness = Harness()
    first, second = create_request(4, max_tokens=8), create_request(5, max_tokens=2)
    harness.engine.submit(first)
    harness.engine.step()

    def await_ending() -> None:
        if harness.executor.next_step == 1:
            harness.engine.submit(second)

    harness.executor.await_ending = await_ending
    harness.engine.step()
    assert [step.query_lens.tolist() for step in (*harness.runner.steps, *harness.executor._submitted)] == [[4], [5, 1]]
    harness.run()
    for request in (first, second):
        expected = expected_output(request.prompt_token_ids, request.sampling.max_tokens)
        assert harness.token_ids(request.request_id) == expected


def test_engine_has_steps_while_a_step_is_in_flight() -> None:
    harness = Harness()
    assert not harness.engine.has_steps
    harness.engine.submit(create_request(4, max_tokens=2))
    harness.engine.step()
    assert harness.engine.has_steps
    harness.run()
    assert not harness.engine.has_steps


def test_predictor_counts_a_step_as_in_flight_once_no_request_can_join_it() -> None:
    harness = Harness()
    engine, build, seen = harness.engine, harness.engine._build_step, []

    def note(schedule: Schedule, number: int) -> StepInput:
        steps = (*engine._in_flight, schedule)
        expected = len(steps), sum(each.num_tokens - len(each.rows) for each in steps)
        seen.append((engine.ttft_predictor.in_flight[:2], expected))
        return build(schedule, number)

    engine._build_step = note
    for _ in range(3):
        engine.submit(create_request(5, max_tokens=4))
        engine.step()
    harness.run()
    assert len(seen) > 4 and all(reported == steps for reported, steps in seen)
    assert engine.ttft_predictor.in_flight.num_steps == 0


class Timed:
    """A harness in which only steps take time; it records for which steps an announcement was requested."""

    def __init__(self, *seconds: float, ahead: bool = True) -> None:
        self.now = 0.0
        self.announced: list[bool] = []
        self.harness = Harness(ahead=ahead, clock=lambda: self.now)
        self._execute, self.harness.runner.execute = self.harness.runner.execute, self._run
        self._submit, self.harness.executor.submit = self.harness.executor.submit, self._note
        self._seconds = list(seconds)

    def answer(self, max_tokens: int) -> None:
        self.harness.engine.submit(create_request(4, max_tokens=max_tokens, ignore_eos=True))
        self.harness.run()

    def _run(self, step: StepInput) -> StepOutput:
        self.now += self._seconds.pop(0)
        return self._execute(step)

    def _note(self, step: StepInput, announce_ending: bool) -> None:
        self.announced.append(announce_ending)
        self._submit(step, announce_ending)


LONG, SHORT = 2 * SHORT_STEP_S, 0.5 * SHORT_STEP_S


def test_engine_schedules_late_after_a_long_step() -> None:
    timed = Timed(SHORT, LONG, SHORT, LONG, LONG, SHORT)
    timed.answer(6)
    assert timed.announced == [False, False, False, True, False, True]


def test_idle_time_is_not_part_of_a_step_time() -> None:
    timed = Timed(*[SHORT] * 5)
    timed.answer(2)
    timed.now += 10.0
    timed.answer(3)
    assert timed.announced == [False] * 5


def test_engine_without_lookahead_requests_no_announcement() -> None:
    timed = Timed(*[LONG] * 3, ahead=False)
    timed.answer(3)
    assert timed.announced == [False] * 3


@pytest.mark.parametrize("steps", range(4))
def test_abort_is_legal_at_any_moment(steps: int) -> None:
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


def test_metrics_count_swapped_blocks_and_requests_in_host_memory() -> None:
    swap = PreemptionMode.SWAP
    harness = Harness(num_blocks=7, num_swap_blocks=16, preemption_mode=swap, classes=create_classes())
    harness.engine.submit(create_request(8, request_id="low", priority=1, max_tokens=10))
    for _ in range(4):
        harness.engine.step()
    harness.engine.submit(create_request(16, request_id="high", priority=-1, max_tokens=4))
    waited: list[float] = []
    while harness.engine.step():
        waited.append(swaps_of(harness)["vllm:num_requests_swapped"])
    values = swaps_of(harness)
    assert max(waited) == 1
    assert values["llm_serving:swapped_out_requests_total"] == 1
    assert values["llm_serving:swapped_out_blocks_total"] == values["llm_serving:swapped_in_blocks_total"] > 0
    assert (values["vllm:num_requests_swapped"], values["llm_serving:swap_blocks_used"]) == (0, 0)
    assert values["llm_serving:swap_blocks"] == 16


def swaps_of(harness: Harness) -> dict[str, float]:
    return {sample.name: sample.value for metric in harness.metrics.collect() for sample in metric.samples}


def test_engine_ends_all_requests_and_refuses_more_after_its_worker_died() -> None:
    harness = Harness(max_num_seqs=1)
    requests = [create_request(4) for _ in range(3)]
    for request in requests:
        harness.engine.submit(request)

    def die() -> StepOutput:
        raise WorkerDiedError("killed")

    harness.executor.collect = die  # type: ignore[method-assign]
    harness.engine.run()
    for request in requests:
        assert harness.last(request.request_id).finish_reason is FinishReason.UNAVAILABLE
        assert "killed" in (harness.last(request.request_id).error or "")
    with pytest.raises(WorkerDiedError, match="killed"):
        harness.engine.submit(create_request(4))
    harness.engine.abort(requests[0].request_id)


def test_ended_engine_closes_its_file_descriptor() -> None:
    harness = Harness()
    own = harness.engine._inbox._wake_fd
    harness.engine.stop()
    harness.engine.run()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
    others = os.eventfd(0, os.EFD_NONBLOCK)
    if others != own:  # now it is
        os.dup2(others, own)
        os.close(others)
    harness.engine.abort("nobody")
    harness.engine.stop()
    harness.engine.close()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(own)
    os.close(own)


class Panic(BaseException):
    """The panic of a library written in Rust, which is no Exception."""


def test_panic_in_a_library_ends_all_requests() -> None:
    harness = Harness()
    request = create_request(4)
    harness.engine.submit(request)

    def panic() -> StepOutput:
        raise Panic("index out of bounds")

    harness.executor.collect = panic  # type: ignore[method-assign]
    harness.engine.run()
    last = harness.last(request.request_id)
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "internal error: index out of bounds")
    with pytest.raises(WorkerDiedError, match="out of bounds"):
        harness.engine.submit(create_request(4))


@pytest.mark.parametrize("ahead", [False, True])
def test_row_error_ends_only_its_own_request(ahead: bool) -> None:
    harness = Harness(ahead=ahead)
    bad, good = create_request(4), create_request(5)
    execute = harness.runner.execute

    def spoil(step: StepInput) -> StepOutput:
        output = execute(step)
        return StepOutput(
            output.step,
            output.token_ids,
            output.logprobs,
            output.top,
            {0: "all logits are NaN"} if step.step == 0 else {},
        )

    harness.runner.execute = spoil  # type: ignore[method-assign]
    harness.engine.submit(bad)
    harness.engine.submit(good)
    harness.run()
    assert harness.last(bad.request_id).error == "all logits are NaN"
    assert harness.token_ids(good.request_id) == expected_output(good.prompt_token_ids, 8)


def test_static_batch_waits_from_its_first_request_on():
    now = 100.0
    harness = Harness(clock=lambda: now, batch_waiting_time=10.0)
    harness.engine.submit(create_request(request_id="first", arrival_time=100.0))
    harness.engine.step()
    assert harness.engine.idle_s == 10.0
    now = 109.0
    harness.engine.submit(create_request(request_id="second", arrival_time=109.0))
    harness.engine.step()
    assert harness.engine.idle_s == 1.0
    now = 110.0
    harness.run()
    assert harness.last("first").finished
    assert harness.last("second").finished


def test_ttft_predictor_drops_the_cache_limit_once_no_request_waits() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=8)
    for num_prompt_tokens in (28, 4):
        harness.engine.submit(create_request(num_prompt_tokens, max_tokens=4))
    harness.engine.step()
    assert harness.engine.ttft_predictor._num_slots == 1
    harness.run()
    harness.engine.submit(create_request(4, max_tokens=8))
    harness.engine.step()
    assert harness.engine.ttft_predictor._num_slots is None
