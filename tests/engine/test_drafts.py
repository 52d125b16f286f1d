"""Speculative decoding in the engine: the same answers in fewer steps."""

from __future__ import annotations

import random

from llm_serving.core.request import FinishReason
from llm_serving.engine.audit import Auditor
from llm_serving.speculation import NgramProposer, SpeculationController
from support.engine_harness import Harness, bytes_of
from support.factories import create_request
from support.fake_runner import expected_output
from support.fake_speculation import MAX_DRAFT_TOKENS, RandomDrafts
from support.word_tokenizer import WordTokenizer


def with_drafts(wrong: float = 0.0, **options) -> Harness:
    return Harness(drafter=RandomDrafts(random.Random(3), wrong), block_size=16, **options)


def run(harness: Harness, *requests) -> list[str]:
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    return [bytes_of(harness.answer(request.request_id)) for request in requests]


def test_accepted_drafts_save_steps() -> None:
    harness, plain = with_drafts(), Harness(block_size=16)
    for each in (harness, plain):
        request = create_request(4, request_id="a", max_tokens=64)
        run(each, request)
        assert each.token_ids("a") == expected_output(request.prompt_token_ids, 64)
    assert 2 * len(harness.runner.steps) < len(plain.runner.steps)
    num_draft_tokens, num_accepted = (sum(each.values()) for each in harness.metrics.draft_tokens.values())
    assert num_accepted == 64 - len(harness.runner.steps)
    assert 0 < harness.metrics._counts["vllm:spec_decode_num_drafts_total"] <= len(harness.runner.steps)
    assert num_draft_tokens >= num_accepted > 32


def test_drafts_change_no_field_of_an_answer() -> None:
    def requests():
        return [create_request(5, request_id=str(seed), seed=seed, logprobs=2, max_tokens=40) for seed in range(5)]

    assert run(with_drafts(0.3), *requests()) == run(Harness(block_size=16), *requests())


def test_stop_string_within_accepted_drafts_ends_the_answer() -> None:
    for place in range(3, 3 + MAX_DRAFT_TOKENS):
        answers = []
        for harness in (with_drafts(ahead=False), Harness(block_size=16, ahead=False)):
            request = create_request(4, request_id="a", max_tokens=60)
            words = [
                harness.engine._processor.text_of(request, [token])
                for token in expected_output([100, 101, 102, 103], 60)
            ]
            request.sampling = create_request(4, max_tokens=60, stop=(words[place],)).sampling
            (answer,) = run(harness, request)
            last = harness.last("a")
            assert last.finish_reason is FinishReason.STOP
            assert last.num_output_tokens == len(harness.token_ids("a"))
            num_accepted = sum(harness.metrics.draft_tokens["vllm:spec_decode_num_accepted_tokens_total"].values())
            assert num_accepted == last.num_output_tokens - len(harness.runner.steps)
            answers.append((answer, last.num_output_tokens, last.stop_reason))
        assert answers[0] == answers[1]


def test_every_token_is_a_separate_output_with_and_without_drafts() -> None:
    pieces = []
    for harness in (with_drafts(), Harness(block_size=16)):
        run(harness, create_request(4, request_id="a", logprobs=1, max_tokens=30))
        pieces.append(
            [(each.text, each.token_ids, each.num_output_tokens, each.finish_reason) for each in harness.pieces["a"]]
        )
    assert pieces[0] == pieces[1]
    assert [piece[2] for piece in pieces[0]] == list(range(1, 31))


def test_waiting_requests_take_no_time_of_the_drafter() -> None:
    """It learns a request when the request starts, so a long queue does not prolong its updates."""
    drafter = SpeculationController(4, NgramProposer(3))
    harness = Harness(drafter=drafter, block_size=16, max_num_seqs=2, ahead=False)
    for number in range(8):
        harness.engine.submit(create_request(4, request_id=str(number), max_tokens=20))
    num_known, has_queue = [], []
    while harness.engine.step():
        num_known.append(len(drafter._ngram.requests))
        has_queue.append(drafter.has_queue)
    assert max(num_known) == 2
    assert has_queue.index(False) == has_queue.count(True) > 30, "until the last two requests start"
    assert all(harness.token_ids(str(number)) for number in range(8))


def test_audits_get_no_drafts() -> None:
    """An audit compares an answer with drafts to one without. Its answer would only push others out of the index."""
    drafter = SpeculationController(4, NgramProposer(3))
    harness = Harness(drafter=drafter, block_size=16)
    engine = harness.engine
    engine._auditor = Auditor(1, harness.scheduler, WordTokenizer(), harness.metrics, engine._clock)
    engine.submit(create_request(4, request_id="a", max_tokens=20))
    num_known = []
    while engine.step():
        num_known.append(len(drafter._ngram.requests))
    assert harness.metrics._counts["llm_serving:audits_total"] == 1
    assert num_known.count(1) < 22 < len(num_known)
    assert drafter._ngram.finished.num_tokens == 20, "of the client's request"


class PayingDrafts(RandomDrafts):
    pays = property(lambda self: True, lambda self, value: None)


def test_step_with_a_prompt_is_scheduled_ahead_because_it_verifies_no_drafts() -> None:
    harness = Harness(drafter=PayingDrafts(random.Random(3)), block_size=16, max_num_batched_tokens=8)
    harness.engine.submit(create_request(4, request_id="a", max_tokens=200))
    for _ in range(10):
        harness.engine.step()
    harness.engine.submit(create_request(64, request_id="b", max_tokens=4))
    num_under_way = []
    while not harness.pieces["b"]:
        harness.engine.step()
        num_under_way.append(len(harness.engine._in_flight))
    assert len(num_under_way) > 8
    assert min(num_under_way[2:-2]) == 1  # none but the newest has been collected
    harness.run()
    plain = Harness(block_size=16)
    assert [harness.token_ids(each) for each in "ab"] == [
        run(plain, create_request(length, request_id=each, max_tokens=limit)) and plain.token_ids(each)
        for each, length, limit in (("a", 4, 200), ("b", 64, 4))
    ]


class MeasuredDrafts(PayingDrafts):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.step_times: list[tuple[float, float]] = []
        self.gain.record_step = self._record_step  # type: ignore[method-assign]

    def _record_step(self, num_tokens: int, seconds: float, host_s: float) -> None:
        self.step_times.append((seconds, host_s))


def test_scheduling_time_counts_for_the_master_and_not_for_the_step() -> None:
    now = 0.0

    def slowly(seconds, call):
        def called(*arguments):
            nonlocal now
            now += seconds
            return call(*arguments)

        return called

    drafter = MeasuredDrafts(random.Random(3))
    harness = Harness(drafter=drafter, block_size=16, clock=lambda: now)
    harness.engine._build_step = slowly(0.25, harness.engine._build_step)
    harness.runner.execute = slowly(1.0, harness.runner.execute)
    run(harness, create_request(4, request_id="a", max_tokens=60))
    assert set(drafter.step_times) == {(1.0, 0.25)}


def test_outputs_are_published_after_the_next_step_is_submitted() -> None:
    harness = Harness(drafter=PayingDrafts(random.Random(3)), block_size=16)
    request, submit, num_untold = create_request(4, request_id="a", max_tokens=60), harness.executor.submit, []

    def submitted(*arguments):
        num_untold.append(len(request.output_token_ids) - len(harness.token_ids("a")))
        submit(*arguments)

    harness.executor.submit = submitted
    run(harness, request)
    assert num_untold[0] == 0
    assert min(num_untold[1:]) > 0


def test_drafts_of_one_request_do_not_delay_a_prompt_of_another() -> None:
    harness = with_drafts()
    harness.engine.submit(create_request(4, request_id="a", max_tokens=60))
    for _ in range(6):
        harness.engine.step()
    late = create_request(4, request_id="b", max_tokens=3)
    harness.engine.submit(late)
    harness.engine.step()
    harness.engine.step()
    assert late.first_scheduled_time is not None
    harness.run()
    assert harness.metrics._counts["llm_serving:bound_violations_total"] == 0
