"""Compiled grammars: which outputs they allow, and the errors of grammars that cannot be compiled."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from llm_serving.text.structured_output import ConstraintCompiler, Grammar, GrammarError, GrammarLimits
from llm_serving.text.structured_output.compiler import _with_a_large_stack
from llm_serving.text.structured_output.grammars import (
    WHITESPACES,
    any_grammar,
    choice_grammar,
    json_grammar,
    lark_grammar,
    literal,
    regex_grammar,
)
from support.constraint_runs import END, allowed_ids, random_answer
from support.fakes import DEMO_CONSTRAINTS, DEMO_TOKENIZER


def answers(grammar: Grammar, count: int = 20) -> set[str | None]:
    """Return random outputs; None: incomplete."""
    return {random_answer(DEMO_CONSTRAINTS.compiled(grammar), random.Random(seed), 60) for seed in range(count)}


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (choice_grammar(["a", "ab", 'say "c"\n']), {"a", "ab", 'say "c"\n'}),
        (regex_grammar("(x|yy)/?"), {"x", "yy", "x/", "yy/"}),
        (any_grammar('root ::= first "!"?\nfirst ::= "a" | "b" # of two'), {"a", "b", "a!", "b!"}),
        (any_grammar('start: first "!"?\nfirst: "a" | "b"'), {"a", "b", "a!", "b!"}),
        (json_grammar('{"enum": [1, "a", null]}'), {"1", '"a"', "null"}),
        (lark_grammar(f"start: {literal('<')} @a {literal('>')}", a=regex_grammar("1|2")), {"<1>", "<2>"}),
    ],
)
def test_grammar_accepts_and_refuses_texts(grammar: Grammar, expected: set[str]) -> None:
    assert answers(grammar) == expected


def test_json_properties_keep_order_and_large_integers() -> None:
    properties = '{"b": {"const": true}, "a": {"const": 9007199254740991}}'
    schema = f'{{"properties": {properties}, "required": ["b", "a"], "additionalProperties": false, "type": "object"}}'
    [answer] = answers(json_grammar(schema, whitespace=" ?"), 1)
    assert answer is not None
    assert list(json.loads(answer).items()) == [("b", True), ("a", 9007199254740991)]


@pytest.mark.parametrize(
    ("whitespace", "most"),
    [(WHITESPACES["none"], 0), (WHITESPACES["space"], 1), (WHITESPACES["lines"], 32)],
)
def test_json_white_space_is_bounded(whitespace: str, most: int) -> None:
    matcher = DEMO_CONSTRAINTS.compiled(
        json_grammar('{"type": "array", "items": {"const": 1}}', whitespace)
    ).create_matcher()
    output, space = [token_of("[")], token_of(" ")
    while allows(matcher.allowed_words(output), space):
        output.append(space)
    assert len(output) == 1 + most
    assert allows(matcher.allowed_words(output), token_of("1"))


def test_end_token_is_allowed_only_at_the_end_of_the_grammar() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("ab?")).create_matcher()
    a, b = map(token_of, ("a", "b"))
    assert not allows(matcher.allowed_words([]), END)
    assert allows(matcher.allowed_words([a]), END)
    assert allows(matcher.allowed_words([a]), b)
    assert allowed_ids(matcher.allowed_words([a, b])) == [END]


def token_of(text: str) -> int:
    return next(i for i in range(DEMO_TOKENIZER.vocab_size) if DEMO_TOKENIZER.token_bytes(i) == text.encode())


def allows(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def test_special_tokens_match_no_text() -> None:
    words = DEMO_CONSTRAINTS.compiled(regex_grammar("(?s:.)*")).create_matcher().allowed_words([])
    assert [token_id for token_id in sorted(DEMO_TOKENIZER.special_token_ids) if allows(words, token_id)] == [END]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, 'cannot be compiled at #: Unimplemented keys: ["uniqueItems"]'),
        (
            {"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"format": "x", "type": "string"}]}}}},
            "cannot be compiled at #/properties/a~1b/items/anyOf/1: Unknown format: x",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"not": {"type": "null"}}}}}},
            "cannot be compiled at #/$defs/a/properties/b: Unimplemented keys",
        ),
        ({"enum": []}, "cannot be compiled at #: Unsatisfiable schema"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "retrieving it failed"),
    ],
)
def test_schema_error_contains_a_json_pointer(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        DEMO_CONSTRAINTS.compiled(json_grammar(json.dumps(schema)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make", [lambda: any_grammar('root ::= ( "a"'), lambda: json_grammar("[]"), lambda: json_grammar("{")]
)
def test_invalid_grammar_is_refused_without_compiling(make: Any) -> None:
    with pytest.raises(GrammarError):
        make()


@pytest.mark.parametrize(
    ("grammar", "message"), [("start: foo", '1(8): unknown name: "foo"'), ("start: (", "1(9): Expected token")]
)
def test_grammar_error_contains_the_position(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled") as caught:
        DEMO_CONSTRAINTS.compiled(lark_grammar(grammar))
    assert message in str(caught.value)


def chain(count: int, rule: str, last: str) -> str:
    return "start: r0\n" + "\n".join(rule.format(i, i + 1) for i in range(count)) + "\n" + last.format(count)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(chain(3300, 'r{0}: "x" r{1}', 'r{0}: "y"'), id="nested beyond any stack"),
        pytest.param(
            chain(2800, 'T{0}: ("x"|T{1})*', 'T{0}: "y"').replace("r0", "T0"), id="takes many seconds to compile"
        ),
    ],
)
def test_grammar_that_crashes_the_compiler_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="takes too much time or memory to compile"):
        DEMO_CONSTRAINTS.compiled(lark_grammar(text))
    assert answers(choice_grammar(["a"]), 1) == {"a"}  # the next request is served


def test_long_forced_text_costs_one_mask_per_token() -> None:
    matcher = DEMO_CONSTRAINTS.compiled(regex_grammar("(abc){1000}{1000}")).create_matcher()
    assert {DEMO_TOKENIZER.token_text(token_id) for token_id in allowed_ids(matcher.allowed_words([]))} >= {"a", "ab"}


def test_compiled_grammars_are_cached() -> None:
    compiler = ConstraintCompiler(DEMO_TOKENIZER, frozenset({END}), 2048, GrammarLimits(num_kept=2))
    first, *others = (regex_grammar(f"a{{{count}}}") for count in (1, 2, 3))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compiled(first))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert compiler.compiled(first) is found[0]
    for each in others:
        compiler.compiled(each)
    again = compiler.compiled(first)
    assert again is not found[0]
    assert again == found[0]


def test_invalid_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(DEMO_TOKENIZER, frozenset({END}), 2048)
    tried: list[Grammar] = []
    real = compiler._try
    monkeypatch.setattr(compiler, "_try", lambda grammar: (tried.append(grammar), real(grammar)))
    for _ in range(3):
        with pytest.raises(GrammarError, match="cannot be compiled"):
            compiler.compiled(lark_grammar("start: missing"))
    assert len(tried) == 1


def test_large_grammar_is_refused() -> None:
    compiler = ConstraintCompiler(DEMO_TOKENIZER, frozenset({END}), 2048, GrammarLimits(max_bytes=1024))
    with pytest.raises(GrammarError, match="must have at most 1024 bytes"):
        compiler.compiled(regex_grammar("a" * 1000))


def test_compiling_restores_the_thread_stack_size():
    before = threading.stack_size()
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda number: _with_a_large_stack(lambda: number), range(200))) == sum(range(200))
    assert threading.stack_size() == before
