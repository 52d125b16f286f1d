"""Ids of an awkward corpus are those of the reference libraries; `golden_ids.py` writes the files and the ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "tokenizers"
EXPECTED = json.loads((FOLDER / "expected.json").read_text("utf-8"))


def unpacked(runs):
    return [item for item, count in runs for _ in range(count)]


@pytest.fixture(scope="module", params=sorted(EXPECTED))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return Tokenizer.load(FOLDER / name)


def test_ids_are_those_of_the_reference(name, tokenizer):
    different = {}
    for title, text, with_special, without in EXPECTED[name]:
        text = "".join(unpacked(text))
        ours = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
        reference = unpacked(with_special), unpacked(without)
        if ours != reference:
            different[title] = [(a[:40], b[:40]) for a, b in zip(ours, reference, strict=True)]
    assert different == {}


def test_texts_without_tokens_in_them_come_back(name, tokenizer):
    for title, text, _, _ in EXPECTED[name]:
        text = "".join(unpacked(text))
        exact = "unigram" not in name and "underline" not in title and "special" not in title
        if exact and not ("qwen" in name and title in ("combining", "Hebrew with marks")):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text, title


def test_two_tokens_beyond_the_file_may_begin_a_text():
    tokenizer = Tokenizer.load(FOLDER / "llama_without_prefix")
    assert tokenizer.encode("<|call|><s>", add_special_tokens=False) == [500, 1]
