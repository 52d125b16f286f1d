"""A WorkAgent is killed, hangs or fails at any moment: every stream continues with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.step import StepInput
from llm_serving.engine.recovery import DEATHS_TO_SUSPECT, MAX_LOST_STEPS
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.executor import RestartFailedError, StepFailedError
from llm_serving.executor.worker_process import RestartStatus
from llm_serving.kvcache.adapter_slots import AdapterSlots
from support.factories import create_request
from support.fake_runner import expected_output
from support.fragile_harness import FragileHarness


def requests_of_all_kinds() -> list[Request]:
    """Return short and long requests of several classes, one a fork, one with penalties."""
    plain = [create_request(3 + 5 * i, max_tokens=6 + i, seed=i, priority=i % 3 - 1) for i in range(5)]
    fork = create_request(23, max_tokens=7, seed=9, fork_of=plain[4].request_id)
    return [*plain, fork]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(8, 20), st.sampled_from([WorkerDiedError, StepFailedError])), max_size=8))
def test_recovery_from_occasional_failures_ends_no_request(mishaps: list[tuple[int, type[Exception]]]) -> None:
    harness = FragileHarness(num_blocks=18, max_num_batched_tokens=16)
    num_good = 0

    def spoil(step: StepInput) -> None:
        nonlocal num_good
        num_good += 1
        if mishaps and num_good > mishaps[0][0]:
            num_good = 0
            raise mishaps.pop(0)[1]("bad luck")

    harness.executor.spoil = spoil
    requests = requests_of_all_kinds()
    harness.submit(*requests)
    harness.run()
    harness.assert_exact(*requests)


def poisoned(step: StepInput) -> bool:
    return 666 in step.token_ids


@pytest.mark.parametrize("error", [StepFailedError("poison"), WorkerDiedError("poison")])
@pytest.mark.parametrize("place", [0, 3])
def test_recovery_ends_only_the_culprit(error: Exception, place: int) -> None:
    harness = FragileHarness()
    requests = [create_request(4 + i, max_tokens=6, seed=i) for i in range(7)]
    poison = create_request(5, max_tokens=6)
    poison.prompt_token_ids[2] = 666

    def spoil(step: StepInput) -> None:
        if poisoned(step):
            raise error

    harness.executor.spoil = spoil
    harness.submit(*requests[:place], poison, *requests[place:])
    harness.run()
    assert harness.last(poison.request_id).finish_reason is FinishReason.ERROR
    assert "poison" in (harness.last(poison.request_id).error or "")
    harness.assert_exact(*requests)


def test_recovery_ends_the_requests_of_an_adapter_that_cannot_be_read_after_one_failure() -> None:
    harness = FragileHarness(adapters=AdapterSlots(2))
    requests = [replace(create_request(4 + i, max_tokens=6, seed=i), adapter=i % 3) for i in range(7)]

    def spoil(step: StepInput) -> None:
        if 2 in step.adapters[:, 0]:
            raise StepFailedError("adapter 2 cannot be read")

    harness.executor.spoil = spoil
    harness.submit(*requests)
    harness.run()
    lost = [each for each in requests if each.adapter == 2]
    assert all(harness.last(each.request_id).finish_reason is FinishReason.ERROR for each in lost)
    assert all(each.num_lost_steps <= 1 for each in requests)
    harness.assert_exact(*(each for each in requests if each.adapter != 2))


def test_recovery_finds_a_culprit_that_fails_late() -> None:
    """The fatal token is one that the request generated."""
    harness = FragileHarness()
    poison, other = create_request(4, max_tokens=12, seed=5), create_request(9, max_tokens=12)
    deadly = expected_output(poison.prompt_token_ids, 12, 5)[6]

    def spoil(step: StepInput) -> None:
        resolved = [harness.executor._runner._previous[-1 - token] if token < 0 else token for token in step.token_ids]
        if deadly in resolved:
            raise WorkerDiedError("poison")

    harness.executor.spoil = spoil
    harness.submit(poison, other)
    harness.run()
    assert harness.last(poison.request_id).finish_reason is FinishReason.ERROR
    assert harness.token_ids(poison.request_id) == expected_output(poison.prompt_token_ids, 7, 5)
    harness.assert_exact(other)


def test_recovery_finds_a_culprit_in_a_late_prompt_chunk() -> None:
    """Earlier chunks are recomputed after each death, which must not count as progress."""
    harness = FragileHarness(max_restarts=20, max_num_batched_tokens=8)
    poison, other = create_request(40, max_tokens=6), create_request(5, max_tokens=12)
    poison.prompt_token_ids[37] = 666

    def spoil(step: StepInput) -> None:
        if poisoned(step):
            raise WorkerDiedError("poison")

    harness.executor.spoil = spoil
    harness.submit(poison, other)
    harness.run()
    assert harness.last(poison.request_id).finish_reason is FinishReason.ERROR
    assert "poison" in (harness.last(poison.request_id).error or "")
    harness.assert_exact(other)


def test_recovery_ignores_changed_chunk_lengths_as_progress() -> None:
    """Otherwise requests in the same steps would end, because their steps are lost too often without a culprit."""
    harness = FragileHarness(max_num_batched_tokens=8)
    poison = create_request(20, max_tokens=6)
    poison.prompt_token_ids[18] = 666
    num_lost: list[int] = []

    def spoil(step: StepInput) -> None:
        if poisoned(step):
            num_lost.append(poison.num_lost_steps)
            scheduler = harness.scheduler
            scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=17)  # beyond what is confirmed now
            raise WorkerDiedError("poison")

    harness.executor.spoil = spoil
    harness.submit(poison)
    harness.run()
    assert num_lost[:2] == [0, 1]
    assert harness.executor.num_restarts <= 3
    assert harness.last(poison.request_id).finish_reason is FinishReason.ERROR


def test_recovery_does_not_suspect_a_request_that_progresses() -> None:
    harness = FragileHarness(max_num_batched_tokens=8)
    request = create_request(40, max_tokens=6)
    num_lost: list[int] = []

    def spoil(step: StepInput) -> None:
        num_lost.append(request.num_lost_steps)
        if request.num_confirmed_tokens > request.num_tokens_at_loss:
            raise WorkerDiedError("bad luck")

    harness.executor.spoil = spoil
    harness.submit(request)
    harness.run()
    assert harness.executor.num_restarts > MAX_LOST_STEPS
    assert max(num_lost) < DEATHS_TO_SUSPECT
    harness.assert_exact(request)


@pytest.mark.parametrize("error", [StepFailedError("poison"), WorkerDiedError("poison")])
def test_recovery_ends_no_request_for_failures_of_a_culprit(error: Exception) -> None:
    """A prompt shares each step with another poisoned request, and so never progresses."""
    harness = FragileHarness(max_num_seqs=2)
    innocent = create_request(6, max_tokens=5)
    poisons = [create_request(5, max_tokens=6, seed=i) for i in range(MAX_LOST_STEPS + 1)]

    def spoil(step: StepInput) -> None:
        if poisoned(step):
            raise error

    harness.executor.spoil = spoil
    for poison in poisons:
        poison.prompt_token_ids[2] = 666
    harness.submit(innocent, *poisons)
    harness.run()
    harness.assert_exact(innocent)
    assert {harness.last(poison.request_id).finish_reason for poison in poisons} == {FinishReason.ERROR}


def test_recovery_finds_a_culprit_that_fails_by_its_vector() -> None:
    harness = FragileHarness()
    requests = [create_request(4 + i, max_tokens=6, seed=i) for i in range(3)]
    poison = create_request(5, max_tokens=0)
    poison.wants_vector = True

    def spoil(step: StepInput) -> None:
        if len(step.result_tokens) > step.sampling.num_samples:
            raise StepFailedError("poison")

    harness.executor.spoil = spoil
    harness.submit(*requests, poison)
    harness.run()
    assert harness.last(poison.request_id).error == "poison"
    harness.assert_exact(*requests)


def test_recovery_ends_all_suspects_after_repeated_failures_of_a_combination() -> None:
    harness = FragileHarness()
    requests = [create_request(4, max_tokens=3) for _ in range(3)]

    def spoil(step: StepInput) -> None:
        if len(step.query_lens) == 3:
            raise StepFailedError("three are too many")

    harness.executor.spoil = spoil
    harness.submit(*requests)
    harness.run()
    assert {harness.last(request.request_id).error for request in requests} == {"three are too many"}


def test_engine_ends_all_requests_when_no_worker_can_be_started() -> None:
    harness = FragileHarness(max_restarts=2)

    def spoil(step: StepInput) -> None:
        raise WorkerDiedError("no memory")

    harness.executor.spoil = spoil
    requests = [create_request(4) for _ in range(3)]
    harness.submit(*requests)
    harness.engine.run()
    for request in requests:
        assert "no memory" in (harness.last(request.request_id).error or "")
    with pytest.raises(WorkerDiedError, match="no memory"):
        harness.engine.submit(create_request(4))


def test_abort_during_a_worker_outage_takes_effect() -> None:
    harness = FragileHarness()
    gone, other = create_request(4, max_tokens=20), create_request(4, max_tokens=20)

    def spoil(step: StepInput) -> None:
        if harness.executor.num_collected == 3:
            harness.engine.abort(gone.request_id)
            raise WorkerDiedError("killed")

    harness.executor.spoil = spoil
    harness.submit(gone, other)
    harness.run()
    assert harness.last(gone.request_id).finish_reason is FinishReason.ABORT
    harness.assert_exact(other)


def test_abort_during_a_bisection_takes_effect_at_once() -> None:
    harness = FragileHarness()
    gone, poison = create_request(4, max_tokens=20), create_request(5, max_tokens=6)
    poison.prompt_token_ids[2] = 666
    num_failed = 0

    def spoil(step: StepInput) -> None:
        nonlocal num_failed
        if not poisoned(step):
            return
        num_failed += 1
        if num_failed == 2:  # both, in the first trial
            harness.engine.abort(gone.request_id)
        else:
            assert num_failed == 1 or harness.last(gone.request_id).finish_reason is FinishReason.ABORT
        raise StepFailedError("poison")

    harness.executor.spoil = spoil
    harness.submit(gone, poison)
    harness.run()
    assert num_failed == 3
    assert harness.last(poison.request_id).error == "poison"


class Absence:
    """An outage: restarts fail a number of times, each after some seconds, and a function may be called meanwhile."""

    def __init__(self, harness: FragileHarness, num_failures: int, attempt_s: float) -> None:
        self.now = 0.0
        self.num_left = num_failures
        self.meanwhile = lambda: None
        self._attempt_s = attempt_s
        self._executor = harness.executor
        harness.engine._clock = lambda: self.now
        harness.executor.before_restart = self._attempt

    def _attempt(self, reason: str) -> None:
        if self._executor.restart_status is None:
            self._executor.restart_status = RestartStatus(reason, self.now, self.now, self._attempt_s, 0, 1, 5)
        self.now += self._attempt_s
        self.meanwhile()
        if self.num_left:
            self.num_left -= 1
            raise RestartFailedError("no file descriptors")
        self._executor.restart_status = None


def test_short_outage_ends_no_request_whatever_the_restart_attempts() -> None:
    harness = FragileHarness()
    absence = Absence(harness, num_failures=20, attempt_s=14.0)
    requests = requests_of_all_kinds()
    harness.executor.spoil = dies_at(harness, 3)
    harness.submit(*requests)
    harness.run()
    assert absence.num_left == 0
    harness.assert_exact(*requests)


def test_deadline_passes_during_a_worker_outage() -> None:
    harness = FragileHarness()
    absence = Absence(harness, num_failures=3, attempt_s=14.0)
    hurried, other = create_request(4, max_tokens=20), create_request(4, max_tokens=20)
    hurried.deadline = 20.0
    ended: list[bool] = []
    absence.meanwhile = lambda: ended.append(hurried.is_finished)
    harness.executor.spoil = dies_at(harness, 3)
    harness.submit(hurried, other)
    harness.run()
    assert ended == [False, False, True, True]
    assert harness.last(hurried.request_id).finish_reason is FinishReason.TIMEOUT
    harness.assert_exact(other)


def test_requests_end_after_the_maximum_outage() -> None:
    harness = FragileHarness()
    absence = Absence(harness, num_failures=30, attempt_s=14.0)
    early, late = requests_of_all_kinds(), create_request(4, max_tokens=5)
    ended_at: dict[str, float] = {}
    publish = harness.engine._publish_outputs

    def note(pieces: list[RequestOutput]) -> None:
        ended_at.update({piece.request_id: absence.now for piece in pieces if piece.finished})
        publish(pieces)

    harness.engine._publish_outputs = note
    harness.executor.spoil = dies_at(harness, 3)
    harness.submit(*early)
    harness.run()
    for request in early:
        last = harness.last(request.request_id)
        assert last.finish_reason is FinishReason.UNAVAILABLE
        assert last.error == "the WorkAgent of the request was not restarted within 300 s: no file descriptors"
        assert ended_at[request.request_id] == 22 * 14.0, "the first attempt after 300 s"
    assert absence.num_left == 0
    harness.submit(late)
    harness.run()
    harness.assert_exact(late)


def test_abort_takes_effect_between_restart_attempts() -> None:
    harness = FragileHarness()
    absence = Absence(harness, num_failures=5, attempt_s=1.0)
    gone, other = create_request(4, max_tokens=20), create_request(4, max_tokens=20)

    def leave() -> None:
        if absence.num_left == 3:
            harness.engine.abort(gone.request_id)
        if absence.num_left == 1:
            assert harness.last(gone.request_id).finish_reason is FinishReason.ABORT

    absence.meanwhile = leave
    harness.executor.spoil = dies_at(harness, 3)
    harness.submit(gone, other)
    harness.run()
    assert harness.last(gone.request_id).finish_reason is FinishReason.ABORT
    harness.assert_exact(other)


def dies_at(harness: FragileHarness, number: int) -> Callable[[StepInput], None]:
    """Let the WorkAgent die once, at the step with this number."""

    def spoil(step: StepInput) -> None:
        if harness.executor.num_collected == number:
            raise WorkerDiedError("killed")

    return spoil
