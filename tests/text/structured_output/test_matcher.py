"""What may follow an output depends on the output alone."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.text.structured_output.compiler import ConstraintCompiler, GrammarLimits
from llm_serving.text.structured_output.grammars import json_grammar, regex_grammar
from support.constraint_runs import END, allowed_ids
from support.fakes import DEMO_CONSTRAINTS, DEMO_TOKENIZER

SCHEMA = json_grammar('{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}')


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=12),
)
def test_whatever_was_asked_or_guessed_before(seed: int, asked: list[tuple[int, int, bool]]) -> None:
    constraint = DEMO_CONSTRAINTS.compiled(SCHEMA)
    choose = random.Random(seed).choice
    output: list[int] = []
    for _ in range(12):
        output.append(choose([each for each in allowed_ids(constraint.begin().allowed_words(output)) if each != END]))
        if allowed_ids(constraint.begin().allowed_words(output)) == [END]:
            break
    walk = constraint.begin()
    for length, num_guesses, wrong in asked:
        guesses = [*output[length : length + num_guesses]]
        if wrong and guesses:
            guesses[choose(range(len(guesses)))] = choose([END, *range(3, 300)])
        walk.possible(output[:length], guesses, choose(range(8)))
        told = walk.allowed_behind(output[:length], guesses)
        for count, words in enumerate(told):
            expected = constraint.begin().allowed_words(output[:length] + guesses[:count])
            np.testing.assert_array_equal(words, expected)
        assert len(told) == len(guesses) + 1


def test_an_output_that_does_not_keep_to_it_may_not_go_on() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("[0-9]")).begin()
    before = walk.allowed_words([])
    assert not walk.allowed_words([END]).any()
    np.testing.assert_array_equal(walk.allowed_words([]), before)


def tokens_of(text: str) -> list[int]:
    """A token a byte; of those for the same byte the last."""
    known = {DEMO_TOKENIZER.token_bytes(token_id): token_id for token_id in range(DEMO_TOKENIZER.vocab_size)}
    return [known[bytes([byte])] for byte in text.encode()]


def test_guesses_are_possible_up_to_the_first_that_is_forbidden() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("[a-z]{2,9}")).begin()
    output, guesses = tokens_of("ab"), tokens_of("cd3e")
    assert walk.possible(output, guesses, 8) == guesses[:2]
    assert walk.possible(output, guesses, 1) == guesses[:1]
    assert walk.possible(tokens_of("a3"), guesses, 8) == []


def test_what_must_follow_is_told_in_the_longest_tokens_and_as_far_as_asked() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("x(y|z)the same")).begin()
    text = [DEMO_TOKENIZER.token_bytes(each) for each in walk.possible(tokens_of("xy"), [], 20)[:-1]]
    assert b"".join(text) == b"the same"
    assert len(text) < len("the same")
    assert walk.possible(tokens_of("xy"), [], 20)[-1] == END
    assert walk.possible(tokens_of("x"), [], 20) == []
    assert walk.possible(tokens_of("x"), tokens_of("yq"), 2)[:1] == tokens_of("y")
    assert len(walk.possible(tokens_of("xz"), [], 2)) == 2


def test_a_wrong_guess_is_followed_by_what_must_come_in_its_place() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("ab")).begin()
    assert walk.possible(tokens_of("a"), tokens_of("c"), 4) == [*tokens_of("b"), END]


def test_where_an_answer_may_end_nothing_is_forced() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("a(b)?")).begin()
    assert walk.possible(tokens_of("a"), [], 4) == []


def test_what_other_answers_took_of_the_limits_is_not_missed() -> None:
    """The automaton of a compiled grammar grows with every answer that is bound to it."""
    grammar = regex_grammar("[a-z]{1,8}(-[a-z0-9]{1,8}){0,40}")
    compiler = ConstraintCompiler(
        DEMO_TOKENIZER, frozenset({END}), DEMO_TOKENIZER.vocab_size, GrammarLimits(max_states=60)
    )
    constraint = compiler.compiled(grammar)
    texts = ["a" * count + "-" + "b1" * 4 + "-c" * rest for count in range(1, 9) for rest in range(1, 5)]
    matchers = []
    for text in texts:  # each of them alone stays below
        output = tokens_of(text)
        alone = DEMO_CONSTRAINTS.compiled(grammar).begin().allowed_words(output)
        assert alone.any()
        walk = constraint.begin()
        for end in range(len(output)):
            walk.allowed_behind(output[:end], output[end : end + 2])
        told = walk.allowed_words(output)
        matchers.append(constraint._matcher)
        np.testing.assert_array_equal(told, alone)
    assert len({id(each) for each in matchers}) > 1, "the limit was not met"
