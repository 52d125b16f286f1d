"""What may follow an output depends on the output alone."""

from __future__ import annotations

import random

import numpy as np
from constraint_runs import END, allowed_ids
from fakes import DEMO_CONSTRAINTS
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.text.constraints.grammars import json_grammar, regex_grammar

SCHEMA = json_grammar('{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}')


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), asked=st.lists(st.integers(0, 12), max_size=12))
def test_whatever_was_asked_before(seed: int, asked: list[int]) -> None:
    constraint = DEMO_CONSTRAINTS.compiled(SCHEMA)
    choose = random.Random(seed).choice
    output: list[int] = []
    for _ in range(12):
        output.append(choose([each for each in allowed_ids(constraint.begin().allowed_words(output)) if each != END]))
        if allowed_ids(constraint.begin().allowed_words(output)) == [END]:
            break
    walk = constraint.begin()
    for length in asked:
        np.testing.assert_array_equal(
            walk.allowed_words(output[:length]), constraint.begin().allowed_words(output[:length])
        )


def test_an_output_that_does_not_keep_to_it_may_not_go_on() -> None:
    walk = DEMO_CONSTRAINTS.compiled(regex_grammar("[0-9]")).begin()
    before = walk.allowed_words([])
    assert not walk.allowed_words([END]).any()
    np.testing.assert_array_equal(walk.allowed_words([]), before)
