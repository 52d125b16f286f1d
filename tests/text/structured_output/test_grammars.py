"""Grammars of clients, translated for llguidance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import is_lark_syntax
from llm_serving.text.structured_output.grammars import any_grammar, is_lark

PARTS = ("start", ":", " ", "\n", "\r", "\t", "%llguidance", "a", "root ::= ")


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_is_lark_agrees_with_llguidance(text: str) -> None:
    assert is_lark(text) == is_lark_syntax(text)


def test_is_lark_time_is_linear_in_blank_lines() -> None:
    """llguidance's own search takes time quadratic in their number while it holds Python's lock."""
    blank = "\n" * 60_000
    assert not is_lark(f'root ::= "a"{blank}')
    assert is_lark(f"{blank}start: /a/")
    assert any_grammar(f'root ::= "a"{blank}') == any_grammar('root ::= "a"')
