"""The tokens allowed after an output depend on the output alone."""

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
def test_masks_are_independent_of_earlier_queries_and_drafts(seed: int, asked: list[tuple[int, int, bool]]) -> None:
    constraint = DEMO_CONSTRAINTS.compiled(SCHEMA)
    choose = random.Random(seed).choice
    output: list[int] = []
    for _ in range(12):
        output.append(
            choose([each for each in allowed_ids(constraint.create_matcher().allowed_words(output)) if each != END])
        )
        if allowed_ids(constraint.create_matcher().allowed_words(output)) == [END]:
            break
    matcher = constraint.create_matcher()
    for length, num_draft_tokens, wrong in asked:
        draft = [*output[length : length + num_draft_tokens]]
        if wrong and draft:
            draft[choose(range(len(draft)))] = choose([END, *range(3, 300)])
        matcher.constrain_draft(output[:length], draft, choose(range(8)))
        allowed = matcher.allowed_words_after_drafts(output[:length], draft)
        for count, words in enumerate(allowed):
            expected = constraint.create_matcher().allowed_words(output[:length] + draft[:count])
            np.testing.assert_array_equal(words, expected)
        assert len(allowed) == len(draft) + 1


def test_output_outside_the_grammar_allows_no_token() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("[0-9]")).create_matcher()
    before = matcher.allowed_words([])
    assert not matcher.allowed_words([END]).any()
    np.testing.assert_array_equal(matcher.allowed_words([]), before)


def tokens_of(text: str) -> list[int]:
    """Return one token for each byte; if several tokens have the byte, the last one."""
    known = {DEMO_TOKENIZER.token_bytes(token_id): token_id for token_id in range(DEMO_TOKENIZER.vocab_size)}
    return [known[bytes([byte])] for byte in text.encode()]


def test_drafts_are_cut_at_the_first_forbidden_token() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("[a-z]{2,9}")).create_matcher()
    output, draft = tokens_of("ab"), tokens_of("cd3e")
    assert matcher.constrain_draft(output, draft, 8) == draft[:2]
    assert matcher.constrain_draft(output, draft, 1) == draft[:1]
    assert matcher.constrain_draft(tokens_of("a3"), draft, 8) == []


def test_forced_text_is_drafted_in_the_longest_tokens() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("x(y|z)the same")).create_matcher()
    text = [DEMO_TOKENIZER.token_bytes(each) for each in matcher.constrain_draft(tokens_of("xy"), [], 20)[:-1]]
    assert b"".join(text) == b"the same"
    assert len(text) < len("the same")
    assert matcher.constrain_draft(tokens_of("xy"), [], 20)[-1] == END
    assert matcher.constrain_draft(tokens_of("x"), [], 20) == []
    assert matcher.constrain_draft(tokens_of("x"), tokens_of("yq"), 2)[:1] == tokens_of("y")
    assert len(matcher.constrain_draft(tokens_of("xz"), [], 2)) == 2


def test_forced_tokens_replace_a_forbidden_draft() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("ab")).create_matcher()
    assert matcher.constrain_draft(tokens_of("a"), tokens_of("c"), 4) == [*tokens_of("b"), END]


def test_no_token_is_forced_where_the_output_may_end() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("a(b)?")).create_matcher()
    assert matcher.constrain_draft(tokens_of("a"), [], 4) == []


def test_lexer_limit_used_by_other_outputs_restarts_the_matcher() -> None:
    """The lexer states of a compiled grammar are shared by all its outputs."""
    grammar = regex_grammar("[a-z]{1,8}(-[a-z0-9]{1,8}){0,40}")
    compiler = ConstraintCompiler(
        DEMO_TOKENIZER, frozenset({END}), DEMO_TOKENIZER.vocab_size, GrammarLimits(max_states=60)
    )
    constraint = compiler.compiled(grammar)
    texts = ["a" * count + "-" + "b1" * 4 + "-c" * rest for count in range(1, 9) for rest in range(1, 5)]
    matchers = []
    for text in texts:  # each of them alone stays below
        output = tokens_of(text)
        alone = DEMO_CONSTRAINTS.compiled(grammar).create_matcher().allowed_words(output)
        assert alone.any()
        matcher = constraint.create_matcher()
        for end in range(len(output)):
            matcher.allowed_words_after_drafts(output[:end], output[end : end + 2])
        allowed = matcher.allowed_words(output)
        matchers.append(constraint._start)
        np.testing.assert_array_equal(allowed, alone)
    assert len({id(each) for each in matchers}) > 1, "the limit was not met"
