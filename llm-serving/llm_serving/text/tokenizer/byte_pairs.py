"""Converts byte-pair tokenizers to a `tokenizer.json`.

This file holds the vocabulary, the merges, and the rule that splits a text into words. Older models have `vocab.json`
and `merges.txt` without this rule. For them, the tokenizer's class determines the rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken

from llm_serving.errors import ModelError, shorten
from llm_serving.text.tokenizer.tiktoken import LLAMA3, QWEN
from llm_serving.text.tokenizer.vocabulary import (
    MAX_TOKEN_ID,
    TokenizersVocabulary,
    flag,
    read_json,
    read_limited,
)

VOCAB_FILE: Final = "vocab.json"
MERGES_FILE: Final = "merges.txt"
_END: Final = "<|endoftext|>"


class Words(NamedTuple):
    """The rule that splits a text into words. Merges never cross a word boundary.

    `patterns`: regular expressions, each of which splits the parts that the previous one made. If there are none, the
    pattern of GPT-2 is used. `digits`: whether each digit is a word. `composes`: whether texts are first normalized to
    NFC. `whole`: whether a word that is a token is kept whole, even if the merges would split it.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composes: bool = False
    whole: bool = False


GPT2: Final = Words()
LLAMA3_WORDS: Final = Words((LLAMA3.pattern,), whole=True)
QWEN2: Final = Words((QWEN.pattern,), composes=True)
SMOLLM: Final = Words(digits=True)

_CLASSES: Final[Mapping[str, Words]] = {"GPT2Tokenizer": GPT2, "Qwen2Tokenizer": QWEN2}
"""`tokenizer_class` without the suffix `Fast` -> how a text is split into words."""


def read_byte_pairs(
    path: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken], special: Sequence[str]
) -> TokenizersVocabulary:
    """Read a `vocab.json` with its `merges.txt`. Raise ModelError if they or `tokenizer_class` are not supported."""
    words = _words_of(path, config)
    vocab = read_json(path)
    ids = list(vocab.values())
    are_ids = all(type(each) is int and 0 <= each < MAX_TOKEN_ID for each in ids)
    if not ids or not are_ids or len(set(ids)) < len(ids):
        raise ModelError(f"{path}: must map the text of each token to an id of its own")
    merges = [line for line in _lines(path.with_name(MERGES_FILE)) if line and not line.startswith("#version:")]
    if wrong := next((each for each in merges if not joins(each, vocab)), None):
        rule = f"must list pairs of tokens in {VOCAB_FILE} that form a token"
        raise ModelError(f"{path.with_name(MERGES_FILE)}: {rule}. Found: {shorten(wrong)}")
    spaced = flag(config, "add_prefix_space", False) is True
    content = tokenizer_json(vocab, merges, words, begins_with_space=spaced)
    return TokenizersVocabulary(path, added, [*special, _END], content)


def tokenizer_json(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    words: Words,
    added: Iterable[Mapping[str, Any]] = (),
    *,
    begins_with_space: bool = False,
) -> bytes:
    """Return a `tokenizer.json`. `merges`: pairs separated by a space. `begins_with_space`: add a space to texts."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": {"type": "NFC"} if words.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_pre_tokenizers(words, begins_with_space))},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": words.whole},
    }
    return json.dumps(tokenizer).encode()


def joins(merge: str, vocab: Mapping[str, int]) -> bool:
    left, space, right = merge.partition(" ")
    return bool(space) and left in vocab and right in vocab and left + right in vocab


def _words_of(path: Path, config: Mapping[str, Any]) -> Words:
    name = config.get("tokenizer_class")
    words = _CLASSES.get(name.removesuffix("Fast")) if isinstance(name, str) else None
    if words is None:
        raise ModelError(
            f"{path}: `tokenizer_class` of tokenizer_config.json must be one of {', '.join(_CLASSES)}, because it "
            f"determines how a text is split into words. Given: {shorten(name)}. For other classes, write a "
            f"tokenizer.json with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return words


def _lines(path: Path) -> list[str]:
    try:
        return [line.rstrip("\r") for line in read_limited(path).decode().split("\n")]
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _pre_tokenizers(words: Words, begins_with_space: bool) -> Iterator[dict[str, Any]]:
    if words.digits:
        yield {"type": "Digits", "individual_digits": True}
    for pattern in words.patterns:
        yield {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": begins_with_space, "trim_offsets": True}
    yield {**by_bytes, "use_regex": not words.patterns}
