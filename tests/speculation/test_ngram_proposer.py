"""When drafts are looked up and compared with the output, and how much time that takes."""

from __future__ import annotations

import pytest
from llm_serving.core.request import RequestStatus
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.speculation.controller import MAX_UPDATE_PERIOD
from llm_serving.speculation.ngram import LOOKUP_SHARE
from llm_serving.speculation.statistics import MIN_ACCEPTANCE_RATE
from support.drafted_requests import AGAIN, answer, costly, predictable, repeating_requests
from support.factories import create_request


def test_all_requests_are_looked_up_where_steps_are_long() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    controller.gain.record_step(40, 0.05, 0.0)
    repeating_requests(controller, 40)
    assert [token_ids for _, token_ids in controller.propose(40, synchronous=True)] == [AGAIN[:4]] * 40


def test_short_steps_look_up_some_of_many_requests_in_turn() -> None:
    """A lookup is assumed to take 2.5 us; a step of 2 ms has time for two."""
    controller = SpeculationController(4, NgramProposer(3))
    controller.gain.record_step(40, 0.002, 0.0)
    requests = repeating_requests(controller, 40, num_new=60)
    assert [token_ids for _, token_ids in controller.propose(40, synchronous=True)] == [AGAIN[:4]] * 40
    new = range(1000, 1060)
    num_taken = []
    for token_id in new:
        for request in requests:
            request.output_token_ids.append(token_id)
        before = sum(state.lookup.num_output_tokens for state in controller._ngram.requests.values())
        controller.record_step([], 40)
        num_taken.append(sum(state.lookup.num_output_tokens for state in controller._ngram.requests.values()) > before)
    assert not controller._ngram.matched
    assert all(num_taken)
    left = [
        len(request.output_token_ids) - controller._ngram.requests[request].lookup.num_output_tokens
        for request in requests
    ]
    assert sorted(left) == [index for index in range(20) for _ in range(2)]  # every request has its turn


def test_lookups_in_turn_take_their_share_of_the_time_on_any_machine() -> None:
    num_looks = {}
    for look_s in (2.5e-6, 25e-6):
        now = 0.0
        controller = SpeculationController(4, NgramProposer(3, clock=lambda: now), clock=lambda: now)  # noqa: B023
        controller.gain.record_step(40, 0.02, 0.0)
        look_up, looked = controller._ngram._look_up, []

        def slowly(request, look_up=look_up, looked=looked, look_s=look_s):
            nonlocal now
            now += look_s
            looked.append(1)
            look_up(request)

        controller._ngram._look_up = slowly
        requests = [create_request(4, max_tokens=10**6) for _ in range(100)]
        for request in requests:
            request.status = RequestStatus.RUNNING
            controller.add_request(request)
        for token_id in range(500, 1500):
            if token_id == 1300:
                looked.clear()
            for request in requests:
                request.output_token_ids.append(token_id)
            controller.record_step([], 100)
        num_looks[look_s] = sum(looked)
        assert num_looks[look_s] * look_s / (200 * 0.02) == pytest.approx(LOOKUP_SHARE, rel=0.1)
    assert num_looks[2.5e-6] == pytest.approx(10 * num_looks[25e-6], rel=0.1)


def test_lookups_after_mismatches_keep_to_their_share_while_drafts_do_not_pay() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    costly(controller, 30, 0.0005)  # a step has time for half a lookup
    requests = [create_request(4, max_tokens=1000) for _ in range(30)]
    num_looks = 0
    find = controller._ngram.finished.find

    def counted(*args):
        nonlocal num_looks
        num_looks += 1
        return find(*args)

    controller._ngram.finished.find = counted
    for request in requests:
        request.status = RequestStatus.RUNNING
        controller.add_request(request)
    for index in range(400):
        for request in requests:
            request.output_token_ids.append(index if index % 8 == 0 else index % 8)  # seven that are known, one new
        controller.record_step([], 30)
    assert not controller.pays
    assert controller._ngram.matched
    assert 200 <= num_looks <= 2 * 400 + 2  # by two lengths


def with_slow_lookups(controller: SpeculationController, step_s: float) -> None:
    """Set steps of a small model and lookups that take a fiftieth of one: one in twenty steps has a lookup in turn."""
    for num_tokens in (1, 2, 17):
        controller.gain.record_step(num_tokens, step_s * (1 + num_tokens / 50), 0.0)
    controller.gain.record_step(1, step_s, 0.0)
    controller._ngram.lookup_time.value = step_s / 50


def begun(controller: SpeculationController, prompt_len: int = 4):
    request = create_request(prompt_len, max_tokens=200)
    request.status = RequestStatus.RUNNING
    controller.add_request(request)
    return request


def test_a_new_answer_is_looked_up_after_each_of_its_first_tokens_where_few_run() -> None:
    controller = SpeculationController(16, NgramProposer(3))
    with_slow_lookups(controller, 0.0005)
    answered = begun(controller)
    answer(controller, answered, range(500, 560))
    controller.record_step([answered], 1)
    again = begun(controller)
    answer(controller, again, range(500, 503))
    ((request, drafts),) = controller.propose(1, synchronous=True)
    assert request is again
    assert drafts[:8] == list(range(503, 511))


def test_a_mismatched_request_is_looked_up_at_once_where_few_run() -> None:
    controller = SpeculationController(16, NgramProposer(3))
    with_slow_lookups(controller, 0.0005)
    request = begun(controller)
    answer(controller, request, AGAIN * 4)
    assert controller.pays
    answer(controller, request, [100])  # a mismatch, and no other match
    assert not controller.pays
    answer(controller, request, AGAIN[:3])
    assert controller.propose(1, synchronous=True)[0][1][:5] == AGAIN[3:]


def test_new_answers_are_looked_up_in_turn_where_many_run() -> None:
    controller = SpeculationController(16, NgramProposer(3))
    with_slow_lookups(controller, 0.0005)
    requests = [begun(controller) for _ in range(50)]
    seen = []
    controller._ngram._look_up = seen.append
    for index in range(10):
        for request in requests:
            request.output_token_ids.append(500 + index)
        controller.record_step([], 50)
    assert len(seen) <= 1


def test_drafts_are_not_compared_without_expected_gain() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    requests = repeating_requests(controller, 64)
    assert len(controller._ngram.matched) == 64
    costly(controller, 64, 0.001)
    num_compared = 0
    num_generated = 0

    def say(num_steps, num_rows):
        nonlocal num_compared, num_generated
        for _ in range(num_steps):
            before = sum(state.lookup.num_output_tokens for state in controller._ngram.requests.values())
            for request in requests:
                request.output_token_ids.append(AGAIN[num_generated % 8])
                request.num_computed_tokens = request.num_tokens - 1
            num_generated += 1
            controller.record_step([], num_rows)
            num_compared += (
                sum(state.lookup.num_output_tokens for state in controller._ngram.requests.values()) > before
            )

    say(64, 64)
    assert not controller.pays
    assert num_compared == 0
    for num_tokens in range(1, 300, 20):
        controller.gain.record_step(num_tokens, 0.001, 0.0)  # a smaller model
    say(MAX_UPDATE_PERIOD, 64)
    assert num_compared
    assert controller.pays
    following = [AGAIN[(num_generated + ahead) % 8] for ahead in range(4)]
    assert {tuple(token_ids) for _, token_ids in controller.propose(64, synchronous=True)} == {tuple(following)}


def test_new_requests_are_looked_up_beside_mismatched_ones() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    costly(controller, 8, 0.0005)
    known = [predictable(controller, rounds=3) for _ in range(4)]
    new = [create_request(4, max_tokens=200) for _ in range(4)]
    for request in new:
        request.status = RequestStatus.RUNNING
        controller.add_request(request)
    for index in range(200):
        for request in [*known, *new]:
            request.output_token_ids.append(AGAIN[index % 8] if request in new else 1000 + index)
        controller.record_step([], 8)
    assert set(controller._ngram.matched) == set(new)


def test_finished_answers_are_indexed_together() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    requests = [create_request(4, max_tokens=200) for _ in range(16)]
    for request in requests:
        controller.add_request(request)
        request.output_token_ids = list(range(10))
    taken = []
    for request in requests[:-1]:
        request.status = RequestStatus.FINISHED
        controller.record_step([request], 16)
        taken.append(controller._ngram.finished.num_tokens)
    together = 4  # one in four of those that run
    assert taken == [10 * together * ((index + 1) // together) for index in range(15)]


def test_the_last_finished_answers_are_indexed_by_the_next_request() -> None:
    controller = SpeculationController(4, NgramProposer(3))
    request = create_request(4, max_tokens=200)
    controller.add_request(request)
    request.output_token_ids = list(range(10))
    request.status = RequestStatus.FINISHED
    controller.record_step([request], 200)
    assert controller._ngram.finished.num_tokens == 0
    controller.add_request(create_request(4, max_tokens=200))
    assert controller._ngram.finished.num_tokens == 10


def test_updates_take_their_share_of_the_time_while_drafts_do_not_pay() -> None:
    now, spent = 0.0, 0.0
    controller = SpeculationController(4, NgramProposer(3, clock=lambda: now), clock=lambda: now)
    costly(controller, 30, 0.002)
    update = controller._ngram.update

    def slowly(*arguments):
        nonlocal now, spent
        now += 50e-6
        spent += 50e-6
        return update(*arguments)

    controller._ngram.update = slowly
    requests = repeating_requests(controller, 30)
    before = spent
    for index in range(800):
        for request in requests:
            request.output_token_ids.append(AGAIN[index % 8])
        controller.record_step([], 30)
    assert not controller.pays
    assert 0.004 < (spent - before) / (800 * 0.002) < 0.006


def test_controller_notices_sooner_that_drafts_pay_again_after_a_shorter_pause() -> None:
    now = 0.0
    controller = SpeculationController(4, NgramProposer(3), clock=lambda: now)
    controller.gain.record_step(1, 0.001, 0.0)
    request = predictable(controller, rounds=3)
    update = controller._ngram.update

    def slowly(*arguments):
        nonlocal now
        now += 1.0
        return update(*arguments)

    controller._ngram.update = slowly
    for num_wrong in (4, 64):
        answer(controller, request, AGAIN * 3)
        assert controller.pays
        answer(controller, request, range(500, 500 + num_wrong))
        assert not controller.pays
        num_more = 0
        while not controller.pays:
            answer(controller, request, [AGAIN[num_more % 8]])
            num_more += 1
        # A lookup finds the match; comparisons of eight tokens raise the acceptance rate.
        assert num_more <= 8 + 2 * min(num_wrong, MAX_UPDATE_PERIOD)


@pytest.mark.parametrize("num_left", [1, 2])
def test_a_request_is_not_looked_up_for_its_last_token(num_left: int) -> None:
    """The step that computes the newest token samples the last one, so a draft token would be one too many."""
    controller = SpeculationController(4, NgramProposer(3))
    request = predictable(controller, max_tokens=8 + 3 + num_left, rounds=1)
    answer(controller, request, AGAIN[:3])
    assert (request in controller._ngram.matched) is (num_left == 2)
    assert bool(controller.propose(1, synchronous=True)) is (num_left == 2)


def test_the_draft_model_is_assumed_to_be_worth_a_trial() -> None:
    proposer = NgramProposer(3)
    assert proposer.add_request(create_request(4), 0.1).model_rate == MIN_ACCEPTANCE_RATE
    assert proposer.add_request(create_request(4), 0.7).model_rate == 0.7
