"""How long answers get, from those that have ended."""

from __future__ import annotations

from collections import Counter

import pytest
from llm_serving.admission import answer_lengths
from llm_serving.admission.answer_lengths import MEMORY, MIN_ENDS, AnswerLengths, Asked, beginnings_of
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams

OPEN = SamplingParams(max_tokens=100)
ASKED = Asked(OPEN)


def asked(*prompt: int, max_tokens: int = 100) -> Asked:
    return Asked(SamplingParams(max_tokens=max_tokens), beginnings_of(prompt))


def seen(*lengths: int, asked: Asked = ASKED) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.ended(length, asked)
    return answers


def remaining(answers, num_output, request, quantile):
    found = answers.beside(()).remaining(num_output, request)
    return None if found is None else found.at(quantile)


def test_what_an_answer_may_still_get_is_what_longer_ones_got() -> None:
    answers = seen(*[30] * 20, *[60] * 10)
    early = [remaining(answers, 0, ASKED, quantile) for quantile in (0.0, 0.6, 0.7, 0.99)]
    late = [remaining(answers, 40, ASKED, quantile) for quantile in (0.0, 0.99)]
    assert (early, late) == ([30, 30, 60, 60], [20, 20])
    beyond = remaining(answers, 90, ASKED, 0.5)
    assert beyond == 5


def test_what_asks_for_no_tokens_gets_none() -> None:
    nothing = asked(max_tokens=0)
    answers = seen(*[0] * MIN_ENDS, asked=nothing)
    assert remaining(answers, 0, nothing, 0.5) == 0
    assert remaining(answers, 0, ASKED, 0.5) is None


def test_lengths_are_shares_of_the_most() -> None:
    """A size that nobody has asked for yet is reckoned by the others."""
    answers, larger = seen(*[50] * MIN_ENDS), asked(max_tokens=1000)
    assert remaining(answers, 0, larger, 0.5) == 500
    for _ in range(MIN_ENDS):
        answers.ended(10, larger)
    assert remaining(answers, 0, larger, 0.5) == 10
    assert remaining(answers, 0, ASKED, 0.5) == 50


@pytest.mark.parametrize("before", [0, 50])
def test_what_has_ended_long_ago_is_forgotten(before: int) -> None:
    answers = seen(*[90] * before, *[10] * MEMORY)
    assert remaining(answers, 0, ASKED, 0.999) == 10


def counts(answers: AnswerLengths, request: Asked) -> Counter[int | None]:
    """How many of a hundred requests are expected to have each length."""
    return Counter(remaining(answers, 0, request, (each + 0.5) / 100) for each in range(100))


def test_prompts_that_begin_alike_are_answered_alike() -> None:
    answers = seen(*[3] * 230)
    for number in range(9):
        answers.ended(80, asked(1, 3, 100 + number))
        answers.ended(40, asked(1, 9, 100 + number))
    assert counts(answers, asked(8, 8))[3] > 90  # nobody began so
    for third, length, other in ((3, 80, 40), (9, 40, 80)):
        like = counts(answers, asked(1, third, 5))
        assert like[length] > 90 and like[other] in range(1, 10)


def test_one_in_one_more_than_have_ended_is_as_those_with_a_shorter_beginning() -> None:
    answers = seen(*[3] * 250)
    for number, percent in enumerate((50, 67, 75)):
        answers.ended(80, asked(1, 100 + number))
        like = counts(answers, asked(1, 5))
        assert like[80] in range(percent - 1, percent + 3) and set(like) == {80, 3}


def test_the_same_prompt_gets_the_same_answer_where_nothing_is_drawn() -> None:
    greedy = Asked(SamplingParams(max_tokens=100, temperature=0.0), beginnings_of((1, 2, 3)))
    answers = seen(*[3] * 50)
    answers.ended(80, greedy)
    assert [remaining(answers, 0, greedy, each / 10) for each in range(10)] == [80] * 10
    assert 3 in [remaining(answers, 0, asked(1, 2, 3), each / 10) for each in range(10)]
    answers.ended(90, ASKED)
    assert remaining(answers, 80, greedy, 0.5) == 10  # not the same after all


def test_one_that_got_further_than_all_like_it_is_one_of_those_more_like_others() -> None:
    answers = seen(*[90] * MIN_ENDS)
    for _ in range(2):
        answers.ended(10, asked(1, 2))
    assert remaining(answers, 10, asked(1, 2), 0.5) == 80


def test_beginnings_are_the_whole_prompt_and_its_first_tokens() -> None:
    first, second = beginnings_of((1, 2, 3, 4, 5, 6)), beginnings_of((1, 2, 3, 4, 7))
    assert len(first) == len(second) == 4
    assert first[1:] == second[1:] and first[0] != second[0]
    long = list(range(10 * answer_lengths.LONGEST_BEGINNING))
    assert len(beginnings_of(long)) == answer_lengths.LONGEST_BEGINNING.bit_length()
    assert beginnings_of(()) == (hash(()),)


def test_beginnings_that_were_met_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_lengths, "MAX_BEGINNINGS", 8)
    answers = seen(*[3] * 50)
    for number in (7, *range(20), 7):
        for _ in range(MIN_ENDS):
            answers.ended(80, asked(number))
    assert len(answers._alike) == 8
    assert [remaining(answers, 0, asked(number), 0.0) for number in (7, 19, 0)] == [80, 80, 3]


def under_way(num_output: int, sequence: int, *prompt: int) -> Request:
    request = Request(request_id="x", prompt_token_ids=[1], sampling=OPEN, stop_token_ids=frozenset())
    request.output_token_ids = [5] * num_output
    request.sequence, request.beginnings = sequence, beginnings_of(prompt)
    return request


def at_quarters(answers: AnswerLengths, running: list[Request], request: Asked = ASKED) -> list[int]:
    found = answers.beside(running).remaining(0, request)
    assert found is not None
    return [found.at(quantile) for quantile in (0.1, 0.3, 0.6, 0.9)]


def test_the_short_ones_of_those_that_began_together_are_not_all() -> None:
    """Eight have ended, and eight that came with them are longer already: who comes next may be either."""
    answers = seen(*[4] * MIN_ENDS)
    assert at_quarters(answers, []) == [4, 4, 4, 4]
    running = [under_way(20 + number, 100) for number in range(MIN_ENDS)]
    assert at_quarters(answers, running)[:2] == [4, 4]
    assert min(at_quarters(answers, running)[2:]) > 27


@pytest.mark.parametrize(("num_output", "most"), [(2, 25), (10, 39), (50, 72)])
def test_one_of_which_nothing_is_known_but_that_it_is_longer_is_not_taken_for_half_of_the_most(num_output, most):
    """On a cold server the first to end are short, and many ask for far more tokens than they get."""
    answers = seen(*[1] * MIN_ENDS)
    running = [under_way(num_output, 100) for _ in range(24)]
    assert at_quarters(answers, running)[3] == most


def test_what_runs_is_expected_to_get_as_far_as_those_that_got_further() -> None:
    answers = seen(*[10] * 4, *[60] * 4)
    running = [under_way(20, 100) for _ in range(8)]
    # 4 of 16 have ended at 10; what the eight weigh goes to the four that got further.
    assert at_quarters(answers, running) == [10, 60, 60, 60]


def test_those_that_run_count_for_prompts_that_begin_as_theirs_do() -> None:
    answers = seen(*[4] * MIN_ENDS, asked=asked(1, 2, 3))
    for number in range(MIN_ENDS):
        answers.ended(4, asked(7, 8, number))
    running = [under_way(50, 100, 7, 8, number) for number in range(20, 30)]
    assert at_quarters(answers, running, asked(1, 2, 3)) == [4, 4, 4, 4]
    assert at_quarters(answers, running, asked(7, 8, 99))[2] > 50


def test_a_long_one_counts_with_those_that_came_when_it_did_and_not_with_the_newest() -> None:
    """The short answers that came with it are forgotten; beside the newest of them it would seem to be common."""
    answers = AnswerLengths()
    for sequence in range(2 * MEMORY):
        answers.ended(4, ASKED, sequence)
    assert at_quarters(answers, [under_way(90, 3)] * 200) == [4, 4, 4, 4]


def test_who_ends_by_its_length_alone_says_nothing_of_others() -> None:
    answers = seen(*[4] * MIN_ENDS)
    certain = under_way(50, 100)
    certain.sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    assert at_quarters(answers, [certain] * 50) == [4, 4, 4, 4]
