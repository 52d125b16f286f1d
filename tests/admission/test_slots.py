"""When slots get free, from what runs in them."""

from __future__ import annotations

import pytest
from llm_serving.admission.slots import MEMORY, MIN_ENDS, AnswerLengths, Slots
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.sampling_params import SamplingParams

OPEN = SamplingParams(max_tokens=100)


def certain(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def running(sampling: SamplingParams, num_output: int, rank: int = 0) -> Request:
    request = Request(request_id="x", prompt_token_ids=[1], sampling=sampling, stop_token_ids=frozenset())
    request.output_token_ids = [5] * num_output
    request.request_class = RequestClass(name=str(rank), rank=rank)
    return request


def seen(*lengths: int, sampling: SamplingParams = OPEN) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.ended(length, sampling)
    return answers


def test_answers_that_end_by_their_length_alone_are_told_exactly() -> None:
    slots = Slots([running(certain(20), 3), running(certain(9), 5), running(certain(50), 1)], AnswerLengths())
    assert slots.steps_until_free([], 3, None) == 4
    # 4: the first of those who wait, until 4 + 10 + 1; 15: the second, until 15 + 6; 17 is free then.
    assert slots.steps_until_free([certain(10)], 3, None) == 15
    assert slots.steps_until_free([certain(10), certain(6)], 3, None) == 17
    assert slots.steps_until_free([], 4, None) == 0


def test_who_gives_way_holds_no_slot() -> None:
    slots = Slots([running(certain(20), 3), running(certain(90), 5, rank=2)], AnswerLengths())
    assert slots.steps_until_free([], 2, 0) == 0
    assert slots.steps_until_free([], 2, 2) == 17


def test_nothing_is_told_before_enough_answers_have_ended() -> None:
    assert Slots([running(OPEN, 3)], seen(*[10] * (MIN_ENDS - 1))).steps_until_free([], 1, None) is None
    assert Slots([running(OPEN, 3)], seen(*[10] * MIN_ENDS)).steps_until_free([], 1, None) == 7


def test_what_an_answer_may_still_get_is_what_longer_ones_got() -> None:
    answers = seen(*[30] * 20, *[60] * 10)
    early = [answers.remaining(0, OPEN, quantile) for quantile in (0.0, 0.6, 0.7, 0.99)]
    late = [answers.remaining(40, OPEN, quantile) for quantile in (0.0, 0.99)]
    assert (early, late) == ([30, 30, 60, 60], [20, 20])
    beyond = answers.remaining(90, OPEN, 0.5)
    assert beyond == 5


def test_lengths_are_shares_of_the_most() -> None:
    """A size that nobody has asked for yet is reckoned by the others."""
    answers = seen(*[50] * MIN_ENDS)
    assert answers.remaining(0, SamplingParams(max_tokens=1000), 0.5) == 500
    for _ in range(MIN_ENDS):
        answers.ended(10, SamplingParams(max_tokens=1000))
    assert answers.remaining(0, SamplingParams(max_tokens=1000), 0.5) == 10
    assert answers.remaining(0, OPEN, 0.5) == 50


@pytest.mark.parametrize("before", [0, 50])
def test_what_has_ended_long_ago_is_forgotten(before: int) -> None:
    answers = seen(*[90] * before, *[10] * MEMORY)
    assert answers.remaining(0, OPEN, 0.999) == 10
