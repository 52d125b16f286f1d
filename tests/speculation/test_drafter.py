"""Who is guessed for, how far, and when that pays."""

from __future__ import annotations

import pytest
from factories import create_request
from llm_serving.core.request import FinishReason, RequestStatus
from llm_serving.speculation import Drafter
from llm_serving.speculation.drafter import PURGE_EVERY

AGAIN = [1, 2, 3, 4, 5, 6, 7, 8]


def predictable(drafter: Drafter, *, rounds: int = 2, **options):
    """A request whose answer is the same eight tokens again and again; it decodes, and nothing of it is on its way."""
    request = create_request(4, **{"max_tokens": 200, **options})
    request.status = RequestStatus.RUNNING
    drafter.begin(request)
    answer(drafter, request, AGAIN * rounds)
    return request


def answer(drafter: Drafter, request, token_ids, num_rows: int = 1) -> None:
    for token_id in token_ids:
        request.output_token_ids.append(token_id)
        request.num_computed_tokens = request.num_tokens - 1
        drafter.replied([request], num_rows)


def test_a_request_that_says_what_it_said_is_guessed_for() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3)
    assert drafter.pays
    assert drafter.drafts([request]) == [(request, AGAIN[:4])]


def test_one_that_says_something_new_is_not() -> None:
    drafter = Drafter(4, 3)
    request = create_request(4, max_tokens=200)
    drafter.begin(request)
    answer(drafter, request, range(500, 560))
    assert not drafter.pays
    assert drafter.drafts([request]) == []


def test_wrong_guesses_end_it() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3)
    answer(drafter, request, range(500, 512))
    assert not drafter.pays


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"bad_words": ((5, 6),)}])
def test_whoever_gets_one_token_or_depends_on_all_of_them_is_left_alone(options) -> None:
    drafter = Drafter(4, 3)
    predictable(drafter, rounds=3, **options)
    assert not drafter.pays


def test_what_was_answered_before_is_guessed_of_the_same_tenant() -> None:
    drafter = Drafter(4, 3)
    first = create_request(4, tenant="mine", max_tokens=200)
    drafter.begin(first)
    first.output_token_ids = list(range(500, 540))
    first.status = RequestStatus.FINISHED
    drafter.replied([first], 1)
    for tenant, guessed in (("mine", [520, 521, 522, 523]), ("yours", [])):
        request = create_request(4, tenant=tenant, max_tokens=200)
        request.status = RequestStatus.RUNNING
        drafter.begin(request)
        answer(drafter, request, range(500, 520))
        assert drafter.drafts([request]) == ([(request, guessed)] if guessed else [])


def test_guesses_that_cost_as_much_as_they_bring_are_not_made() -> None:
    drafter = Drafter(8, 3)
    request = predictable(drafter, rounds=4)
    for num_tokens in (1, 2, 4, 8):
        drafter.measured(num_tokens, 0.01 * num_tokens, 0.0)  # a step of two takes twice the time of one
    answer(drafter, request, AGAIN)
    assert not drafter.pays
    for _ in range(2000):
        for num_tokens in (1, 2, 4, 8):
            drafter.measured(num_tokens, 0.01 + 0.0001 * num_tokens, 0.0)
    answer(drafter, request, AGAIN)
    assert drafter.pays
    for num_tokens in (1, 9):
        drafter.measured(num_tokens, 0.01 + 0.0001 * num_tokens, 1.0)  # nor where waiting for replies takes longer
    answer(drafter, request, AGAIN)
    assert not drafter.pays


def test_what_others_get_of_a_step_counts() -> None:
    drafter = Drafter(8, 3)
    request = predictable(drafter, rounds=4)
    for num_tokens in (1, 2, 100):
        drafter.measured(num_tokens, 0.01 + 0.0001 * num_tokens, 0.0005)
    answer(drafter, request, AGAIN, num_rows=4)
    assert drafter.pays
    answer(drafter, request, AGAIN, num_rows=256)
    assert not drafter.pays


def test_requests_that_ended_without_a_reply_are_forgotten() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3)
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
    for _ in range(PURGE_EVERY):
        drafter.replied([], 1)
    assert not drafter.pays
    assert not drafter._states
    assert not drafter._predictable
