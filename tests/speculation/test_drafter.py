"""Who is guessed for, how far, and when that pays."""

from __future__ import annotations

import itertools

import pytest
from llm_serving.core.enums import Proposer
from llm_serving.core.request import FinishReason, RequestStatus
from llm_serving.speculation import Drafter
from llm_serving.speculation.drafter import LEAST_SWEPT
from llm_serving.speculation.pace import RARELY
from llm_serving.speculation.trust import LEAST_HITS
from support.factories import create_request

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
        drafter.replied([], num_rows)


def test_a_request_that_says_what_it_said_is_guessed_for() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3)
    assert drafter.pays
    assert drafter.drafts(1, waits=True) == [(request, AGAIN[:4])]


def test_one_that_says_something_new_is_not() -> None:
    drafter = Drafter(4, 3)
    request = create_request(4, max_tokens=200)
    drafter.begin(request)
    answer(drafter, request, range(500, 560))
    assert not drafter.pays
    assert drafter.drafts(1, waits=True) == []


def test_what_a_failed_step_left_in_place_of_a_token_is_guessed_of_nobody() -> None:
    """To the WorkAgent numbers below 0 are what a sample of the step before has chosen, perhaps of another tenant."""
    drafter = Drafter(4, 3)
    failed = create_request(4, max_tokens=200)
    drafter.begin(failed)
    failed.output_token_ids += [*range(500, 520), -1]
    drafter.replied([failed], 1)
    request = create_request(4, max_tokens=200)
    request.status = RequestStatus.RUNNING
    drafter.begin(request)
    answer(drafter, request, range(500, 518))
    assert drafter.drafts(1, waits=True) == [(request, [518, 519])]


def test_wrong_guesses_end_it() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3)
    answer(drafter, request, range(500, 512))
    assert not drafter.pays


def say_in_runs(drafter: Drafter, *, rounds: int = 8):
    """A request of whose answer four in eight tokens stood before."""
    request = create_request(4, max_tokens=200)
    request.status = RequestStatus.RUNNING
    drafter.begin(request)
    for index in range(rounds):
        answer(drafter, request, [1000 + index, *range(1, 8)])
    answer(drafter, request, [2000, 1, 2, 3, 4])
    return request


def test_where_guesses_are_right_in_runs_they_are_made_from_the_first_of_each() -> None:
    drafter = Drafter(4, 3)
    request = say_in_runs(drafter)
    assert drafter.pays
    assert drafter.drafts(1, waits=True) == [(request, [5, 6, 7, 2000])]


class Never:
    """A draft model that takes nobody."""

    pass_s = 0.0

    def begin(self):
        return None

    def takes(self, candidates):
        return []


def test_a_draft_model_may_know_better_where_what_is_looked_up_is_seldom_right() -> None:
    for model, guessed in ((None, True), (Never(), False)):
        drafter = Drafter(4, 3, model)
        request = create_request(4, max_tokens=200)
        request.status = RequestStatus.RUNNING
        drafter.begin(request)
        answer(drafter, request, [1, 2, 3, 4, 5, 500, 1, 2, 3])  # a place of which nothing is known yet
        assert bool(drafter._predictable) is guessed


def test_whoever_gets_one_token_is_left_alone() -> None:
    drafter = Drafter(4, 3)
    predictable(drafter, rounds=3, max_tokens=1)
    assert not drafter.pays


def test_while_a_step_is_on_its_way_only_who_waits_for_replies_gets_drafts() -> None:
    drafter = Drafter(4, 3)
    waiting = predictable(drafter, rounds=3, bad_words=((500, 6),))
    predictable(drafter, rounds=3)
    assert len(drafter.drafts(2, waits=True)) == 2
    assert drafter.drafts(2, waits=False) == [(waiting, AGAIN[:4])]
    waiting.num_tokens_in_flight = 1
    assert drafter.drafts(2, waits=False) == []


def test_who_waits_for_replies_is_guessed_for_behind_the_newest_token_though_guesses_do_not_pay() -> None:
    drafter = Drafter(4, 3)
    request = predictable(drafter, rounds=3, bad_words=((500, 6),))
    for num_tokens in (1, 2, 9):
        drafter.measured(num_tokens, 0.01 + 0.001 * num_tokens, 0.1)
    for index in range(16):
        answer(drafter, request, [AGAIN[index % 8]])
        assert not drafter.pays
        following = [AGAIN[(index + 1 + ahead) % 8] for ahead in range(4)]
        assert drafter.drafts(1, waits=False) == [(request, following)]


class Walk:
    """Allows what is even; 500 is followed by 7, 8, 9 and no other."""

    def possible(self, output_token_ids, guesses, count):
        found = list(itertools.takewhile(lambda each: each % 2 == 0, guesses))[:count]
        return (found + ([7, 8, 9] if not found and output_token_ids[-1] == 500 else []))[:count]


def constrained(drafter: Drafter, token_ids):
    request = create_request(4, max_tokens=200)
    request.walk, request.waits_for_reply, request.status = (
        Walk(),
        True,
        RequestStatus.RUNNING,
    )
    drafter.begin(request)
    answer(drafter, request, token_ids)
    return request


def test_what_a_constraint_forbids_is_not_guessed() -> None:
    drafter = Drafter(6, 3)
    request = constrained(drafter, [2, 4, 6, 8, 1, 3] * 4)
    assert drafter.drafts(1, waits=False) == [(request, [2, 4, 6, 8])]


def test_what_a_constraint_forces_is_guessed_until_it_turns_out_to_be_wrong() -> None:
    drafter = Drafter(6, 3)
    request = constrained(drafter, [3, 500])
    assert drafter.drafts(1, waits=False) == [(request, [7, 8, 9])]
    assert drafter.checked(request, 3, 3) == [(Proposer.FORCED, 3, 3)]
    for _ in range(20):
        if drafter.drafts(1, waits=False):
            assert drafter.checked(request, 2, 0) == [(Proposer.FORCED, 2, 0)]
    assert drafter.drafts(1, waits=False) == []


def bound(drafter: Drafter, last: int):
    """A request whose form forces three tokens behind 500, and that does not wait for replies."""
    request = create_request(4, max_tokens=1000)
    request.walk, request.status = Walk(), RequestStatus.RUNNING
    drafter.begin(request)
    answer(drafter, request, [3, last])
    return request


def test_what_a_constraint_forces_is_guessed_where_that_pays() -> None:
    for host_s, pays in ((0.001, True), (0.05, False)):
        drafter = Drafter(6, 3)
        for num_tokens in (1, 2, 7):
            drafter.measured(num_tokens, 0.01 + 0.0001 * num_tokens, host_s)
        request = bound(drafter, 500)
        assert drafter.pays is pays
        assert drafter.drafts(1, waits=pays) == ([(request, [7, 8, 9])] if pays else [])


def test_of_many_one_that_is_bound_delays_nobody() -> None:
    drafter = Drafter(6, 3)
    for num_tokens in (100, 128, 140):
        drafter.measured(num_tokens, 0.0001 * num_tokens, 0.001)
    answer(drafter, bound(drafter, 500), [500], num_rows=128)
    assert not drafter.pays


def test_where_nothing_is_forced_it_is_seldom_asked() -> None:
    drafter = Drafter(6, 3)
    for num_tokens in (1, 2, 7):
        drafter.measured(num_tokens, 0.01 + 0.001 * num_tokens, 0.003)
    request, num_asked = bound(drafter, 3), 0
    for index in range(400):
        num_asked += drafter.pays
        assert not drafter.drafts(1, waits=drafter.pays)
        answer(drafter, request, [1001 + index])
    assert 4 < num_asked < 80
    request.output_token_ids[-1] = 500
    while not drafter.pays:
        answer(drafter, request, [500])
    for index in range(40):
        assert drafter.drafts(1, waits=True) == [(request, [7, 8, 9])]
        drafter.checked(request, 3, 3)
        answer(drafter, request, [2001 + index, 500])
        assert drafter.pays


def test_guesses_are_counted_for_who_made_them() -> None:
    drafter = Drafter(6, 3)
    request = predictable(drafter, rounds=3)
    drafter.drafts(1, waits=True)
    assert drafter.checked(request, 6, 2) == [(Proposer.NGRAM, 6, 2)]
    drafter._states[request].num_proposed = 3
    assert drafter.checked(request, 5, 2) == [
        (Proposer.NGRAM, 3, 2),
        (Proposer.FORCED, 2, 0),
    ]
    assert drafter.checked(request, 5, 4) == [
        (Proposer.NGRAM, 3, 3),
        (Proposer.FORCED, 2, 1),
    ]


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
        assert dict(drafter.drafts(1, waits=True)).get(request, []) == guessed


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


def test_a_step_that_was_put_off_does_not_end_guesses() -> None:
    drafter = Drafter(8, 3)
    request = predictable(drafter, rounds=4)
    for num_tokens in (1, 2, 9, 9, 9):
        drafter.measured(num_tokens, 0.01, 0.001)
    drafter.measured(9, 0.01, 0.05)
    answer(drafter, request, AGAIN)
    assert drafter.pays


def test_the_time_to_make_guesses_counts() -> None:
    now = 0.0

    def clock():
        nonlocal now
        now += 0.2  # as long as twenty steps
        return now

    for told, pays in ((None, True), (clock, False)):
        drafter = Drafter(8, 3, clock=told)
        request = predictable(drafter, rounds=6)
        for _ in range(100):
            for num_tokens in (1, 2, 9):
                drafter.measured(num_tokens, 0.01 + 0.001 * num_tokens, 0.0)
            drafter.drafts(1, waits=True)
            answer(drafter, request, AGAIN)
        assert drafter.pays is pays


def test_a_few_tokens_are_free_beside_one_and_cost_beside_many() -> None:
    for num_rows in (1, 128):
        drafter = Drafter(8, 3)
        for num_tokens in (*range(1, 10), *range(120, 138)) * 20:
            drafter.measured(num_tokens, 0.01 * max(1.0, num_tokens / 32), 0.001)
        requests = many_who_repeat_themselves(drafter, num_rows)
        assert drafter.pays is (num_rows == 1)
        guessed = [(request, AGAIN) for request in requests] if num_rows == 1 else []
        assert drafter.drafts(num_rows, waits=drafter.pays) == guessed


def test_what_others_get_of_a_step_counts() -> None:
    drafter = Drafter(8, 3)
    request = predictable(drafter, rounds=4)
    for num_tokens in (1, 2, 100):
        drafter.measured(num_tokens, 0.2 + 0.0002 * num_tokens, 0.002)
    answer(drafter, request, AGAIN, num_rows=4)
    assert drafter.pays
    answer(drafter, request, AGAIN, num_rows=1024)
    assert not drafter.pays


def test_those_without_drafts_are_hardly_delayed() -> None:
    for num_rows, num_predictable, pays in ((4, 1, False), (4, 3, False), (16, 15, True), (4, 4, True)):
        drafter = Drafter(8, 3)
        for num_tokens in (1, 2, 9):
            drafter.measured(num_tokens, 0.01, 0.003)  # drafts are free, but waiting for replies is not
        requests = [predictable(drafter, rounds=4) for _ in range(num_predictable)]
        answer(drafter, requests[0], AGAIN, num_rows=num_rows)
        assert drafter.pays is pays, (num_rows, num_predictable)
        assert bool(drafter.drafts(num_rows, waits=True)) is pays


def test_where_all_guesses_would_delay_others_fewer_are_made_of_each() -> None:
    for knee, num_guesses in ((56, 8), (24, 4), (8, 0)):
        drafter = Drafter(8, 3)
        for num_tokens in (*range(8, 57),) * 4:
            drafter.measured(num_tokens, 0.01 * max(1.0, num_tokens / knee), 0.00001)
        requests = [predictable(drafter, rounds=4) for _ in range(4)]
        answer(drafter, requests[0], AGAIN, num_rows=8)
        assert drafter.pays is (num_guesses > 0), knee
        guesses = [token_ids for _, token_ids in drafter.drafts(8, waits=drafter.pays)]
        assert guesses == ([AGAIN[:num_guesses]] * 4 if num_guesses else []), knee


def test_of_guesses_that_pay_as_many_are_made_as_bring_most_tokens_a_second() -> None:
    for middle_s, long_s, num_guesses in ((0.01, 0.01, 8), (0.012, 0.04, 4), (0.03, 0.07, 2)):
        drafter = Drafter(8, 3)
        for num_tokens in (*range(8, 73),) * 4:  # two guesses each for eight fill a step to 24 tokens, four to 40
            seconds = 0.01 if num_tokens <= 24 else middle_s if num_tokens <= 56 else long_s
            drafter.measured(num_tokens, seconds, 0.00001)
        many_who_repeat_themselves(drafter, 8)
        guesses = [token_ids for _, token_ids in drafter.drafts(8, waits=drafter.pays)]
        assert guesses == [AGAIN[:num_guesses]] * 8, num_guesses


def test_who_has_lost_its_guess_for_a_moment_is_not_one_whom_others_delay() -> None:
    drafter = Drafter(8, 3)
    for num_tokens in (*range(4, 37),) * 4:
        drafter.measured(num_tokens, 0.001 * max(1.0, num_tokens / 18), 0.00001)
    requests = [predictable(drafter, rounds=4) for _ in range(4)]
    lost = drafter._states[requests[0]]
    del drafter._followed[requests[0]], drafter._predictable[requests[0]]
    drafter._lost[requests[0]] = lost
    assert drafter._pays(4, {})
    lost.hits = LEAST_HITS / 2
    assert not drafter._pays(4, {})


def test_requests_that_ended_without_a_reply_are_forgotten() -> None:
    drafter = Drafter(4, 3)
    requests = [predictable(drafter, rounds=3) for _ in range(20)]
    assert drafter.pays
    for request in requests:
        request.status, request.finish_reason = (
            RequestStatus.FINISHED,
            FinishReason.ABORT,
        )
    for _ in range(20):
        drafter.replied([], 1)
    assert not drafter.pays
    assert not (drafter._states or drafter._followed or drafter._predictable)


def test_whoever_ended_without_a_reply_is_not_counted_on() -> None:
    drafter = Drafter(4, 3)
    costly(drafter, 8, 0.0005)  # hardly anybody is looked at
    drafter.measured(1, 0.0005, 0.0)
    new = create_request(4, max_tokens=200)
    new.status = RequestStatus.RUNNING
    drafter.begin(new)
    aborted = [predictable(drafter, rounds=3) for _ in range(20)]
    for request in aborted:
        request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ABORT
    answer(drafter, new, [500, 501])
    assert not drafter._predictable


def test_no_more_is_kept_of_those_who_ended_without_a_reply_than_of_others() -> None:
    drafter = Drafter(4, 3)
    for _ in range(1000):
        request = create_request(4, max_tokens=200)
        drafter.begin(request)
        request.status = RequestStatus.FINISHED
    assert len(drafter._states) <= LEAST_SWEPT
    assert len(drafter._lost) <= LEAST_SWEPT


def many_who_repeat_themselves(drafter: Drafter, count: int, num_new: int = 30) -> list:
    requests = [create_request(4, max_tokens=200) for _ in range(count)]
    for request in requests:
        request.status = RequestStatus.RUNNING
        drafter.begin(request)
    for token_id in [*range(500, 500 + num_new), *AGAIN * 6]:
        for request in requests:
            request.output_token_ids.append(token_id)
            request.num_computed_tokens = request.num_tokens - 1
        drafter.replied([], len(requests))
    return requests


def test_all_are_looked_at_where_steps_take_long() -> None:
    drafter = Drafter(4, 3)
    drafter.measured(40, 0.05, 0.0)
    many_who_repeat_themselves(drafter, 40)
    assert [token_ids for _, token_ids in drafter.drafts(40, waits=True)] == [AGAIN[:4]] * 40


def test_of_many_who_say_nothing_known_some_are_looked_at_after_a_short_step() -> None:
    """A look takes two millionths of a second; two steps of two milliseconds have four of them."""
    drafter = Drafter(4, 3)
    drafter.measured(40, 0.002, 0.0)
    requests = many_who_repeat_themselves(drafter, 40, num_new=60)
    assert [token_ids for _, token_ids in drafter.drafts(40, waits=True)] == [AGAIN[:4]] * 40
    new = range(1000, 1060)
    num_taken = []
    for token_id in new:
        for request in requests:
            request.output_token_ids.append(token_id)
        before = sum(state.num_tokens for state in drafter._states.values())
        drafter.replied([], 40)
        num_taken.append(sum(state.num_tokens for state in drafter._states.values()) > before)
    assert not drafter._followed
    assert all(any(pair) for pair in itertools.pairwise(num_taken))
    left = [len(request.output_token_ids) - drafter._states[request].num_tokens for request in requests]
    assert sorted(left) == [index + min(left) for index in range(0, 20, 2) for _ in range(4)]  # all have their turn


def test_looking_takes_a_four_hundredth_of_the_time_however_slow_the_machine_is() -> None:
    num_looks = {}
    for look_s in (2.5e-6, 25e-6):
        now = 0.0
        drafter = Drafter(4, 3, clock=lambda: now)  # noqa: B023
        drafter.measured(40, 0.02, 0.0)
        look_at, looked = drafter._look_at, []

        def slowly(count, look_at=look_at, looked=looked, look_s=look_s):
            nonlocal now
            now += count * look_s
            looked.append(count)
            look_at(count)

        drafter._look_at = slowly
        requests = [create_request(4, max_tokens=10**6) for _ in range(100)]
        for request in requests:
            request.status = RequestStatus.RUNNING
            drafter.begin(request)
        for token_id in range(500, 1500):
            if token_id == 1300:
                looked.clear()
            for request in requests:
                request.output_token_ids.append(token_id)
            drafter.replied([], 100)
        num_looks[look_s] = sum(looked)
        assert 0.9 / 400 < num_looks[look_s] * look_s / (200 * 0.02) < 1.1 / 400
    assert num_looks[2.5e-6] == pytest.approx(10 * num_looks[25e-6], rel=0.1)


def costly(drafter: Drafter, num_rows: int, step_s: float) -> None:
    """Each token of a step takes as long as any other."""
    for num_tokens in (num_rows // 2, num_rows):
        drafter.measured(num_tokens, step_s * num_tokens / num_rows, 0.0)


def test_where_guesses_do_not_pay_wrong_ones_are_looked_for_again_as_often_as_is_cheap() -> None:
    drafter = Drafter(4, 3)
    costly(drafter, 30, 0.0005)  # a step has time for half a look
    requests = [create_request(4, max_tokens=1000) for _ in range(30)]
    num_looks = 0
    find = drafter._finished.find

    def counted(*args):
        nonlocal num_looks
        num_looks += 1
        return find(*args)

    drafter._finished.find = counted
    for request in requests:
        request.status = RequestStatus.RUNNING
        drafter.begin(request)
    for index in range(400):
        for request in requests:
            request.output_token_ids.append(index if index % 8 == 0 else index % 8)  # seven that are known, one new
        drafter.replied([], 30)
    assert not drafter.pays
    assert drafter._followed
    assert 200 <= num_looks <= 2 * 400 + 2  # by two lengths


def slow_to_look(drafter: Drafter, step_s: float) -> None:
    """A step of a small model, and looks that take a fiftieth of it: the share of all looks is one in twenty steps."""
    for num_tokens in (1, 2, 17):
        drafter.measured(num_tokens, step_s * (1 + num_tokens / 50), 0.0)
    drafter.measured(1, step_s, 0.0)
    drafter._look_s = step_s / 50


def begun(drafter: Drafter, prompt_len: int = 4):
    request = create_request(prompt_len, max_tokens=200)
    request.status = RequestStatus.RUNNING
    drafter.begin(request)
    return request


def test_an_answer_that_begins_is_looked_for_at_each_of_its_first_tokens_where_few_run() -> None:
    drafter = Drafter(16, 3)
    slow_to_look(drafter, 0.0005)
    said = begun(drafter)
    answer(drafter, said, range(500, 560))
    drafter.replied([said], 1)
    again = begun(drafter)
    answer(drafter, again, range(500, 503))
    ((request, guesses),) = drafter.drafts(1, waits=True)
    assert request is again
    assert guesses[:8] == list(range(503, 511))


def test_one_that_was_guessed_rightly_is_looked_for_again_at_once_where_few_run() -> None:
    drafter = Drafter(16, 3)
    slow_to_look(drafter, 0.0005)
    request = begun(drafter)
    answer(drafter, request, AGAIN * 4)
    assert drafter.pays
    answer(drafter, request, [100])  # a wrong guess, and nothing is found
    assert not drafter.pays
    answer(drafter, request, AGAIN[:3])
    assert drafter.drafts(1, waits=True)[0][1][:5] == AGAIN[3:]


def test_where_many_run_nobody_waits_for_looks_at_those_who_begin() -> None:
    drafter = Drafter(16, 3)
    slow_to_look(drafter, 0.0005)
    requests = [begun(drafter) for _ in range(50)]
    seen = []
    drafter._look = lambda request, state: seen.append(request)
    for index in range(10):
        for request in requests:
            request.output_token_ids.append(500 + index)
        drafter.replied([], 50)
    assert len(seen) <= 1


def test_where_right_guesses_would_not_pay_nobody_is_compared() -> None:
    drafter = Drafter(4, 3)
    requests = many_who_repeat_themselves(drafter, 64)
    assert len(drafter._followed) == 64
    costly(drafter, 64, 0.001)
    num_compared = 0
    said = 0

    def say(num_steps, num_rows):
        nonlocal num_compared, said
        for _ in range(num_steps):
            before = sum(state.num_tokens for state in drafter._states.values())
            for request in requests:
                request.output_token_ids.append(AGAIN[said % 8])
                request.num_computed_tokens = request.num_tokens - 1
            said += 1
            drafter.replied([], num_rows)
            num_compared += sum(state.num_tokens for state in drafter._states.values()) > before

    say(64, 64)
    assert not drafter.pays
    assert num_compared == 0
    for num_tokens in range(1, 300, 20):
        drafter.measured(num_tokens, 0.001, 0.0)  # a smaller model
    say(RARELY, 64)
    assert num_compared
    assert drafter.pays
    following = [AGAIN[(said + ahead) % 8] for ahead in range(4)]
    assert {tuple(token_ids) for _, token_ids in drafter.drafts(64, waits=True)} == {tuple(following)}


def test_those_who_were_guessed_rightly_and_all_others_are_looked_at_in_turns() -> None:
    drafter = Drafter(4, 3)
    costly(drafter, 8, 0.0005)
    known = [predictable(drafter, rounds=3) for _ in range(4)]
    new = [create_request(4, max_tokens=200) for _ in range(4)]
    for request in new:
        request.status = RequestStatus.RUNNING
        drafter.begin(request)
    for index in range(200):
        for request in [*known, *new]:
            request.output_token_ids.append(AGAIN[index % 8] if request in new else 1000 + index)
        drafter.replied([], 8)
    assert set(drafter._followed) == set(new)


@pytest.mark.parametrize(("pays", "share"), [(True, 8), (False, 2)])
def test_answers_that_ended_are_taken_together(pays: bool, share: int) -> None:
    drafter = Drafter(4, 3)
    requests = [create_request(4, max_tokens=200) for _ in range(16)]
    for request in requests:
        drafter.begin(request)
        request.output_token_ids = list(range(10))
    taken = []
    for request in requests[:-1]:
        request.status = RequestStatus.FINISHED
        drafter.pays = pays
        drafter.replied([request], 16)
        taken.append(drafter._finished.num_tokens)
    together = 16 // share
    assert taken == [10 * together * ((index + 1) // together) for index in range(15)]


def test_nothing_that_ended_is_forgotten_when_nobody_is_left() -> None:
    drafter = Drafter(4, 3)
    request = create_request(4, max_tokens=200)
    drafter.begin(request)
    request.output_token_ids = list(range(10))
    request.status = RequestStatus.FINISHED
    drafter.replied([request], 200)
    assert drafter._finished.num_tokens == 0
    drafter.begin(create_request(4, max_tokens=200))
    assert drafter._finished.num_tokens == 10


def test_while_guesses_do_not_pay_what_is_done_for_them_takes_little_of_the_time() -> None:
    now, spent = 0.0, 0.0
    drafter = Drafter(4, 3, clock=lambda: now)
    costly(drafter, 30, 0.002)
    compare = drafter._compare

    def slowly():
        nonlocal now, spent
        now += 50e-6
        spent += 50e-6
        compare()

    drafter._compare = slowly
    requests = many_who_repeat_themselves(drafter, 30)
    before = spent
    for index in range(800):
        for request in requests:
            request.output_token_ids.append(AGAIN[index % 8])
        drafter.replied([], 30)
    assert not drafter.pays
    assert 0.004 < (spent - before) / (800 * 0.002) < 0.006


def test_guesses_that_pay_again_are_noticed_the_sooner_the_shorter_they_did_not() -> None:
    now = 0.0
    drafter = Drafter(4, 3, clock=lambda: now)
    drafter.measured(1, 0.001, 0.0)
    request = predictable(drafter, rounds=3)
    compare = drafter._compare

    def slowly():
        nonlocal now
        now += 1.0
        compare()

    drafter._compare = slowly
    for num_wrong in (4, 64):
        answer(drafter, request, AGAIN * 3)
        assert drafter.pays
        answer(drafter, request, range(500, 500 + num_wrong))
        assert not drafter.pays
        num_more = 0
        while not drafter.pays:
            answer(drafter, request, [AGAIN[num_more % 8]])
            num_more += 1
        # A look finds them, comparisons of at least eight tokens tell how often they are right.
        assert num_more <= 8 + 2 * min(num_wrong, RARELY)
