"""Vocabulary files of tiktoken and tekken."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from llm_serving.errors import ModelError, RequestError
from llm_serving.text.tokenizer import tiktoken
from llm_serving.text.tokenizer.tiktoken import LLAMA3, MAX_WHITE_SPACE, QWEN, TiktokenFamily, is_tiktoken_file
from llm_serving.text.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "tokenizers"


def line(data, rank):
    return base64.b64encode(data) + b" " + str(rank).encode() + b"\n"


def write_ranks(folder, ranks, name="tokenizer.model"):
    (folder / name).write_bytes(b"".join(line(data, rank) for data, rank in ranks))
    return folder


BYTES = [(bytes([byte]), byte) for byte in range(256)]


class TestTiktoken:
    def test_tiktoken_special_tokens_follow_the_ranks(self, tmp_path):
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES))
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257,))
        assert tokenizer.encode("a<|eot_id|>") == [256, 97, 265]
        assert tokenizer.vocab_size == 256 + 256 == 256 + len(set(LLAMA3.special))

    def test_tiktoken_qwen_normalizes_to_nfc_without_bos(self, tmp_path):
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES, "qwen.tiktoken"))
        assert tokenizer.encode("e\u0301<|im_end|>") == [0xC3, 0xA9, 258]
        assert tokenizer.bos_token_id is None
        assert tokenizer.vocab_size == 256 + len(set(QWEN.special)) == 256 + 208

    def test_tiktoken_config_tokens_replace_those_of_the_family(self, tmp_path):
        added = {"258": {"content": "<|mine|>", "special": True}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES))
        assert tokenizer.encode("<|mine|>", add_special_tokens=False) == [258]

    def test_tiktoken_decodes_characters_from_bytes(self, tmp_path):
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES))
        assert tokenizer.decode(tokenizer.encode("né😀<|eot_id|>")) == "né😀"

    @pytest.mark.parametrize("space", [" ", "\t", "\u3000", "\n"])
    def test_tiktoken_splits_a_million_spaces(self, tmp_path, space):
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES))
        text = "a" + space * 1_000_000 + "b"
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())

    def test_tiktoken_panic_is_a_request_error(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tiktoken, "MAX_WHITE_SPACE", 2**30)
        tokenizer = Tokenizer.load(write_ranks(tmp_path, BYTES))
        with pytest.raises(RequestError, match="cannot be split into words by the pattern"):
            tokenizer.encode(" " * (10 * MAX_WHITE_SPACE))

    @pytest.mark.parametrize(
        ("ranks", "message"),
        [
            (BYTES[1:], "must have every rank from 0 to 254 exactly once"),
            ([*BYTES[:-1], (b"ab", 255)], r"must have a token for every byte\. Missing: \[255\]"),
            ([*BYTES, (b"ab", 300)], "must have every rank from 0 to 256 exactly once"),
        ],
    )
    def test_tiktoken_refuses_ranks_with_gaps(self, tmp_path, ranks, message):
        with pytest.raises(ModelError, match=message):
            Tokenizer.load(write_ranks(tmp_path, ranks))

    def test_tiktoken_error_names_the_line(self, tmp_path):
        write_ranks(tmp_path, BYTES)
        with (tmp_path / "tokenizer.model").open("ab") as file:
            file.write(b"***\n")
        with pytest.raises(ModelError, match=r"tokenizer\.model: line 257 must be a token in base64"):
            Tokenizer.load(tmp_path)

    def test_tiktoken_refuses_an_invalid_pattern(self, tmp_path, monkeypatch):
        broken = TiktokenFamily(pattern="(", special=(), names={})
        monkeypatch.setattr(tiktoken, "LLAMA3", broken)
        with pytest.raises(ModelError, match=r"tokenizer\.model: cannot be read"):
            Tokenizer.load(write_ranks(tmp_path, BYTES))

    def test_is_tiktoken_file_requires_base64_and_rank(self):
        assert is_tiktoken_file(b"IQ== 0\nIg== 1\n")
        assert is_tiktoken_file(b"IQ== 0")
        assert not is_tiktoken_file((FOLDER / "llama" / "tokenizer.model").read_bytes())
        assert not is_tiktoken_file(b"")
        assert not is_tiktoken_file(b"hello world\n")


class TestTekken:
    def load(self, folder, **changed):
        content = json.loads((FOLDER / "tekken_v11" / "tekken.json").read_text())
        for name, value in changed.items():
            place = content["config"] if name in content["config"] else content
            place[name] = value
        (folder / "tekken.json").write_text(json.dumps(content))
        return Tokenizer.load(folder)

    def test_tekken_non_control_tokens_are_text(self, tmp_path):
        tokenizer = self.load(tmp_path)
        ids = tokenizer.encode("<think>[INST]<SPECIAL_20>", add_special_tokens=False)
        assert ids == [5, 3, 20]
        assert tokenizer.decode(ids) == "<think>"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))

    @pytest.mark.parametrize(
        "changed",
        [
            {"default_num_special_tokens": -1},
            {"default_num_special_tokens": 10**9},
            {"default_num_special_tokens": "3"},
            {"default_vocab_size": None},
            {"vocab": 5},
            {"vocab": [{"rank": 0}]},
            {"vocab": [{"rank": float("inf"), "token_bytes": "AA=="}]},
            {"vocab": [{"rank": 0, "token_bytes": "*"}]},
            {"special_tokens": [{"rank": 400, "token_str": "x"}]},
            {"special_tokens": [1]},
        ],
    )
    def test_tekken_refuses_a_malformed_file(self, tmp_path, changed):
        with pytest.raises(ModelError, match=r"tekken\.json: is not a tekken\.json: "):
            self.load(tmp_path, **changed)

    @pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
    def test_tekken_refuses_another_file(self, tmp_path, text):
        (tmp_path / "tekken.json").write_text(text)
        with pytest.raises(ModelError, match=r"tekken\.json: is not a tekken\.json: "):
            Tokenizer.load(tmp_path)

    def test_tekken_omits_tokens_beyond_its_size(self, tmp_path):
        assert self.load(tmp_path, default_vocab_size=30 + 256).vocab_size == 286


def test_tokenizer_json_takes_precedence_over_tekken_json(tmp_path):
    shutil.copytree(FOLDER / "tekken_v3", tmp_path, dirs_exist_ok=True)
    shutil.copy(FOLDER / "json_llama3" / "tokenizer.json", tmp_path)
    assert Tokenizer.load(tmp_path).encode("<|eot_id|>") == Tokenizer.load(FOLDER / "json_llama3").encode("<|eot_id|>")
    assert Tokenizer.load(tmp_path, tmp_path / "tekken.json").bos_token_id == 1


@pytest.mark.parametrize(
    "text", ["a  b", "   ", "a       b \n\t   c", "       ", "abc", " a   ", "\u2003" * 7 + "x" + " " * 3]
)
def test_tiktoken_cuts_long_white_space_at_fixed_positions(monkeypatch, text):
    monkeypatch.setattr(tiktoken, "MAX_WHITE_SPACE", 3)
    ends = [0, *(match.end() for match in re.finditer(r"\s{3}", text)), len(text)]
    expected = [text[a:b] for a, b in itertools.pairwise(ends) if text[a:b]]
    assert tiktoken._cut(text) == (expected if len(text) > 3 else [text])


def test_tiktoken_scans_white_space_runs_once():
    """A search for a minimum length would restart at each position, while it holds Python's lock."""
    text = (" " * (MAX_WHITE_SPACE - 1) + "x") * 3
    assert tiktoken._cut(text) == [text]
