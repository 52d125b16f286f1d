"""Selects the tokenizer file in a model folder, and its reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.byte_pairs import MERGES_FILE, VOCAB_FILE, read_byte_pairs
from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tiktoken import (
    GLM4,
    LLAMA3,
    QWEN,
    TiktokenFamily,
    TiktokenVocabulary,
    is_tiktoken_file,
    read_tekken,
    read_tiktoken,
)
from llm_serving.text.tokenizer.vocabulary import (
    USUAL_NAMES,
    TokenizersVocabulary,
    Vocabulary,
    flag,
    more_special_texts,
    read_added_tokens,
    read_limited,
    special_texts,
)
from llm_serving.text.tokenizer.word_pieces import PIECES_FILE, read_word_pieces

TEKKEN_FILE: Final = "tekken.json"
FILES: Final = ("tokenizer.json", "tokenizer.model", TEKKEN_FILE, "qwen.tiktoken")


def find_vocabulary(folder: Path) -> Path:
    """Return the tokenizer file of a folder. Raise ModelError if there is none."""
    for name in FILES:
        if (folder / name).exists():
            return folder / name
    if all((folder / name).exists() for name in (VOCAB_FILE, MERGES_FILE)):
        return folder / VOCAB_FILE
    if (folder / PIECES_FILE).exists():
        return folder / PIECES_FILE
    files = f"{', '.join(FILES)}, {PIECES_FILE}, {VOCAB_FILE} with {MERGES_FILE}"
    what = f"none of {files}; model_config.tokenizer_path (--tokenizer) names a file elsewhere"
    raise ModelError(f"{folder}: has no tokenizer file: {what}")


def parts_of(path: Path) -> list[Path]:
    """Return the files to read for a tokenizer file, starting with the file itself."""
    return [path, path.with_name(MERGES_FILE)] if path.name == VOCAB_FILE else [path]


def read_vocabulary(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read a tokenizer file. `config`: content of `tokenizer_config.json`. Raise ModelError if it is not valid."""
    added, names = read_added_tokens(config), special_texts(config)
    special = [*names.values(), *more_special_texts(config)]
    if path.name == TEKKEN_FILE:
        return TiktokenVocabulary(read_tekken(path), added)
    if path.name == VOCAB_FILE:
        return read_byte_pairs(path, config, added, special)
    if path.name == PIECES_FILE:
        return read_word_pieces(path, config, added, special)
    if path.suffix == ".json":
        return TokenizersVocabulary(path, added, special)
    if path.suffix == ".tiktoken" or is_tiktoken_file(read_limited(path)[:256]):
        return TiktokenVocabulary(read_tiktoken(path, _family(path, config)), added)
    return SentencePieceVocabulary(
        path,
        added,
        [*USUAL_NAMES.values(), *special],
        legacy=flag(config, "legacy", True) is not False,
        add_prefix_space=flag(config, "add_prefix_space", True) is not False,
        unk_token=names.get("unk_token", USUAL_NAMES["unk_token"]),
    )


def _family(path: Path, config: Mapping[str, Any]) -> TiktokenFamily:
    if path.name.startswith("qwen"):
        return QWEN
    return GLM4 if "GLM" in str(config.get("tokenizer_class")) else LLAMA3
