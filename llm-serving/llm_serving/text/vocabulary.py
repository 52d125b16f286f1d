"""Tokenizer files read into one form: how to encode, and the bytes that each token adds to the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as TokenizersTokenizer

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError, shorten

SPACE_SYMBOL: Final = "▁"
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNKNOWN_TEXT: Final = " ⁇ "
MAX_FILE_BYTES: Final = 256 * 2**20


@dataclass(frozen=True)
class AddedToken:
    text: str
    special: bool


class Vocabulary(Protocol):
    """What a tokenizer file tells.

    Attributes:
        token_bytes: [vocab_size] UTF-8 bytes of each token; a token may hold part of a character only.
        special_ids: Tokens that steer the model and are no text.
        strips_leading_space: The file's encoder puts a space before a text, so one is taken off when decoding.
    """

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    strips_leading_space: bool

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; `add_special_tokens` puts in what the file itself prescribes, if it does."""
        ...

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text."""
        ...


class SentencePieceVocabulary:
    """A `tokenizer.model`. Special tokens are recognised in the text, as they are in other tokenizers.

    Args:
        path: The file.
        added_tokens: Tokens of `tokenizer_config.json`, by id; also beyond those of the file.
    """

    def __init__(self, path: Path, added_tokens: Mapping[int, AddedToken]) -> None:
        data = read_limited(path)
        try:
            self._processor = SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"{path}: is not a sentencepiece model: {error}") from None
        processor, count = self._processor, self._processor.vocab_size()
        self._ids: dict[str, int] = {}
        self.token_bytes: list[bytes] = []
        special = set()
        for token_id in range(count):
            piece = processor.id_to_piece(token_id)
            if processor.is_control(token_id) or processor.is_unknown(token_id):
                special.add(token_id)
                self._ids[piece] = token_id
            self.token_bytes.append(self._bytes_of(token_id, piece))
        for token_id, token in added_tokens.items():
            while token_id >= len(self.token_bytes):
                self.token_bytes.append(b"")
            if token_id >= count:
                self.token_bytes[token_id] = token.text.encode()
            if token_id >= count or token.special:
                self._ids[token.text] = token_id
            if token.special:
                special.add(token_id)
        self.special_ids = frozenset(special)
        self.strips_leading_space = self._decodes_without_leading_space()
        names = sorted(filter(None, self._ids), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def _bytes_of(self, token_id: int, piece: str) -> bytes:
        processor = self._processor
        if processor.is_unknown(token_id):
            return UNKNOWN_TEXT.encode()
        if processor.is_control(token_id):
            return piece.encode()
        if processor.is_byte(token_id) and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.replace(SPACE_SYMBOL, " ").encode()

    def _decodes_without_leading_space(self) -> bool:
        for token_id in range(self._processor.vocab_size()):
            piece = self._processor.id_to_piece(token_id)
            if piece.startswith(SPACE_SYMBOL) and len(piece) > 1:
                return not self._processor.decode([token_id]).startswith(" ")
        return False

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._split is None or not self._split.search(text):
            ids: list[int] = self._processor.encode(text)
            return ids
        ids = []
        for part in self._split.split(text):
            if part in self._ids:
                ids.append(self._ids[part])
            elif part:
                ids.extend(self._processor.encode(part))
        return ids

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        token_id: int = self._processor.piece_to_id(token)
        return None if self._processor.is_unknown(token_id) else token_id


class TokenizersVocabulary:
    """A `tokenizer.json`. Its decoder must be one whose output is the tokens' bytes put together."""

    def __init__(self, path: Path) -> None:
        data = read_limited(path)
        try:
            self._tokenizer = TokenizersTokenizer.from_buffer(data)
            content = json.loads(data)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise ModelError(f"{path}: is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        steps = _decoder_steps(content.get("decoder"), path)
        byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self.strips_leading_space = any(map(_takes_space_off, steps))
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.token_bytes = [b""] * max(size, max(vocab.values(), default=-1) + 1)
        for piece, token_id in vocab.items():
            self.token_bytes[token_id] = _byte_level_bytes(piece) if byte_level else _apply_steps(piece, steps)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def read_limited(path: Path) -> bytes:
    """The bytes of a file of the model folder.

    Raises:
        ModelError: It cannot be read or is too large.
    """
    return read_regular(path, MAX_FILE_BYTES)


def _decoder_steps(decoder: Any, path: Path) -> list[dict[str, Any]]:
    known = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else [decoder]
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind not in known or (kind == "Replace" and "String" not in step["pattern"]):
            raise ModelError(f"{path}: decoder {shorten(kind)} is not supported. Known: {', '.join(known)}")
    return steps


def _takes_space_off(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _apply_steps(piece: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "Replace":
            piece = piece.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            piece = piece.replace(step.get("replacement", SPACE_SYMBOL), " ")
        elif step["type"] == "ByteFallback" and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
    return piece.encode()


def _printable_byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 is itself, the rest follows from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR: Final = _printable_byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:  # an added token, written as plain text
        return piece.encode()
