"""N-gram lookups in a request's own text and in finished answers."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.speculation.ngram import FinishedAnswersIndex, NgramLookup
from llm_serving_simulator.virtual_work_agent import SparseTable


def followed(finished: FinishedAnswersIndex, namespace: str, tokens: list[int], length: int) -> list[int]:
    found = finished.find(namespace, tokens, length)
    return [] if found is None else list(found[0][found[1] :])


def test_ngram_index_evicts_the_oldest_answers() -> None:
    finished = FinishedAnswersIndex(2, 8)
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


def test_a_removed_answer_leaves_the_slots_of_newer_ones() -> None:
    finished = FinishedAnswersIndex(2, 8)
    for tokens in ((1, 2, 3, 4), (1, 2, 3, 5), (8, 8, 8, 8)):
        finished.add([("a", tokens)])
    assert followed(finished, "a", [1, 2], 2) == [3, 5]


def test_ngrams_do_not_span_two_answers() -> None:
    finished = FinishedAnswersIndex(2, 100)
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
def test_a_match_is_in_one_of_the_newest_answers(batches, length) -> None:
    finished, newest = FinishedAnswersIndex(length, 24), []
    for batch in batches:
        finished.add(batch)
        newest += batch
        while sum(len(tokens) for _, tokens in newest) > 24:
            newest.pop(0)
        for namespace, length_ in ((each, long * length) for each in "ab" for long in (1, 2)):
            for tokens in {part[at : at + length_] for _, part in newest for at in range(len(part) - length_ + 1)}:
                found = finished.find(namespace, [3, *tokens], length_)
                if found is not None:
                    answer, index = found
                    assert (namespace, answer) in newest
                    assert answer[index - length_ : index] == tokens
                    assert index < len(answer)


def test_ngram_index_is_independent_of_table_size_and_salt() -> None:
    rng = random.Random(1)
    plain, sparse = FinishedAnswersIndex(2, 64, salt=len), FinishedAnswersIndex(2, 64, salt=len, table=SparseTable)
    for _ in range(40):
        answers = [("ab"[rng.randrange(2)], tuple(rng.choices(range(4), k=rng.randint(0, 20)))) for _ in range(3)]
        plain.add(answers)
        sparse.add(answers)
        tokens = rng.choices(range(4), k=9)
        for length in (2, 4):
            assert sparse.find("a", tokens, length) == plain.find("a", tokens, length)


def test_ngram_index_finds_most_ngrams() -> None:
    """A few n-grams share a slot: there are two to four slots per token."""
    finished = FinishedAnswersIndex(3, 2**12)
    answers = [tuple(range(start, start + 64)) for start in range(0, 64 * 64, 64)]
    for first in range(0, 64, 8):
        finished.add([("", answer) for answer in answers[first : first + 8]])
    for length in (3, 6):
        cases = [(answer, index) for answer in answers for index in range(length, 64)]
        hits = [finished.find("", list(answer[:index]), length) == (answer, index) for answer, index in cases]
        assert sum(hits) > 0.7 * len(hits)


def lookup(prompt, finished=None, namespace="", length=2):
    made = NgramLookup(prompt, namespace, length, finished or FinishedAnswersIndex(length, 100))
    made.search()
    return made


def say(made, token_ids) -> None:
    for token_id in token_ids:
        made.advance([token_id])
        if not made.has_draft:
            made.search()


def test_ngram_lookup_proposes_the_continuation_of_a_match_in_the_prompt() -> None:
    made = lookup([1, 2, 3, 4, 5, 1, 2])
    assert made.propose(3) == [3, 4, 5]
    assert made.propose(9) == [3, 4, 5, 1, 2, 3, 4, 5, 1]  # repeated


def test_ngram_lookup_without_a_match_proposes_no_draft() -> None:
    made = lookup([1, 2, 3])
    assert not made.has_draft
    assert made.propose(3) == []
    assert made.advance([4]) == (0, False)


def test_match_is_followed_until_its_first_rejection() -> None:
    made = lookup([1, 2, 3, 4, 5, 1, 2])
    assert made.advance([3]) == (1, False)
    assert made.propose(2) == [4, 5]
    assert made.advance([9]) == (0, True)
    assert made.propose(2) == []


def test_a_run_of_one_token_is_drafted_to_continue() -> None:
    made = lookup([5, 5])
    say(made, [5] * 6)
    assert made.propose(9) == [5] * 9


def test_ngram_lookup_accepts_a_prompt_shorter_than_an_ngram() -> None:
    made = lookup([1], length=3)
    say(made, (2, 3, 4, 1, 2, 3))
    assert made.propose(2) == [4, 1]


def test_ngram_lookup_uses_the_newest_match() -> None:
    assert lookup([1, 2, 3, 1, 2, 4, 1, 2]).propose(1) == [4]


def test_ngram_lookup_searches_the_output_itself() -> None:
    made = lookup([9, 9])
    say(made, (1, 2, 3, 1, 2))
    assert made.propose(2) == [3, 1]


def test_a_draft_ends_with_its_text() -> None:
    finished = FinishedAnswersIndex(2, 100)
    finished.add([("", (1, 2, 3))])
    made = lookup([1, 2], finished)
    assert made.advance([3]) == (1, False)
    assert made.propose(4) == []


def test_finished_answers_are_found_in_their_namespace_only() -> None:
    finished = FinishedAnswersIndex(2, 100)
    finished.add([("mine", (1, 2, 3, 4))])
    assert lookup([1, 2], finished, "mine").propose(4) == [3, 4]
    assert lookup([1, 2], finished, "yours").propose(4) == []


def test_ngram_lookup_uses_the_longest_match() -> None:
    finished = FinishedAnswersIndex(2, 100)
    finished.add([("", (1, 2, 3, 4, 5, 6)), ("", (3, 4, 7, 8))])
    assert lookup([3, 4], finished).propose(2) == [7, 8]  # the newest of equal length
    assert lookup([1, 2, 3, 4], finished).propose(2) == [5, 6]  # four tokens before two
    assert lookup([3, 4, 9, 3, 4], finished).propose(2) == [
        9,
        3,
    ]  # the text itself before finished answers
    assert lookup([3, 4, 9, 1, 2, 3, 4], finished).propose(2) == [5, 6]


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    answer=st.lists(st.integers(0, 5), max_size=40),
    data=st.data(),
)
def test_output_is_searched_like_a_longer_prompt(prompt, answer, data) -> None:
    finished = FinishedAnswersIndex(2, 100)
    finished.add([("", tuple(data.draw(st.lists(st.integers(0, 5), max_size=12))))])
    made = lookup(prompt, finished)
    while answer:
        piece, answer = (
            answer[: (count := data.draw(st.integers(1, 8)))],
            answer[count:],
        )
        if data.draw(st.booleans()):
            made.advance(piece)
        else:
            for token_id in piece:
                made.advance([token_id])
        prompt += piece
        other = lookup(prompt, finished)
        assert made._tokens == other._tokens
        if data.draw(st.booleans()):
            continue
        made.search()
        assert made.propose(5) == other.propose(5)
        assert (made._positions, made._ngram) == (other._positions, other._ngram)
