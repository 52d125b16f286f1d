"""Answers are computed once more when the engine is idle; a single wrong bit is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_harness import Harness
from factories import create_request
from fake_runner import expected_output
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.audit import Auditor


def audited(every: int = 1, **scheduler: object) -> Harness:
    harness = Harness(**scheduler)
    harness.engine._auditor = Auditor(every, harness.metrics)
    return harness


def counts(harness: Harness) -> tuple[int, int]:
    """(audits, mismatches)"""
    counters = harness.metrics._counts
    return counters["llm_serving:audits_total"], counters["llm_serving:audit_mismatch_total"]


@pytest.mark.parametrize(("every", "audits"), [(0, 0), (1, 6), (2, 3), (7, 0)])
def test_one_in_so_many_requests_is_audited(every: int, audits: int) -> None:
    harness = audited(every, prefix_caching=True, num_blocks=14)
    requests = [create_request(3 + i, max_tokens=5, seed=i, logprobs=i % 2 or None) for i in range(6)]
    for request in requests:
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (audits, 0)
    assert set(harness.pieces) == {request.request_id for request in requests}, "nobody is told of an audit"
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


def test_answers_that_end_by_a_token_or_a_string_are_audited_to_their_end() -> None:
    harness = audited()
    tokens = expected_output(list(range(100, 104)), 8)
    by_token = create_request(4, stop_token_ids=frozenset({tokens[3]}))
    by_string = create_request(4, stop=(f"{tokens[2]} ",))
    for request in (by_token, by_string):
        harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (2, 0)


def test_what_was_aborted_is_not_audited() -> None:
    harness = audited()
    request = create_request(4, max_tokens=20)
    harness.engine.submit(request)
    harness.engine.step()
    harness.engine.abort(request.request_id)
    harness.run()
    assert counts(harness) == (0, 0)


@pytest.mark.parametrize("what", ["token", "logprob"])
def test_a_difference_is_counted_and_told(what: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = audited()
    execute = harness.runner.execute

    def garble(step: StepInput) -> StepOutput:
        output = execute(step)
        if step.step == 2 and what == "token":
            return replace(output, token_ids=output.token_ids + np.int32(1))
        if step.step == 2:
            return replace(output, logprobs=np.nextafter(output.logprobs, np.float32(9)))
        return output

    harness.runner.execute = garble  # type: ignore[method-assign]
    request = create_request(4, max_tokens=6, logprobs=1)
    harness.engine.submit(request)
    harness.run()
    assert counts(harness) == (1, 1)
    assert f"audit: token 2 of request {request.request_id} differs" in caplog.text


def test_a_request_that_comes_during_an_audit_is_answered() -> None:
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
