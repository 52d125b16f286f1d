"""Converts BERT's `vocab.txt`, which has one WordPiece per line, to a `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, BertWordPieceTokenizer

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
    options: dict[str, Any] = {
        **{name: names[name] for name in _NAMES},
        "handle_chinese_chars": flag(config, "tokenize_chinese_chars", True),
        "strip_accents": flag(config, "strip_accents", None),
        "lowercase": flag(config, "do_lower_case", True),
    }
    # The library adds the special tokens without the attributes that the config may give them.
    content = {**json.loads(BertWordPieceTokenizer(vocab, **options).to_str()), "added_tokens": []}
    all_special = [*special, *(text for text in names.values() if text in vocab)]
    return TokenizersVocabulary(path, added, all_special, json.dumps(content).encode())
