"""Token ids of an awkward corpus equal those of the reference libraries; `golden_ids.py` writes files and ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.tokenizer import Tokenizer

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


def test_token_ids_equal_the_reference(name, tokenizer):
    different = {}
    for title, text, with_special, without in EXPECTED[name]:
        text = "".join(unpacked(text))
        ours = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
        reference = unpacked(with_special), unpacked(without)
        if ours != reference:
            different[title] = [(a[:40], b[:40]) for a, b in zip(ours, reference, strict=True)]
    assert different == {}


def test_texts_without_special_tokens_round_trip(name, tokenizer):
    for title, text, _, _ in EXPECTED[name]:
        text = "".join(unpacked(text))
        exact = "unigram" not in name and "underline" not in title and "special" not in title
        if exact and not ("qwen" in name and title in ("combining", "Hebrew with marks")):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text, title


def test_glm4_prefix_tokens_may_have_ids_beyond_the_vocabulary_file():
    tokenizer = Tokenizer.load(FOLDER / "llama_without_prefix")
    assert tokenizer.encode("<|call|><s>", add_special_tokens=False) == [500, 1]


@pytest.fixture
def pairs(tmp_path):
    """A folder in the older form: vocabulary and merges, without a tokenizer.json."""
    source = FOLDER / "json_qwen2"
    model = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    return tmp_path


def test_vocab_and_merges_equal_the_tokenizer_json(pairs):
    tokenizer, reference = Tokenizer.load(pairs), Tokenizer.load(FOLDER / "json_qwen2")
    for title, text, with_special, _ in EXPECTED["json_qwen2"]:
        assert tokenizer.encode("".join(unpacked(text))) == unpacked(with_special), title
    assert tokenizer.token_tables(True) == reference.token_tables(True)
    assert tokenizer.special_token_ids == reference.special_token_ids
    assert tokenizer.eos_token_ids == reference.eos_token_ids


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "RobertaTokenizer"}', "must be one of GPT2Tokenizer, Qwen2"),
        ("tokenizer_config.json", "{}", r"Given: None\. For other classes, write a tokenizer\.json with transformers"),
        ("vocab.json", '{"a": 0, "b": 0}', "each token to an id of its own"),
        ("vocab.json", '{"a": 0, "b": "1"}', "each token to an id of its own"),
        ("vocab.json", '{"a": 0, "b": -1}', "each token to an id of its own"),
        ("merges.txt", "#version: 0.2\na nowhere", "must list pairs of tokens in vocab.json that form a token"),
        ("merges.txt", "a", "must list pairs of tokens in vocab.json that form a token. Found: 'a'"),
    ],
)
def test_unsupported_vocab_and_merges_error_has_a_reason(pairs, name, content, message):
    (pairs / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(pairs)


def test_vocab_without_merges_is_refused(pairs):
    (pairs / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"none of .*, vocab\.json with merges\.txt; "):
        Tokenizer.load(pairs)
