"""Incremental detokenization equals decoding all tokens at once."""

from __future__ import annotations

import itertools
from pathlib import Path

import llm_serving.demo_model
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.tokenizer.detokenizer import IncrementalDetokenizer
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.tokenizer_files import byte_fallback_folder, byte_level_folder

demo = Tokenizer.load(Path(llm_serving.demo_model.__file__).parent)


@pytest.fixture(scope="module", params=["demo", "byte level", "byte fallback"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "demo":
        return demo
    return Tokenizer.load((byte_level_folder if request.param == "byte level" else byte_fallback_folder)(folder))


def pieces_of(token_ids, borders):
    points = sorted({border for border in borders if border < len(token_ids)} | {0, len(token_ids)})
    return [token_ids[a:b] for a, b in itertools.pairwise(points)]


def run(detokenizer, pieces):
    return "".join([detokenizer.add(piece) for piece in pieces]) + detokenizer.flush()


TEXTS = st.text(st.sampled_from("helo wrd\n😀é一👩‍👧"), max_size=20)
BORDERS = st.lists(st.integers(0, 60))


@given(text=TEXTS, borders=BORDERS)
def test_detokenized_pieces_join_to_the_text(tokenizer, text, borders):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert run(IncrementalDetokenizer(tokenizer), pieces_of(ids, borders)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 300), max_size=40), borders=BORDERS, skip=st.booleans())
def test_detokenized_pieces_of_any_tokens_join_to_their_decoding(tokenizer, ids, borders, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert run(detokenizer, pieces_of(ids, borders)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(prompt=TEXTS.filter(bool), text=TEXTS, split=st.integers(0, 60))
def test_detokenizer_continues_the_prompt(tokenizer, prompt, text, split):
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)
    before, after = ids[:split], ids[split:]
    whole = tokenizer.decode(ids)
    shown = IncrementalDetokenizer(tokenizer)
    assert shown.add(before) + run(IncrementalDetokenizer(tokenizer, before), [[i] for i in after]) == whole


@given(
    text=TEXTS,
    borders=BORDERS,
    stop=st.lists(st.text(st.sampled_from("helo 😀é"), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_are_independent_of_text_pieces(text, borders, stop):
    ids = demo.encode(text, add_special_tokens=False)
    whole, pieces = IncrementalDetokenizer(demo, stop=stop), IncrementalDetokenizer(demo, stop=stop)
    assert run(pieces, pieces_of(ids, borders)) == run(whole, [ids])
    assert pieces.stop_string == whole.stop_string


def test_detokenizer_holds_back_an_incomplete_character():
    ids = demo.encode("a😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(demo, [5])
    assert [detokenizer.add([token_id]) for token_id in ids] == [" a", "", "", "", "😀"]


def test_detokenizer_replaces_an_incomplete_character_at_the_end():
    ids = demo.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(demo)
    assert detokenizer.add(ids) == "a"
    assert detokenizer.flush() == "�"


def test_detokenizer_completes_a_character_begun_in_the_prompt():
    ids = demo.encode("😀", add_special_tokens=False)
    assert IncrementalDetokenizer(demo, ids[:-2]).add(ids[-2:]) == "😀"


def test_detokenizer_removes_the_leading_space_without_a_prompt_text():
    ids = demo.encode("hello", add_special_tokens=False)
    assert IncrementalDetokenizer(demo, [1]).add(ids) == "hello"
    assert IncrementalDetokenizer(demo, [1, *ids]).add(ids) == " hello"


def test_stop_string_is_reported_and_removed():
    detokenizer = IncrementalDetokenizer(demo, stop=["\n\n", "lo"])
    assert detokenizer.add(demo.encode("hello there", add_special_tokens=False)) == "hel"
    assert detokenizer.stop_string == "lo"
    assert detokenizer.add([500]) == ""
    assert detokenizer.flush() == ""


def test_stop_string_is_kept_on_request():
    detokenizer = IncrementalDetokenizer(demo, stop=["lo"], include_stop_str_in_output=True)
    assert detokenizer.add(demo.encode("hello there", add_special_tokens=False)) == "hello"


def test_partial_stop_string_is_released_at_the_end():
    detokenizer = IncrementalDetokenizer(demo, [5], stop=["lo!"])
    assert detokenizer.add(demo.encode("hello", add_special_tokens=False)) == " hel"
    assert detokenizer.flush() == "lo"


def test_detokenizer_adds_nothing_for_ids_without_text():
    assert IncrementalDetokenizer(demo).add([-1, 10**9]) == ""
