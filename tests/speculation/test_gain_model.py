"""The draft length at which the expected gain covers the cost."""

from __future__ import annotations

import pytest
from llm_serving.speculation.controller import MAX_RATE, DraftCandidate, GainModel, alike, expected_tokens
from llm_serving.speculation.statistics import Acceptance


def gain_model(draft_s: float, max_draft_tokens: int = 16) -> GainModel:
    """Return a model of steps with one row, which take 1 s and `draft_s` more per draft token."""
    made = GainModel(max_draft_tokens)
    for num_tokens in (1, 5, 9, 17):
        made.record_step(num_tokens, 1 + (num_tokens - 1) * draft_s, 0.0)
    made.prepare(1, 1)
    return made


def test_gain_of_the_last_draft_token_covers_its_cost() -> None:
    made = gain_model(0.1)
    for first, further in ((0.9, 0.9), (0.3, 0.8), (0.3, 0.2), (0.5, 0.0), (0.09, 1.0), (1.0, 1.0)):
        length = made.draft_length(Acceptance(first, further))
        gains = [first * min(further, MAX_RATE) ** index for index in range(16)]
        assert length == sum(each > 0.1 for each in gains), (first, further)


def test_draft_length_is_limited_and_zero_without_expected_gain() -> None:
    assert gain_model(0.001, 4).draft_length(alike(1.0)) == 4
    assert gain_model(1.0).draft_length(alike(0.9)) == 0
    assert gain_model(0.1).draft_length(alike(0.9), proposing_s=0.9) == 0


def test_the_expected_number_of_accepted_tokens_is_the_sum_of_rates() -> None:
    assert expected_tokens(Acceptance(0.3, 0.8), 3) == pytest.approx(0.3 + 0.3 * 0.8 + 0.3 * 0.8**2)
    assert expected_tokens(Acceptance(0.3, 0.0), 3) == pytest.approx(0.3)
    assert expected_tokens(Acceptance(0.3, 0.8), 0) == 0
    length, accepted = gain_model(0.1).plan(Acceptance(0.5, 0.75))
    assert length == gain_model(0.1).draft_length(Acceptance(0.5, 0.75))
    assert accepted == expected_tokens(Acceptance(0.5, 0.75), length)


def test_drafts_delay_arriving_requests_little() -> None:
    """The more steps compute prompts, the less may drafts prolong the others."""
    model, candidates = gain_model(0.6), {DraftCandidate(alike(0.95)): 1}
    assert [model.pays(1, 1, candidates, 0, 0.0, share) for share in (0.0, 0.02, 0.9)] == [True, True, False]
    assert gain_model(0.0).pays(1, 1, candidates, 0, 0.0, 0.9), "free drafts delay no request"


def test_shorter_drafts_pay_where_the_longest_delay_arriving_requests_too_much() -> None:
    """The search also runs in short steps, and starts near the length that was best before."""
    model, candidates, lengths = gain_model(0.1), {DraftCandidate(alike(0.95)): 1}, []
    for prompt_share in (0.0, 0.9, 0.0, 0.0):
        assert model.pays(1, 1, candidates, 0, 0.0, prompt_share)
        model.prepare(1, 1)
        lengths.append(model.plan(alike(0.95))[0])
    assert lengths == [16, 4, 8, 16]
