"""Audits: answers are computed again while the engine is idle, and a single wrong bit is detected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm_serving.core.request import Request
from llm_serving.core.request_output import join_pieces
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine import audit
from llm_serving.engine.audit import Auditor
from llm_serving.executor.executor import StepFailedError
from llm_serving.kvcache.adapter_slots import AdapterSlots
from msgspec import structs
from support.engine_harness import Harness
from support.factories import create_request
from support.fake_runner import expected_output
from support.word_tokenizer import WordTokenizer


def audited(every: int = 1, **scheduler: object) -> Harness:
    harness = Harness(**scheduler)
    engine = harness.engine
    engine._auditor = Auditor(every, harness.scheduler, WordTokenizer(), harness.metrics, engine._clock)
    return harness


def counts(harness: Harness) -> tuple[int, int]:
    """(audits, mismatches)"""
    counters = harness.metrics._counts
    return counters["llm_serving:audits_total"], counters["llm_serving:audit_mismatch_total"]


@pytest.mark.parametrize(("every", "audits"), [(0, 0), (1, 6), (2, 3), (7, 0)])
def test_auditor_audits_one_in_n_requests(every: int, audits: int) -> None:
    harness = audited(every, prefix_caching=True, num_blocks=14)
    requests = [create_request(3 + i, max_tokens=5, seed=i, logprobs=i % 2 or None) for i in range(6)]
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (audits, 0)
    assert set(harness.pieces) == {request.request_id for request in requests}, "no client gets tokens of an audit"
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_auditor_audits_answers_with_stop_tokens_and_stop_strings() -> None:
    harness = audited()
    tokens = expected_output(list(range(100, 104)), 8)
    by_token = create_request(4, stop_token_ids=frozenset({tokens[3]}))
    by_string = create_request(4, stop=(f"{tokens[2]} ",))
    for request in (by_token, by_string):
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (2, 0)


def test_auditor_forgets_the_answers_of_an_unloaded_adapter() -> None:
    harness = audited(adapters=AdapterSlots(2))
    requests = [replace(create_request(4, max_tokens=4), adapter=number) for number in (1, 2)]
    for request in requests:
        harness.engine.submit(request)
    while len(harness.engine._auditor.waiting) < 2:
        harness.engine.step()
    harness.executor.set_adapter = lambda number, folder: None
    harness.engine.set_adapter(1, "")
    harness.run()
    assert counts(harness) == (1, 0)


def test_auditor_skips_aborted_requests() -> None:
    harness = audited()
    request = create_request(4, max_tokens=20)
    harness.engine.submit(request)
    harness.engine.step()
    harness.engine.abort(request.request_id)
    harness.run()
    assert counts(harness) == (0, 0)


@pytest.mark.parametrize("what", ["token", "logprob"])
def test_auditor_counts_and_logs_a_difference(what: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = audited()
    execute = harness.runner.execute

    def garble(step: StepInput) -> StepOutput:
        output = execute(step)
        if step.step == 2 and what == "token":
            return structs.replace(output, token_ids=output.token_ids + np.int32(1))
        if step.step == 2:
            return structs.replace(output, logprobs=np.nextafter(output.logprobs, np.float32(9)))
        return output

    harness.runner.execute = garble  # type: ignore[method-assign]
    request = create_request(4, max_tokens=6, logprobs=1)
    harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (1, 1)
    assert f"audit: token 2 of request {request.request_id} differs" in caplog.text


def test_request_that_arrives_during_an_audit_is_answered() -> None:
    harness = audited()
    first, second = create_request(4, max_tokens=6), create_request(5, max_tokens=6, priority=-1)
    harness.engine.submit(first)
    while not first.is_finished:
        harness.engine.step()
    harness.engine.step()
    harness.engine.submit(second)
    harness.run()
    assert harness.token_ids(second.request_id) == expected_output(second.prompt_token_ids, 6)
    assert counts(harness) == (2, 0)


def busy_with_an_audit(**scheduler: Any) -> Harness:
    """Return an engine that runs only the audit of a request of tenant `a`."""
    harness = audited(**scheduler)
    first = create_request(4, max_tokens=20, tenant="a", priority=-1)
    harness.engine.submit(first)
    while not (first.is_finished and harness.scheduler.running):
        harness.engine.step()
    return harness


def check_goes_before_the_audit(harness: Harness, request: Request) -> None:
    harness.engine.submit(request)
    for _ in range(4):
        harness.engine.step()
    assert request.is_finished and counts(harness) == (0, 0)
    harness.run()
    assert counts(harness) == (2, 0)


def test_audit_uses_no_slot_of_the_tenant_of_the_answer() -> None:
    harness = busy_with_an_audit(max_running_per_tenant=1)
    second = create_request(4, max_tokens=2, tenant="a", priority=-1)
    check_goes_before_the_audit(harness, second)


def test_request_that_arrives_during_an_audit_is_scheduled_first() -> None:
    harness = busy_with_an_audit(max_num_seqs=1)
    second = create_request(4, max_tokens=2, tenant="b")
    check_goes_before_the_audit(harness, second)


def test_audit_has_no_prefix_cache_hits() -> None:
    harness = audited(prefix_caching=True)
    added = []
    add = harness.scheduler.add
    harness.scheduler.add = lambda request: (added.append(request), add(request))  # type: ignore[method-assign]
    for _ in range(2):
        harness.engine.submit(create_request(12, max_tokens=5))
    harness.run()
    first, second, *copies = [request.num_cached_tokens for request in added]
    assert (first, second, copies) == (0, 0, [0, 0])


def test_auditor_drops_answers_above_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = audited()
    monkeypatch.setattr(audit, "MAX_BYTES", 4000)
    for num_tokens in (5, 40):
        harness.engine.submit(create_request(4, max_tokens=num_tokens))
    harness.run()
    assert counts(harness) == (1, 0)
    assert not harness.engine._auditor.watched


def test_auditor_detects_a_vector_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    harness = audited()
    execute = harness.runner.execute

    def garble(step: StepInput) -> StepOutput:
        output = execute(step)
        return structs.replace(output, vectors=-output.vectors) if step.step == 0 else output

    request = create_request(4, max_tokens=0)
    request.wants_vector = True
    harness.runner.execute = garble  # type: ignore[method-assign]
    harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (1, 1)
    assert "vector" in caplog.text


def search(num_prompt: int = 5, **options: object) -> Request:
    request = create_request(num_prompt, max_tokens=7, **options)
    request.beam_search = BeamSearchParams(width=3, num_returned=2)
    return request


@pytest.mark.parametrize("logprobs", [None, 2])
def test_auditor_audits_a_beam_search_as_a_whole(logprobs: int | None) -> None:
    harness = audited(num_blocks=24, num_swap_blocks=12, preemption_mode="swap", max_num_batched_tokens=12)
    requests = [search(5 + 6 * i, logprobs=logprobs, stop_token_ids=frozenset(range(i, 1000, 9))) for i in range(3)]
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (3, 0)
    assert set(harness.pieces) == {request.request_id for request in requests}, "no client gets tokens of an audit"
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_auditor_detects_a_beam_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    """Only one alternative token of the second best answer differs."""
    harness = audited()
    request = search(logprobs=2)
    publish = harness.engine._publish_outputs

    def garble_after_publishing(pieces: list) -> None:
        publish(pieces)
        if pieces[-1].beams:
            beam = pieces[-1].beams[1]
            last = beam.logprobs[-1]
            changed = replace(last, top_logprobs=(last.top_logprobs[0], np.nextafter(last.top_logprobs[1], 9)))
            beam.logprobs = (*beam.logprobs[:-1], changed)

    harness.engine._publish_outputs = garble_after_publishing
    harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (1, 1)
    assert f"audit: token 13 of request {request.request_id} differs" in caplog.text


@pytest.mark.parametrize("beams", [False, True])
def test_failed_audit_counts_nothing_and_frees_its_blocks(beams: bool) -> None:
    harness = audited()
    execute, request = harness.runner.execute, search() if beams else create_request(5, max_tokens=7)

    def fail_later(step: StepInput) -> StepOutput:
        output = execute(step)
        if request.is_finished and harness.engine._auditor._running is not None:
            raise StepFailedError("no luck")
        return output

    harness.runner.execute = fail_later  # type: ignore[method-assign]
    harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (0, 0)
    assert harness.last(request.request_id).error is None
    assert not harness.scheduler.has_unfinished_requests
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_running_audit_ends_with_its_engine() -> None:
    harness = audited()
    request = search()
    harness.engine.submit(request)
    while not harness.scheduler.has_unfinished_requests or not request.is_finished:
        harness.engine.step()
    assert all(each.root_request is not request for each in harness.scheduler.running)
    harness.engine.stop()
    harness.engine.run()
    assert counts(harness) == (0, 0)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
    assert join_pieces(harness.pieces[request.request_id]).beams


def test_audit_is_not_counted_in_request_metrics() -> None:
    harness = audited()
    for request in (create_request(4, stop=("no such text",)), search()):
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (2, 0)
    assert harness.metrics._counts["vllm:prompt_tokens_total"] == 4 + 5
    assert harness.metrics._counts["vllm:generation_tokens_total"] == 8 + 7
