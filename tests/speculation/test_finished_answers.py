"""The newest finished answers, and where in them the same tokens stood."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.whatif.virtual_drafter import TakenSlots


def followed(finished: FinishedAnswers, namespace: str, tokens: list[int], length: int) -> list[int]:
    found = finished.find(namespace, tokens, length)
    return [] if found is None else list(found[0][found[1] :])


def test_the_oldest_answers_make_room_and_leave_nothing() -> None:
    finished = FinishedAnswers(2, 8)
    finished.add([("a", (1, 2, 3, 4))])
    finished.add([("b", (1, 2, 5, 6)), ("b", (1, 2, 7, 8))])
    assert followed(finished, "a", [1, 2], 2) == []
    assert followed(finished, "b", [1, 2], 2) == [7, 8]
    assert finished.num_tokens == 8
    finished.add([("b", (4, 5, 6, 7, 8, 9, 1, 2))])
    assert followed(finished, "b", [1, 2], 2) == []
    assert followed(finished, "b", [4, 5, 6, 7], 4) == [8, 9, 1, 2]
    finished.add([("b", tuple(range(9)))])  # too long alone
    assert followed(finished, "b", [7, 8], 2) == [9, 1, 2]
    assert finished.num_tokens == 8


def test_a_forgotten_answer_takes_no_place_of_a_newer_one_with_it() -> None:
    finished = FinishedAnswers(2, 8)
    for tokens in ((1, 2, 3, 4), (1, 2, 3, 5), (8, 8, 8, 8)):
        finished.add([("a", tokens)])
    assert followed(finished, "a", [1, 2], 2) == [3, 5]


def test_answers_taken_together_do_not_run_into_each_other() -> None:
    finished = FinishedAnswers(2, 100)
    finished.add([("a", (1, 2)), ("a", ()), ("a", (3, 4, 5)), ("b", (6, 7))])
    assert followed(finished, "a", [1, 2], 2) == followed(finished, "a", [2, 3], 2) == []
    assert followed(finished, "a", [3, 4], 2) == [5]
    assert followed(finished, "a", [5, 6], 2) == followed(finished, "b", [5, 6], 2) == []


@settings(max_examples=100)
@given(
    batches=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from("ab"),
                st.lists(st.integers(0, 3), max_size=9).map(tuple),
            ),
            max_size=4,
        ),
        max_size=8,
    ),
    length=st.integers(1, 2),
)
def test_what_is_found_stood_there_in_one_of_the_newest_answers(batches, length) -> None:
    finished, newest = FinishedAnswers(length, 24), []
    for batch in batches:
        finished.add(batch)
        newest += batch
        while sum(len(tokens) for _, tokens in newest) > 24:
            newest.pop(0)
        for namespace, wanted in ((each, long * length) for each in "ab" for long in (1, 2)):
            for tokens in {part[at : at + wanted] for _, part in newest for at in range(len(part) - wanted + 1)}:
                found = finished.find(namespace, [3, *tokens], wanted)
                if found is not None:
                    answer, index = found
                    assert (namespace, answer) in newest
                    assert answer[index - wanted : index] == tokens
                    assert index < len(answer)


def test_a_table_that_takes_less_memory_and_another_salt_find_the_same() -> None:
    rng = random.Random(1)
    plain, sparse = FinishedAnswers(2, 64, salt=len), FinishedAnswers(2, 64, salt=len, table=TakenSlots)
    for _ in range(40):
        said = [("ab"[rng.randrange(2)], tuple(rng.choices(range(4), k=rng.randint(0, 20)))) for _ in range(3)]
        plain.add(said)
        sparse.add(said)
        tokens = rng.choices(range(4), k=9)
        for length in (2, 4):
            assert sparse.find("a", tokens, length) == plain.find("a", tokens, length)


def test_nearly_all_is_found() -> None:
    """Slots are shared now and then, since there are twice to four times as many as tokens."""
    finished = FinishedAnswers(3, 2**12)
    answers = [tuple(range(start, start + 64)) for start in range(0, 64 * 64, 64)]
    for first in range(0, 64, 8):
        finished.add([("", answer) for answer in answers[first : first + 8]])
    for length in (3, 6):
        cases = [(answer, index) for answer in answers for index in range(length, 64)]
        hits = [finished.find("", list(answer[:index]), length) == (answer, index) for answer, index in cases]
        assert sum(hits) > 0.7 * len(hits)
