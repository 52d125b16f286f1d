"""For which requests drafts are proposed, how long they are, and when speculative decoding pays."""

from __future__ import annotations

import itertools

from llm_serving.core.enums import Proposer
from llm_serving.core.request import FinishReason, RequestStatus
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.speculation.controller import MAX_UPDATE_PERIOD, MIN_SWEPT
from llm_serving.speculation.statistics import MIN_ACCEPTANCE_RATE
from support.drafted_requests import AGAIN, answer, costly, predictable, repeating_requests
from support.factories import create_request


def test_output_that_repeats_itself_gets_drafts() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = predictable(controller, rounds=3)
    assert controller.pays
    assert controller.propose(1, synchronous=True) == [(request, AGAIN[:4])]


def test_no_drafts_are_proposed_while_no_request_runs() -> None:
    """A static batch has ended, and the requests of the next one wait with a step's time already measured."""
    controller = SpeculationController(4, NgramProposer(3), clock=itertools.count().__next__)
    predictable(controller, rounds=3)
    controller.gain.record_step(1, 0.01, 0.0)
    assert controller.propose(0, synchronous=True) == []


def test_output_without_repetition_gets_no_drafts() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = create_request(4, max_tokens=200)
    controller.add_request(request)
    answer(controller, request, range(500, 560))
    assert not controller.pays
    assert controller.propose(1, synchronous=True) == []


def test_the_placeholder_of_a_failed_step_is_never_a_draft_token() -> None:
    """The WorkAgent reads a negative number as a token of the step before, perhaps of another tenant."""
    controller = SpeculationController(4, NgramProposer(3))
    failed = create_request(4, max_tokens=200)
    controller.add_request(failed)
    failed.output_token_ids += [*range(500, 520), -1]
    controller.record_step([failed], 1)
    request = create_request(4, max_tokens=200)
    request.status = RequestStatus.RUNNING
    controller.add_request(request)
    answer(controller, request, range(500, 518))
    assert controller.propose(1, synchronous=True) == [(request, [518, 519])]


def test_drafts_stop_after_rejections() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = predictable(controller, rounds=3)
    answer(controller, request, range(500, 512))
    assert not controller.pays


def runs_of_matches(controller: SpeculationController, *, rounds: int = 8):
    """Return a request whose output has new tokens between runs that it repeats."""
    request = create_request(4, max_tokens=200)
    request.status = RequestStatus.RUNNING
    controller.add_request(request)
    for index in range(rounds):
        answer(controller, request, [1000 + index, *range(1, 8)])
    answer(controller, request, [2000, 1, 2, 3, 4])
    return request


def test_runs_of_matches_are_drafted_from_their_first_token() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = runs_of_matches(controller)
    assert controller.pays
    assert controller.propose(1, synchronous=True) == [(request, [5, 6, 7, 2000])]


class NoDraftModel:
    """A draft model that continues no request."""

    pass_s = 0.0
    acceptance_rate = 0.0

    def select(self, candidates):
        return []


def test_the_minimum_rate_of_ngram_drafts_is_higher_beside_a_draft_model() -> None:
    for model, drafted in ((None, True), (NoDraftModel(), False)):
        controller = SpeculationController(4, NgramProposer(3), model)
        request = create_request(4, max_tokens=200)
        request.status = RequestStatus.RUNNING
        controller.add_request(request)
        answer(controller, request, [1, 2, 3, 4, 5, 500, 1, 2, 3])  # a new match
        assert bool(controller._predictable) is drafted


def test_a_request_of_one_token_gets_no_drafts() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    predictable(controller, rounds=3, max_tokens=1)
    assert not controller.pays


def test_with_a_step_in_flight_only_requests_that_wait_for_replies_get_drafts() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    waiting = predictable(controller, rounds=3, bad_words=((500, 6),))
    predictable(controller, rounds=3)
    assert len(controller.propose(2, synchronous=True)) == 2
    assert controller.propose(2, synchronous=False) == [(waiting, AGAIN[:4])]
    waiting.num_tokens_in_flight = 1
    assert controller.propose(2, synchronous=False) == []


def test_requests_that_wait_for_replies_get_drafts_although_drafts_do_not_pay() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = predictable(controller, rounds=3, bad_words=((500, 6),))
    for num_tokens in (1, 2, 9):
        controller.gain.record_step(num_tokens, 0.01 + 0.001 * num_tokens, 0.1)
    for index in range(16):
        answer(controller, request, [AGAIN[index % 8]])
        assert not controller.pays
        following = [AGAIN[(index + 1 + ahead) % 8] for ahead in range(4)]
        assert controller.propose(1, synchronous=False) == [(request, following)]


class FakeMatcher:
    """Allows even tokens; forces 7, 8, 9 after 500."""

    def constrain_draft(self, output_token_ids, drafts, count):
        found = list(itertools.takewhile(lambda each: each % 2 == 0, drafts))[:count]
        return (found + ([7, 8, 9] if not found and output_token_ids[-1] == 500 else []))[:count]


def constrained(controller: SpeculationController, token_ids):
    request = create_request(4, max_tokens=200)
    request.matcher, request.needs_known_output, request.status = (
        FakeMatcher(),
        True,
        RequestStatus.RUNNING,
    )
    controller.add_request(request)
    answer(controller, request, token_ids)
    return request


def test_a_draft_ends_before_a_token_that_the_constraint_forbids() -> None:
    controller = SpeculationController(6, NgramProposer(3))
    request = constrained(controller, [2, 4, 6, 8, 1, 3] * 4)
    assert controller.propose(1, synchronous=False) == [(request, [2, 4, 6, 8])]


def test_forced_tokens_are_drafted_until_they_are_rejected() -> None:
    controller = SpeculationController(6, NgramProposer(3))
    request = constrained(controller, [3, 500])
    assert controller.propose(1, synchronous=False) == [(request, [7, 8, 9])]
    assert controller.record_verified(request, 3, 3) == [(Proposer.FORCED, 3, 3)]
    for _ in range(20):
        if controller.propose(1, synchronous=False):
            assert controller.record_verified(request, 2, 0) == [(Proposer.FORCED, 2, 0)]
    assert controller.propose(1, synchronous=False) == []


def constrained_ahead(controller: SpeculationController, last: int):
    """Return a constrained request that does not wait for replies."""
    request = create_request(4, max_tokens=1000)
    request.matcher, request.status = FakeMatcher(), RequestStatus.RUNNING
    controller.add_request(request)
    answer(controller, request, [3, last])
    return request


def test_forced_tokens_are_drafted_where_that_pays() -> None:
    for host_s, pays in ((0.001, True), (0.05, False)):
        controller = SpeculationController(6, NgramProposer(3))
        for num_tokens in (1, 2, 7):
            controller.gain.record_step(num_tokens, 0.01 + 0.0001 * num_tokens, host_s)
        request = constrained_ahead(controller, 500)
        assert controller.pays is pays
        assert controller.propose(1, synchronous=pays) == ([(request, [7, 8, 9])] if pays else [])


def test_one_constrained_request_does_not_delay_many_others() -> None:
    controller = SpeculationController(6, NgramProposer(3))
    for num_tokens in (100, 128, 140):
        controller.gain.record_step(num_tokens, 0.0001 * num_tokens, 0.001)
    answer(controller, constrained_ahead(controller, 500), [500], num_rows=128)
    assert not controller.pays


def test_constraint_without_forced_tokens_is_queried_rarely() -> None:
    controller = SpeculationController(6, NgramProposer(3))
    for num_tokens in (1, 2, 7):
        controller.gain.record_step(num_tokens, 0.01 + 0.001 * num_tokens, 0.003)
    request, num_asked = constrained_ahead(controller, 3), 0
    for index in range(400):
        num_asked += controller.pays
        assert not controller.propose(1, synchronous=controller.pays)
        answer(controller, request, [1001 + index])
    assert 4 < num_asked < 80
    for index in range(MAX_UPDATE_PERIOD):
        answer(controller, request, [3001 + index, 500])
    assert controller.pays
    for index in range(40):
        assert controller.propose(1, synchronous=True) == [(request, [7, 8, 9])]
        controller.record_verified(request, 3, 3)
        answer(controller, request, [2001 + index, 500])
        assert controller.pays


def test_verified_drafts_are_counted_by_proposer() -> None:
    controller = SpeculationController(6, NgramProposer(3))
    request = predictable(controller, rounds=3)
    controller.propose(1, synchronous=True)
    assert controller.record_verified(request, 6, 2) == [(Proposer.NGRAM, 6, 2)]
    controller._ngram.requests[request].num_proposed = 3
    assert controller.record_verified(request, 5, 2) == [
        (Proposer.NGRAM, 3, 2),
        (Proposer.FORCED, 2, 0),
    ]
    assert controller.record_verified(request, 5, 4) == [
        (Proposer.NGRAM, 3, 3),
        (Proposer.FORCED, 2, 1),
    ]


def test_finished_answers_are_drafts_for_the_same_tenant_only() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    first = create_request(4, tenant="mine", max_tokens=200)
    controller.add_request(first)
    first.output_token_ids = list(range(500, 540))
    first.status = RequestStatus.FINISHED
    controller.record_step([first], 1)
    for tenant, drafted in (("mine", [520, 521, 522, 523]), ("yours", [])):
        request = create_request(4, tenant=tenant, max_tokens=200)
        request.status = RequestStatus.RUNNING
        controller.add_request(request)
        answer(controller, request, range(500, 520))
        assert dict(controller.propose(1, synchronous=True)).get(request, []) == drafted


def test_drafts_without_expected_gain_are_not_proposed() -> None:
    controller = SpeculationController(8, NgramProposer(3))
    request = predictable(controller, rounds=4)
    for num_tokens in (1, 2, 4, 8):
        controller.gain.record_step(num_tokens, 0.01 * num_tokens, 0.0)  # a step of two takes twice the time of one
    answer(controller, request, AGAIN)
    assert not controller.pays
    for _ in range(2000):
        for num_tokens in (1, 2, 4, 8):
            controller.gain.record_step(num_tokens, 0.01 + 0.0001 * num_tokens, 0.0)
    answer(controller, request, AGAIN)
    assert controller.pays
    for num_tokens in (1, 9):
        controller.gain.record_step(num_tokens, 0.01 + 0.0001 * num_tokens, 1.0)  # forming no step ahead costs more
    answer(controller, request, AGAIN)
    assert not controller.pays


def test_single_slow_step_does_not_stop_drafts() -> None:
    controller = SpeculationController(8, NgramProposer(3))
    request = predictable(controller, rounds=4)
    for num_tokens in (1, 2, 9, 9, 9):
        controller.gain.record_step(num_tokens, 0.01, 0.001)
    controller.gain.record_step(9, 0.01, 0.05)
    answer(controller, request, AGAIN)
    assert controller.pays


def test_gain_includes_the_time_of_proposals() -> None:
    now = 0.0

    def clock():
        nonlocal now
        now += 0.2  # as long as twenty steps
        return now

    for measured, pays in ((None, True), (clock, False)):
        controller = SpeculationController(8, NgramProposer(3, clock=measured), clock=measured)
        request = predictable(controller, rounds=6)
        for _ in range(100):
            for num_tokens in (1, 2, 9):
                controller.gain.record_step(num_tokens, 0.01 + 0.001 * num_tokens, 0.0)
            controller.propose(1, synchronous=True)
            answer(controller, request, AGAIN)
        assert controller.pays is pays


def test_draft_tokens_are_free_in_a_small_step_and_cost_in_a_large_one() -> None:
    for num_rows in (1, 128):
        controller = SpeculationController(8, NgramProposer(3))
        for num_tokens in (*range(1, 10), *range(120, 138)) * 20:
            controller.gain.record_step(num_tokens, 0.01 * max(1.0, num_tokens / 32), 0.001)
        requests = repeating_requests(controller, num_rows)
        assert controller.pays is (num_rows == 1)
        drafted = [(request, AGAIN) for request in requests] if num_rows == 1 else []
        assert controller.propose(num_rows, synchronous=controller.pays) == drafted


def test_gain_includes_the_delay_of_other_requests() -> None:
    controller = SpeculationController(8, NgramProposer(3))
    request = predictable(controller, rounds=4)
    for num_tokens in (1, 2, 100):
        controller.gain.record_step(num_tokens, 0.2 + 0.0002 * num_tokens, 0.002)
    answer(controller, request, AGAIN, num_rows=4)
    assert controller.pays
    answer(controller, request, AGAIN, num_rows=1024)
    assert not controller.pays


def test_requests_without_drafts_are_delayed_by_three_percent_at_most() -> None:
    for num_rows, num_predictable, pays in ((4, 1, False), (4, 3, False), (16, 15, True), (4, 4, True)):
        controller = SpeculationController(8, NgramProposer(3))
        for num_tokens in (1, 2, 9):
            controller.gain.record_step(
                num_tokens, 0.01, 0.003
            )  # draft tokens are free, but forming no step ahead is not
        requests = [predictable(controller, rounds=4) for _ in range(num_predictable)]
        answer(controller, requests[0], AGAIN, num_rows=num_rows)
        assert controller.pays is pays, (num_rows, num_predictable)
        assert bool(controller.propose(num_rows, synchronous=True)) is pays


def test_drafts_are_shorter_where_long_ones_would_delay_others() -> None:
    for knee, num_draft_tokens in ((56, 8), (24, 4), (8, 0)):
        controller = SpeculationController(8, NgramProposer(3))
        for num_tokens in (*range(8, 57),) * 4:
            controller.gain.record_step(num_tokens, 0.01 * max(1.0, num_tokens / knee), 0.00001)
        requests = [predictable(controller, rounds=4) for _ in range(4)]
        answer(controller, requests[0], AGAIN, num_rows=8)
        assert controller.pays is (num_draft_tokens > 0), knee
        drafts = [token_ids for _, token_ids in controller.propose(8, synchronous=controller.pays)]
        assert drafts == ([AGAIN[:num_draft_tokens]] * 4 if num_draft_tokens else []), knee


def test_the_draft_length_maximizes_throughput() -> None:
    for middle_s, long_s, num_draft_tokens in ((0.01, 0.01, 8), (0.012, 0.04, 4), (0.03, 0.07, 2)):
        controller = SpeculationController(8, NgramProposer(3))
        for num_tokens in (*range(8, 73),) * 4:  # two draft tokens each for eight fill a step to 24 tokens, four to 40
            seconds = 0.01 if num_tokens <= 24 else middle_s if num_tokens <= 56 else long_s
            controller.gain.record_step(num_tokens, seconds, 0.00001)
        repeating_requests(controller, 8)
        drafts = [token_ids for _, token_ids in controller.propose(8, synchronous=controller.pays)]
        assert drafts == [AGAIN[:num_draft_tokens]] * 8, num_draft_tokens


def test_a_request_that_lost_its_draft_for_a_moment_does_not_count_as_delayed() -> None:
    controller = SpeculationController(8, NgramProposer(3))
    for num_tokens in (*range(4, 37),) * 4:
        controller.gain.record_step(num_tokens, 0.001 * max(1.0, num_tokens / 18), 0.0002)
    requests = [predictable(controller, rounds=4) for _ in range(4)]
    lost = controller._ngram.requests[requests[0]]
    del controller._ngram.matched[requests[0]], controller._predictable[requests[0]]
    controller._ngram.unmatched[requests[0]] = lost
    assert controller._evaluate(4, {})
    lost.match_rate = MIN_ACCEPTANCE_RATE / 2
    assert not controller._evaluate(4, {})


def test_drafts_may_prolong_steps_while_new_requests_wait_for_a_slot() -> None:
    controller = SpeculationController(8, NgramProposer(3))
    for num_tokens in (1, 5, 9):
        controller.gain.record_step(num_tokens, 0.004 + 0.006 * num_tokens, 0.0)
    controller.measured.prompt_share = 0.9
    request = predictable(controller, rounds=4)
    assert not controller.pays
    controller.has_queue = True
    answer(controller, request, AGAIN * 4)
    assert controller.pays


def test_aborted_requests_are_removed() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    requests = [predictable(controller, rounds=3) for _ in range(20)]
    assert controller.pays
    for request in requests:
        request.status, request.finish_reason = (
            RequestStatus.FINISHED,
            FinishReason.ABORT,
        )
    for _ in range(20):
        controller.record_step([], 1)
    assert not controller.pays
    assert not (controller._ngram.requests or controller._ngram.matched or controller._predictable)


def test_aborted_requests_do_not_count_as_predictable() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    costly(controller, 8, 0.0005)  # hardly any request is looked up
    controller.gain.record_step(1, 0.0005, 0.0)
    new = create_request(4, max_tokens=200)
    new.status = RequestStatus.RUNNING
    controller.add_request(new)
    aborted = [predictable(controller, rounds=3) for _ in range(20)]
    for request in aborted:
        request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
    answer(controller, new, [500, 501])
    assert not controller._predictable


def test_aborted_requests_are_removed_without_a_step() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    for _ in range(1000):
        request = create_request(4, max_tokens=200)
        controller.add_request(request)
        request.status = RequestStatus.FINISHED
    assert len(controller._ngram.requests) <= MIN_SWEPT
    assert len(controller._ngram.unmatched) <= MIN_SWEPT
