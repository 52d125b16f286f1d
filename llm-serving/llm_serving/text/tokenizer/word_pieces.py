"""Converts BERT's `vocab.txt`, which has one WordPiece per line, to a `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken

from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.vocabulary import TokenizersVocabulary, flag, read_limited, special_texts

PIECES_FILE: Final = "vocab.txt"
_NAMES: Final[Mapping[str, str]] = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_MAX_WORD_CHARS: Final = 100


def read_word_pieces(
    path: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken], special: Sequence[str]
) -> TokenizersVocabulary:
    """Read a `vocab.txt`. Raise ModelError for a repeated piece, or a missing special token of the config."""
    try:
        text = read_limited(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: must be UTF-8: {error}") from None
    # `str.splitlines` would also split at U+2028 and U+0085, which may be pieces, and so change all later ids.
    lines = [line.removesuffix("\n") for line in StringIO(text, newline=None)]
    return word_pieces(path, lines, config, added, special)


def word_pieces(
    path: Path,
    pieces: Sequence[str],
    config: Mapping[str, Any],
    added: Mapping[int, AddedToken] = MappingProxyType({}),
    special: Sequence[str] = (),
) -> TokenizersVocabulary:
    vocab = {piece: number for number, piece in enumerate(pieces)}
    names = {**_NAMES, **special_texts(config)}
    missing = [names[name] for name in ("unk_token", "cls_token", "sep_token") if names[name] not in vocab]
    if missing or len(vocab) < len(pieces):
        rule = "must have each piece once"
        tokens = f"contain the special tokens {', '.join(_NAMES.values())}"
        raise ModelError(f"{path}: {rule}, and {tokens}. Missing: {', '.join(missing) or 'none'}")
    content = json.dumps(_tokenizer_json(vocab, config, names)).encode()
    return TokenizersVocabulary(path, added, [*special, *(text for text in names.values() if text in vocab)], content)


def _tokenizer_json(vocab: Mapping[str, int], config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def special(name: str, of_type: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[name], "type_id": of_type}}

    def text(name: str, of_type: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": of_type}}

    single = [special("cls_token", 0), text("A", 0), special("sep_token", 0)]
    around = [names[name] for name in ("cls_token", "sep_token")]
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": flag(config, "tokenize_chinese_chars", True),
            "strip_accents": flag(config, "strip_accents", None),
            "lowercase": flag(config, "do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, text("B", 1), special("sep_token", 1)],
            "special_tokens": {each: {"id": each, "ids": [vocab[each]], "tokens": [each]} for each in around},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": names["unk_token"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _MAX_WORD_CHARS,
            "vocab": vocab,
        },
    }
