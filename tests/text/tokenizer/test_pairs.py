"""Two texts as the tokens of one prompt, with types, and cut to a number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.text.tokenizer.vocabulary import cut_lengths
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "##s", "three", "four", "é"]
PIECES = [
    ("<s>", 0.0),
    ("<pad>", 0.0),
    ("</s>", 0.0),
    ("<unk>", 0.0),
    ("▁one", -1.0),
    ("▁tw", -2.0),
    ("o", -3.0),
    ("▁", -4.0),
]


@pytest.fixture
def bert(tmp_path: Path) -> Tokenizer:
    """WordPiece, as BERT has it."""
    made = TokenizersTokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.decoder = decoders.WordPiece("##")
    made.add_special_tokens(WORDS[:4])
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


@pytest.fixture
def xlm_roberta(tmp_path: Path) -> Tokenizer:
    """Unigram, as XLM-RoBERTa has it."""
    made = TokenizersTokenizer(models.Unigram(PIECES, 3, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([piece for piece, _ in PIECES[:4]])
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


def test_word_piece_tokenizer_encodes_and_decodes_a_text(bert: Tokenizer) -> None:
    assert bert.encode("One twos?") == [2, 4, 5, 6, 1, 3]
    assert bert.encode("One twos", add_special_tokens=False) == [4, 5, 6]
    assert bert.decode([2, 4, 5, 6, 3]) == "one twos"


def test_word_piece_pair_has_token_types(bert: Tokenizer) -> None:
    assert bert.encode_pair("one", "twos") == ([2, 4, 3, 5, 6, 3], [0, 0, 0, 1, 1, 1])
    assert bert.encode_pair("one two three four", "two", 6) == ([2, 4, 5, 3, 5, 3], [0, 0, 0, 0, 1, 1])


def test_word_piece_vocabulary_list_equals_the_tokenizer_json(tmp_path: Path, bert: Tokenizer) -> None:
    folder = tmp_path / "older"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*WORDS, "One"]))
    listed = Tokenizer.load(folder)
    for text in ("One twos?", "one \u00e9 four", "", "three  two"):
        assert listed.encode_pair(text, "twos") == bert.encode_pair(text, "twos")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert Tokenizer.load(folder).encode("One one") == [2, 10, 4, 3]
    (folder / "vocab.txt").write_text("\r\n".join([*WORDS, "\u2028", "a\x85", "One"]), newline="")
    assert Tokenizer.load(folder).encode("One one") == [2, 12, 4, 3]
    (folder / "vocab.txt").write_text("[CLS]\none")
    with pytest.raises(ModelError, match=r"Missing: \[UNK\], \[SEP\]"):
        Tokenizer.load(folder)


def test_unigram_tokenizer_encodes_texts_and_pairs(xlm_roberta: Tokenizer) -> None:
    assert xlm_roberta.encode("one two") == [0, 4, 5, 6, 2]
    assert xlm_roberta.encode_pair("one", "two")[0] == [0, 4, 2, 2, 5, 6, 2]
    assert xlm_roberta.decode([0, 4, 5, 6, 2]) == "one two"


@pytest.mark.parametrize(
    ("lengths", "most", "cut"),
    [
        ((3, 4), None, (3, 4)),
        ((3, 4), 7, (3, 4)),
        ((3, 40), 10, (3, 7)),
        ((40, 3), 10, (7, 3)),
        ((40, 30), 11, (6, 5)),
        ((30, 40), 11, (5, 6)),
        ((5, 6), 0, (0, 0)),
    ],
)
def test_pair_truncation_cuts_the_longer_text_first(
    lengths: tuple[int, int], most: int | None, cut: tuple[int, int]
) -> None:
    assert cut_lengths(*lengths, most) == cut
    if most:
        made = TokenizersTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.enable_truncation(most, strategy="longest_first")
        pair = made.encode("a " * lengths[0], "a " * lengths[1])
        assert (pair.sequence_ids.count(0), pair.sequence_ids.count(1)) == cut
