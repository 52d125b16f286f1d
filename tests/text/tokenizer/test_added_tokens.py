"""`TokenSplitter` finds added tokens in a text."""

from __future__ import annotations

import pytest
from llm_serving.text.tokenizer.tokenizer import read_vocabulary
from llm_serving.text.tokenizer.vocabulary import TokenSplitter, read_added_tokens
from tokenizers import AddedToken


def split(text, *tokens):
    return TokenSplitter({token.content: token for token in tokens}).split(text)


def test_splitter_finds_the_longest_token():
    tokens = AddedToken("<a>", special=True), AddedToken("<a>b", special=True)
    assert split("x<a>b<a>c", *tokens) == [("x", False), ("<a>b", True), ("<a>", True), ("c", False)]


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ({"lstrip": True}, [("a", False), ("<t>", True), (" b", False)]),
        ({"rstrip": True}, [("a ", False), ("<t>", True), ("b", False)]),
        ({}, [("a ", False), ("<t>", True), (" b", False)]),
    ],
)
def test_splitter_strips_white_space_beside_a_token(flag, parts):
    assert split("a <t> b", AddedToken("<t>", special=True, **flag)) == parts


def test_splitter_strips_a_part_of_white_space_only():
    assert split("<t> \n", AddedToken("<t>", special=True, rstrip=True)) == [("<t>", True)]


@pytest.mark.parametrize(("text", "found"), [("a is b", True), ("is", True), ("this b", False), ("a isle", False)])
def test_single_word_token_is_not_found_inside_a_word(text, found):
    parts = split(text, AddedToken("is", special=False, single_word=True))
    assert any(is_token for _, is_token in parts) == found
    assert "".join(part for part, _ in parts) == text


def test_splitter_without_tokens_returns_one_part():
    assert split("abc") == [("abc", False)]
    assert split("") == []


def test_malformed_added_tokens_are_omitted():
    good = {"content": "<t>", "special": True, "rstrip": True, "normalized": False}
    others = {"x": good, "-1": good, str(2**24): good, "1": 5, "2": {"content": 5}, "3": {"content": ""}}
    [(token_id, token)] = read_added_tokens({"added_tokens_decoder": {"7": good, **others}}).items()
    assert (token_id, {name: getattr(token, name) for name in good}) == (7, good)
    assert not any((token.lstrip, token.single_word))
    assert read_added_tokens({"added_tokens_decoder": []}) == {}


@pytest.mark.parametrize(
    ("attributes", "text", "ids"),
    [
        ({"special": True, "lstrip": True}, "x   [MASK]", [5, 4]),
        ({"special": True, "single_word": True}, "x[MASK]", [5, 6, 7, 8]),
        ({"special": False}, "[mask]", [4]),
    ],
)
def test_word_pieces_keep_the_attributes_of_their_special_tokens(tmp_path, attributes, text, ids):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", "[", "mask", "]"]))
    config = {"added_tokens_decoder": {"4": {"content": "[MASK]", **attributes}}, "mask_token": "[MASK]"}
    assert read_vocabulary(path, config).encode(text, add_special_tokens=False) == ids


def test_tokens_that_become_special_by_name_are_still_found_in_the_normalized_text(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "<end>"]))
    config = {"added_tokens_decoder": {"3": {"content": "<end>", "special": False}}, "eos_token": "<end>"}
    vocabulary = read_vocabulary(path, config)
    assert vocabulary.encode("<END>", add_special_tokens=False) == [3]
    assert 3 in vocabulary.special_ids


def test_added_token_with_an_id_of_thousands_of_digits_is_omitted():
    assert read_added_tokens({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}) == {}
