from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from llm_serving_receipts.receipt import has_hash, response_texts


@pytest.mark.parametrize(
    ("choices", "texts"),
    [
        ([{"index": 1, "text": "b"}, {"index": 0, "text": "a"}], {0: "a", 1: "b"}),
        ([{"message": {"content": "a"}}], {0: "a"}),
        ([{"message": {"content": "a", "tool_calls": [{}]}}], {}),
        ([{"message": {"content": "b", "reasoning_content": "c"}}], {}),
        ([{"message": {"content": None}}, None, {"index": "0", "text": "a"}], {}),
        ("nonsense", {}),
    ],
)
def test_response_texts_omits_choices_with_calls_or_reasoning(choices: Any, texts: dict[int, str]) -> None:
    assert response_texts({"choices": choices}) == texts


@pytest.mark.parametrize(
    ("text", "is_one"), [("ab", True), ("x yab", True), ("yab", True), ("xab", False), ("a", False)]
)
def test_digest_accepts_a_text_after_the_end_of_its_prompt(text: str, is_one: bool) -> None:
    assert has_hash(text, "x y", sha256(b"ab").hexdigest()) == is_one
