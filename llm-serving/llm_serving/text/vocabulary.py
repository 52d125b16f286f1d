"""Tokenizer files read into one form: how to encode, and the bytes that each token adds to the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from tokenizers import AddedToken as LibraryToken
from tokenizers import Tokenizer as TokenizersTokenizer

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError, shorten
from llm_serving.text.added_tokens import AddedToken

SPACE_SYMBOL: Final = "▁"
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
USUAL_NAMES: Final[Mapping[str, str]] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MAX_FILE_BYTES: Final = 256 * 2**20


class Vocabulary(Protocol):
    """What a tokenizer file tells.

    Attributes:
        token_bytes: [vocab_size] UTF-8 bytes of each token; a token may hold part of a character only.
        special_ids: Tokens that steer the model and are no text.
        strips_leading_space: The file's encoder puts a space before a text, so one is taken off when decoding.
        adds_special_tokens: The encoder knows which tokens the file prescribes; else a text begins with `bos_token`.
        usual_names: Special tokens by their use where the config names none.
    """

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    strips_leading_space: bool
    adds_special_tokens: bool
    usual_names: Mapping[str, str]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; `add_special_tokens` puts in what the file itself prescribes, if it does."""
        ...

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact text."""
        ...


class TokenizersVocabulary:
    """A `tokenizer.json`. Its decoder must be one whose output is the tokens' bytes put together.

    Args:
        path: The file.
        added_tokens: Tokens of `tokenizer_config.json` by id; the file may lack the newest.
        special_texts: Texts of the tokens that the config names by their use; those of the file are special tokens.
        content: What the file would hold, where `path` only names it in errors.
    """

    adds_special_tokens = True
    usual_names = USUAL_NAMES

    def __init__(
        self,
        path: Path,
        added_tokens: Mapping[int, AddedToken] | None = None,
        special_texts: Iterable[str] = (),
        content: bytes | None = None,
    ) -> None:
        data = read_limited(path) if content is None else content
        try:
            self._tokenizer = TokenizersTokenizer.from_buffer(data)
            parsed = json.loads(data)
        except Exception as error:  # noqa: BLE001  the library raises bare Exception
            raise ModelError(f"{path}: is not a tokenizer.json: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_tokens(added_tokens or {}, special_texts)
        steps = _decoder_steps(parsed.get("decoder"), path)
        byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self.strips_leading_space = any(map(_takes_space_off, steps))
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.token_bytes = [b""] * max(size, max(vocab.values(), default=-1) + 1)
        for piece, token_id in vocab.items():
            self.token_bytes[token_id] = _byte_level_bytes(piece) if byte_level else _apply_steps(piece, steps)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _add_tokens(self, added_tokens: Mapping[int, AddedToken], special_texts: Iterable[str]) -> None:
        """As the transformers library does: in the order of their ids, which the library numbers on from its own."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        named = frozenset(special_texts)
        tokens = [token for _, token in sorted(added_tokens.items()) if token.text not in known]
        known.update(token.text for token in tokens)
        tokens += [AddedToken(text, special=True) for text in sorted(named - known) if self.token_id(text) is not None]
        for token in tokens:
            flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
            special = token.special or token.text in named
            normalized = not token.special if token.normalized is None else token.normalized
            self._tokenizer.add_tokens([LibraryToken(token.text, special=special, normalized=normalized, **flags)])

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
