"""Acceptance rates of one request's drafts, and the predicted duration of steps."""

from __future__ import annotations

import random

import pytest
from llm_serving.speculation.ngram import FinishedAnswersIndex, NgramLookup, RequestDrafts
from llm_serving.speculation.statistics import (
    FIRST_PAUSE_TOKENS,
    FIRST_TOKEN_RATE,
    FURTHER_TOKEN_RATE,
    MAX_OUTLIER,
    MIN_ACCEPTANCE_RATE,
    RATE_MEMORY,
    Acceptance,
    MeasuredGain,
    MovingAverage,
    RequestStatistics,
    StepTimeModel,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def state(prompt=PROMPT) -> RequestDrafts:
    made = RequestDrafts(0.0, lookup=NgramLookup(prompt, "", 2, FinishedAnswersIndex(2, 100)))
    assert made.search([])
    return made


def towards(rate: float, accepted: bool) -> float:
    return rate + (accepted - rate) / RATE_MEMORY


def test_new_and_confirmed_matches_have_separate_acceptance_rates() -> None:
    made = state()
    assert made.acceptance == pytest.approx(Acceptance(FIRST_TOKEN_RATE, FURTHER_TOKEN_RATE))
    assert made.compare([3])
    assert made.acceptance == pytest.approx(Acceptance(FURTHER_TOKEN_RATE, FURTHER_TOKEN_RATE))
    assert made.compare([3, 4])
    further = towards(FURTHER_TOKEN_RATE, True)
    assert made.acceptance == pytest.approx(Acceptance(further, further))
    assert not made.compare([3, 4, 9])
    assert made.acceptance == pytest.approx(Acceptance(towards(FIRST_TOKEN_RATE, True), towards(further, False)))


def test_a_rejected_first_token_leaves_the_rate_of_further_tokens() -> None:
    made = state()
    assert not made.compare([9])
    assert made.acceptance == pytest.approx(Acceptance(towards(FIRST_TOKEN_RATE, False), FURTHER_TOKEN_RATE))


def test_after_a_lookup_the_match_is_new() -> None:
    made = state([*PROMPT, 3, 4, 5, 1, 2])
    made.compare([3, 4, 5])
    assert made.search([3, 4, 5, 1, 2])
    assert made.acceptance.first == pytest.approx(towards(FIRST_TOKEN_RATE, True))


def test_tokens_after_the_end_of_a_draft_are_not_rejections() -> None:
    """A draft that ends with its text was right until there."""
    finished = FinishedAnswersIndex(2, 100)
    finished.add([("", (1, 2, 3, 4))])
    made = RequestDrafts(0.0, lookup=NgramLookup([1, 2], "", 2, finished))
    assert made.search([])
    assert not made.compare([3, 4, 500, 501])
    assert made.acceptance.further == pytest.approx(towards(FURTHER_TOKEN_RATE, True))
    made.search([3, 4, 500, 501])
    assert made.acceptance == pytest.approx(
        Acceptance(towards(FIRST_TOKEN_RATE, True), towards(FURTHER_TOKEN_RATE, True))
    )


def test_the_draft_model_pauses_for_longer_each_time_its_tokens_are_rejected() -> None:
    made, num_output = RequestStatistics(MIN_ACCEPTANCE_RATE), 0
    for pause in (FIRST_PAUSE_TOKENS, 2 * FIRST_PAUSE_TOKENS):
        made.record_model(4, 0, num_output)
        assert not made.may_use_model(num_output + pause - 1)
        num_output += pause
        assert made.may_use_model(num_output)


def test_the_expected_forced_tokens_follow_the_verified_ones_and_return_to_the_assumption() -> None:
    made = RequestStatistics(0.5)
    for num_output in range(100):
        made.record_forced(0, 0, num_output)
    assert made.forced_tokens(100) < 0.2
    assert made.forced_rate == 1.0  # no forced token was rejected
    assert made.forced_tokens(1000) == pytest.approx(1.0, abs=0.01)
    made.record_forced(3, 1, 1000)
    assert made.forced_rate == pytest.approx(towards(1.0, False))


def test_average_is_robust_against_an_outlier() -> None:
    average = MovingAverage(10)
    average.add(2.0)
    average.add(1000.0)
    assert average.value == pytest.approx(2.0 + (MAX_OUTLIER - 1) * 2.0 / 10)


def test_step_time_model_fits_a_line() -> None:
    cost = StepTimeModel()
    for num_tokens in (1, 4, 9, 2):
        cost.add(num_tokens, 0.010 + 0.001 * num_tokens)
    assert cost.added_s(2, 1) == pytest.approx(0.001)
    assert cost.added_s(2, 30) == pytest.approx(0.030)
    assert cost.step_s(20) == pytest.approx(0.030)


def test_steps_of_one_size_do_not_determine_the_cost_of_a_token() -> None:
    cost = StepTimeModel()
    assert (cost.step_s(3), cost.added_s(3, 1)) == (0.0, 0.0)
    for _ in range(1000):
        cost.add(3, 0.02)
    assert cost.added_s(3, 1) == cost.added_s(3, 40) == 0.0
    assert cost.step_s(9) == pytest.approx(0.02)


def test_step_time_model_never_predicts_savings_from_more_tokens() -> None:
    cost = StepTimeModel()
    cost.add(1, 0.03)
    cost.add(9, 0.01)
    assert cost.added_s(1, 8) == 0.0


def test_step_time_model_bounds_the_cost_of_tokens_by_separate_steps() -> None:
    cost = StepTimeModel()
    cost.add(100, 0.01)
    cost.add(101, 0.05)  # an outlier
    assert cost.added_s(100, 10) == pytest.approx(cost.step_s(100) / 10)


def seconds(num_tokens: int, context: int = 0) -> float:
    """Return the duration of a step: constant up to 32 tokens, where memory is the limit."""
    return 0.010 * max(1.0, num_tokens / 32) + 1e-7 * context * num_tokens


def test_step_time_model_predicts_higher_costs_when_compute_bound() -> None:
    rng, cost = random.Random(0), StepTimeModel()
    for _ in range(200):
        for fewest, most in ((1, 9), (96, 160)):  # one stream and 128, each with drafts
            num_tokens = rng.randint(fewest, most)
            cost.add(num_tokens, seconds(num_tokens) * rng.uniform(0.95, 1.05))
    assert cost.step_s(1) == pytest.approx(0.010, rel=0.03)
    assert cost.added_s(1, 8) < 0.0004
    assert cost.step_s(128) == pytest.approx(0.040, rel=0.03)
    assert cost.added_s(128, 64) == pytest.approx(0.020, rel=0.1)


def test_step_time_model_fits_memory_bound_and_compute_bound_steps() -> None:
    rng, cost = random.Random(0), StepTimeModel()
    for _ in range(400):
        num_tokens = 8 * rng.randint(1, 9)
        cost.add(num_tokens, seconds(num_tokens) * rng.uniform(0.95, 1.05))
    assert cost.added_s(8, 8) < 0.001
    assert cost.added_s(8, 64) == pytest.approx(0.0125, rel=0.15)
    assert cost.added_s(48, 16) == pytest.approx(0.005, rel=0.25)


def test_step_time_model_follows_growing_contexts() -> None:
    rng, cost = random.Random(0), StepTimeModel()
    for index in range(4000):
        num_tokens = 32 + (8 * rng.randint(1, 8) if index % 8 == 0 else 0)
        cost.add(num_tokens, seconds(num_tokens, context=4 * index))
    assert cost.step_s(32) == pytest.approx(seconds(32, 16000), rel=0.1)
    assert cost.added_s(32, 32) == pytest.approx(seconds(64, 16000) - seconds(32, 16000), rel=0.2)


def test_step_time_model_forgets_old_steps() -> None:
    cost = StepTimeModel()
    for _ in range(2000):
        cost.add(1, 0.1)
        cost.add(2, 0.2)
    for _ in range(4000):
        cost.add(1, 0.01)
        cost.add(2, 0.01)
    assert cost.added_s(1, 1) == pytest.approx(0.0, abs=1e-6)


def test_outdated_cost_is_measured_again() -> None:
    cost = StepTimeModel()
    for num_tokens in (100, 128, 140):
        cost.add(num_tokens, seconds(num_tokens))
    for _ in range(100):
        cost.add(128, seconds(128))
    assert cost.added_s(128, 12) > 0.003
    for _ in range(4000):
        cost.add(128, 0.1)  # long contexts
    assert cost.added_s(128, 12) == 0.0


def play_drafts(step_s: float, factor: float, num_steps: int = 8192) -> tuple[float, float]:
    """Return the time of a run relative to the same tokens without drafts, and the share of steps with drafts. A step
    takes 1 s without drafts; with drafts it takes `step_s` and gives `factor` as many tokens.
    """
    measured = MeasuredGain()
    seconds = plain_s = 0.0
    num_drafted = 0
    for step in range(num_steps):
        drafts = step >= 16 and not measured.is_paused
        given = (factor, step_s) if drafts else (1.0, 1.0)
        measured.add(32, *given, has_prompts=False, pays=drafts)
        num_drafted += drafts
        seconds += step_s if drafts else 1.0
        plain_s += factor if drafts else 1.0
    return seconds / plain_s, num_drafted / num_steps


def test_drafts_pause_while_their_steps_take_longer_than_they_save() -> None:
    for step_s, factor in ((1.5, 1.1), (3.0, 2.0), (1.0, 1.0)):
        slowdown, share = play_drafts(step_s, factor)
        assert slowdown < 1.01
        assert share < 0.03


def test_drafts_that_save_time_do_not_pause() -> None:
    assert play_drafts(1.5, 2.0) == (pytest.approx(0.75, abs=0.01), pytest.approx(1.0, abs=0.01))


def test_one_slow_step_does_not_pause_drafts() -> None:
    measured = MeasuredGain()
    for _ in range(16):
        measured.add(8, 1.0, 0.01, has_prompts=False, pays=False)
    for seconds in (*[0.01] * 32, 5.0, *[0.01] * 32):
        measured.add(8, 1.5, seconds, has_prompts=False, pays=True)
    assert not measured.is_paused
