"""The tokenizer in a GGUF file: `tokenizer.ggml.*`, of the kinds `llama` (sentencepiece) and `gpt2` (byte pairs).

llama.cpp tells how a text is cut into words by a name; those whose rule is known here are in `_WORDS`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.protobuf import content, number
from llm_serving.text.sentencepiece_vocabulary import SentencePieceVocabulary
from llm_serving.text.tiktoken_vocabulary import LLAMA3, QWEN
from llm_serving.text.vocabulary import USUAL_NAMES, TokenizersVocabulary, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, of sentencepiece as of ggml."""

_KEYS: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_BPE: Final = 2
"""`TrainerSpec.model_type` of sentencepiece: pieces are joined by their scores."""


class _Words(NamedTuple):
    """How a text is cut into words, within which pairs are joined.

    Attributes:
        pattern: Of words; None: that of GPT-2.
        digits: Each digit is a word.
        composes: Texts are brought into form NFC first.
        whole: A word that is a token is one, whatever its pairs.
        begins: A text begins with `bos_token`, where the file says nothing.
    """

    pattern: str | None = None
    digits: bool = False
    composes: bool = False
    whole: bool = False
    begins: bool = False


_LLAMA3: Final = _Words(LLAMA3.pattern, whole=True, begins=True)
_QWEN2: Final = _Words(QWEN.pattern, composes=True)
_WORDS: Final[Mapping[str, _Words]] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _Words(),
    "smollm": _Words(digits=True),
}
"""By `tokenizer.ggml.pre`."""


def read_gguf_tokenizer(path: Path) -> tuple[Vocabulary, dict[str, Any]]:
    """The vocabulary, and what a tokenizer_config.json would say.

    Raises:
        ModelError: The file has no tokenizer, one of a kind that is not read, or one that contradicts itself.
    """
    facts = _Facts(path, read_gguf(path, texts=True).facts)
    kind = facts.get("model")
    tokens, types = facts.tokens()
    if kind == "llama":
        return _sentencepiece(facts, tokens, types)
    if kind != "gpt2":
        raise facts.fail("model", "must be llama or gpt2: name another tokenizer with model_config.tokenizer_path")
    return _byte_pairs(facts, tokens, types)


class _Facts:
    """Values of the tokenizer by their keys."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._facts = facts

    def get(self, key: str, default: Any = None) -> Any:
        value = self._facts.get(_KEYS + key)
        return default if value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.fail(key, "must be a list of texts")
        return value

    def numbers(self, key: str, kinds: str, count: int) -> list[Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
            raise self.fail(key, f"must be a list of {count} numbers, one for each token")
        numbers: list[Any] = value.tolist()
        return numbers

    def tokens(self) -> tuple[list[str], list[int]]:
        """Texts and types, by id."""
        tokens = self.texts("tokens")
        if not tokens:
            raise self.fail("tokens", "must hold at least one token")
        types = self.numbers("token_type", "iu", len(tokens)) or [NORMAL] * len(tokens)
        if any(not NORMAL <= each <= BYTE for each in types):
            raise self.fail("token_type", f"must be types from {NORMAL} to {BYTE}")
        return tokens, types

    def config(self, tokens: Sequence[str], begins: bool) -> dict[str, Any]:
        """As a tokenizer_config.json has it."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        config: dict[str, Any] = {}
        for name, theirs in names.items():
            token_id = self.get(f"{theirs}_token_id")
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < len(tokens):
                raise self.fail(f"{theirs}_token_id", f"must be the id of one of {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[token_id]
        begins = self.flag("add_bos_token", begins) and "bos_token" in config
        config |= {"add_bos_token": begins, "add_eos_token": self.flag("add_eos_token", False)}
        if isinstance(template := self._facts.get(_TEMPLATE), str):
            config["chat_template"] = template
        return config

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.path}: `{_KEYS}{key}` {rule}. Given: {shorten(self.get(key))}")


def _byte_pairs(facts: _Facts, tokens: list[str], types: list[int]) -> tuple[Vocabulary, dict[str, Any]]:
    """By way of a tokenizer.json."""
    pre = facts.get("pre", "gpt-2")
    words = _WORDS.get(pre) if isinstance(pre, str) else None
    if words is None:
        known = ", ".join(_WORDS)
        raise facts.fail("pre", f"must be one of {known}, or model_config.tokenizer_path name another tokenizer")
    vocab = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] != UNUSED}
    if len(vocab) != len(tokens) - types.count(UNUSED):
        raise ModelError(f"{facts.path}: `{_KEYS}tokens` must hold each text once")
    merges = facts.texts("merges")
    if wrong := next((each for each in merges if not _joins(each, vocab)), None):
        rule = "must be pairs of tokens that are a token"
        raise ModelError(f"{facts.path}: `{_KEYS}merges` {rule}. Found: {shorten(wrong)}")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": text, "special": kind == CONTROL, **_AS_WRITTEN}
            for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED) and text
        ],
        "normalizer": {"type": "NFC"} if words.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_cutting(words))},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": words.whole},
    }
    config = facts.config(tokens, words.begins)
    return TokenizersVocabulary(facts.path, content=json.dumps(tokenizer).encode()), config


_AS_WRITTEN: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _joins(merge: str, vocab: Mapping[str, int]) -> bool:
    left, space, right = merge.partition(" ")
    return bool(space) and left in vocab and right in vocab and left + right in vocab


def _cutting(words: _Words) -> Iterator[dict[str, Any]]:
    if words.digits:
        yield {"type": "Digits", "individual_digits": True}
    if words.pattern is not None:
        yield {"type": "Split", "pattern": {"Regex": words.pattern}, "behavior": "Isolated", "invert": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    yield {**by_bytes, "use_regex": words.pattern is None}


def _sentencepiece(facts: _Facts, tokens: list[str], types: list[int]) -> tuple[Vocabulary, dict[str, Any]]:
    """By way of a `tokenizer.model`."""
    scores = facts.numbers("scores", "f", len(tokens))
    if scores is None:
        raise facts.fail("scores", "must be given")
    if types.count(UNKNOWN) != 1:
        raise facts.fail("token_type", f"must say of one token that it stands for what is unknown ({UNKNOWN})")
    prefix = facts.flag("add_space_prefix", True)
    pieces = zip(tokens, scores, types, strict=True)
    messages = [content(1, _piece(*each)) for each in pieces]
    messages.append(content(2, number(3, _BPE) + number(35, int(BYTE in types))))
    messages.append(content(3, number(3, int(prefix)) + number(4, 0) + number(5, 1)))
    config = facts.config(tokens, begins=True)
    names = [config[key] for key in ("bos_token", "eos_token", "pad_token") if key in config]
    unknown = tokens[types.index(UNKNOWN)]
    vocabulary = SentencePieceVocabulary(
        facts.path,
        {},
        [*USUAL_NAMES.values(), *names],
        add_prefix_space=prefix,
        unk_token=unknown,
        content=b"".join(messages),
    )
    return vocabulary, config


def _piece(text: str, score: float, kind: int) -> bytes:
    """`ModelProto.SentencePiece`."""
    return content(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
