"""When slots get free, from what runs in them."""

from __future__ import annotations

from llm_serving.admission.answer_lengths import MIN_ENDS, AnswerLengths, Asked
from llm_serving.admission.slots import Slots
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
        answers.ended(length, Asked(sampling))
    return answers


def test_answers_that_end_by_their_length_alone_are_told_exactly() -> None:
    slots = Slots([running(certain(20), 3), running(certain(9), 5), running(certain(50), 1)], AnswerLengths())
    assert slots.steps_until_free([], 3, None) == 4
    # 4: the first of those who wait, until 4 + 10 + 1; 15: the second, until 15 + 6; 17 is free then.
    assert slots.steps_until_free([Asked(certain(10))], 3, None) == 15
    assert slots.steps_until_free([Asked(certain(10)), Asked(certain(6))], 3, None) == 17
    assert slots.steps_until_free([], 4, None) == 0


def test_where_more_run_than_there_are_slots_some_have_to_end_before_one_is_free() -> None:
    slots = Slots([running(certain(most), 0) for most in (20, 9, 50, 30)], AnswerLengths())
    assert slots.steps_until_free([], 4, None) == 9
    assert slots.steps_until_free([], 2, None) == 30
    assert slots.steps_until_free([Asked(certain(10))], 2, None) == 41


def test_who_gives_way_holds_no_slot() -> None:
    slots = Slots([running(certain(20), 3), running(certain(90), 5, rank=2)], AnswerLengths())
    assert slots.steps_until_free([], 2, 0) == 0
    assert slots.steps_until_free([], 2, 2) == 17


def test_nothing_is_told_before_enough_answers_have_ended() -> None:
    assert Slots([running(OPEN, 3)], seen(*[10] * (MIN_ENDS - 1))).steps_until_free([], 1, None) is None
    assert Slots([running(OPEN, 3)], seen(*[10] * MIN_ENDS)).steps_until_free([], 1, None) == 7


def test_of_few_requests_more_is_guessed_so_that_chance_has_less_to_say() -> None:
    """Of ten lengths, each as likely as the others, the one in the middle is told, and not the first that comes."""
    answers = seen(*range(10, 110, 10))
    told = [Slots([running(OPEN, 0)], answers).steps_until_free([Asked(OPEN)] * number, 1, None) for number in (0, 1)]
    assert told[0] in (50, 60)
    assert told[1] is not None and 100 <= told[1] <= 120
