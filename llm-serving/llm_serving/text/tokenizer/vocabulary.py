"""Vocabularies: one interface for all kinds of tokenizer files, with added tokens and `tokenizer_config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as TokenizersTokenizer

from llm_serving.core.files import parse_json, read_json_object, read_regular
from llm_serving.errors import ModelError, RequestError, shorten

MAX_TOKEN_ID: Final = 2**24
_TOKEN_ID: Final = re.compile(r"[0-9]{1,8}")

SPACE_SYMBOL: Final = "▁"
BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
USUAL_NAMES: Final[Mapping[str, str]] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
MAX_FILE_BYTES: Final = 256 * 2**20
CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_FILE: Final = "special_tokens_map.json"
ADDED_FILE: Final = "added_tokens.json"
MORE_SPECIAL: Final = "additional_special_tokens"


def read_added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the well-formed tokens of `added_tokens_decoder` in a `tokenizer_config.json`, by id."""
    tokens = config.get("added_tokens_decoder")
    added = {}
    for token_id, token in tokens.items() if isinstance(tokens, dict) else ():
        if not isinstance(token, dict) or not _TOKEN_ID.fullmatch(token_id) or int(token_id) >= MAX_TOKEN_ID:
            continue
        if isinstance(text := token.get("content"), str) and text:
            flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")}
            normalized = token.get("normalized")
            # Without this attribute, only special tokens are searched in the text as given.
            flags["normalized"] = normalized if isinstance(normalized, bool) else not flags["special"]
            added[int(token_id)] = AddedToken(text, **flags)
    return added


class TokenSplitter:
    """Splits a text at tokens, found from left to right. If several match at one position, the longest wins."""

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = dict(tokens)
        names = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._plain = not any(token.lstrip or token.rstrip or token.single_word for token in self._tokens.values())

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the non-empty parts of a text, and whether each is a token."""
        if self._pattern is None:
            return [(text, False)] if text else []
        parts = [part for part in self._pattern.split(text) if part]
        if not self._plain:
            self._trim(parts)
        return [(part, part in self._tokens) for part in parts if part]

    def _trim(self, parts: list[str]) -> None:
        for i, part in enumerate(parts):
            token = self._tokens.get(part)
            if token is None:
                continue
            left, right = (parts[i - 1] if i else ""), (parts[i + 1] if i + 1 < len(parts) else "")
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            # A token inside a word is not recognised: it stays part of the text.
            if token.single_word and left and not left.endswith(" "):
                parts[i - 1], parts[i] = parts[i - 1] + part, ""
            elif token.single_word and right and not right.startswith(" "):
                parts[i + 1], parts[i] = part + parts[i + 1], ""


class Vocabulary(Protocol):
    """The content of a tokenizer file.

    `token_bytes`: [vocab_size], UTF-8 bytes of each token, which may be only a part of a character.
    `strips_leading_space`: whether encoding puts a space before a text and decoding removes it. `adds_special_tokens`:
    whether the file specifies the special tokens to add. If not, a text by default starts with `bos_token`.
    `usual_names`: name of a special token in the config, such as `bos_token` -> its usual text, for configs that do not
    name it.
    """

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    strips_leading_space: bool
    adds_special_tokens: bool
    usual_names: Mapping[str, str]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token_id(self, token: str) -> int | None: ...


class TokenizersVocabulary:
    """The vocabulary in a `tokenizer.json`. Raise ModelError if its decoder does more than join the bytes of tokens.

    `added_tokens`: tokens of `tokenizer_config.json`, by id, some of which the file may lack. `special_texts`: texts
    that the config names as special tokens, for example as `bos_token`. A token of the file with such a text becomes a
    special token. `content`: used instead of the content of the file; then only error messages use `path`.
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
        self.strips_leading_space = any(map(_removes_leading_space, steps))
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocab.values(), default=-1)
        if largest >= MAX_TOKEN_ID:
            raise ModelError(f"{path}: token ids must be less than {MAX_TOKEN_ID}. Found: {largest}")
        self.token_bytes = [b""] * max(size, largest + 1)
        for piece, token_id in vocab.items():
            self.token_bytes[token_id] = _byte_level_bytes(piece) if byte_level else _apply_steps(piece, steps)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def _add_tokens(self, added_tokens: Mapping[int, AddedToken], special_texts: Iterable[str]) -> None:
        """Add the tokens that the `tokenizer.json` lacks, and make those in `special_texts` special. As in the
        transformers library, added tokens get consecutive new ids, in the order of the ids in the config.
        """
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        named = frozenset(special_texts)
        tokens = [token for _, token in sorted(added_tokens.items()) if token.content not in known]
        known.update(token.content for token in tokens)
        tokens += [AddedToken(text, special=True) for text in sorted(named - known) if self.token_id(text) is not None]
        for token in tokens:
            token.special = token.special or token.content in named
        self._tokenizer.add_tokens(tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoded(text, add_special_tokens).ids
        return ids

    def _encoded(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            # The library raises Exception itself, or PanicException, a BaseException, if its Rust code panics.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise RequestError("prompt", f"cannot be encoded by the model's tokenizer: {str(error)[:200]}") from None

    def encode_pair(self, first: str, second: str, max_tokens: int | None) -> tuple[list[int], list[int]]:
        texts = [self._encoded(text, False) for text in (first, second)]
        if max_tokens is not None:
            room = max(0, max_tokens - self._tokenizer.num_special_tokens_to_add(True))
            for text, length in zip(texts, cut_lengths(len(texts[0]), len(texts[1]), room), strict=True):
                text.truncate(length)
        pair = self._tokenizer.post_process(texts[0], texts[1], add_special_tokens=True)
        return pair.ids, pair.type_ids

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def cut_lengths(first: int, second: int, most: int | None) -> tuple[int, int]:
    """Return two texts' lengths, cut to `most` tokens in all if it is set: first the longer text, then both alike."""
    if most is None or first + second <= most:
        return first, second
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most // 2 + most % 2
    return (longer, shorter) if first > second else (shorter, longer)


def read_limited(path: Path) -> bytes:
    return read_regular(path, MAX_FILE_BYTES)


def _decoder_steps(decoder: Any, path: Path) -> list[dict[str, Any]]:
    known = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else [decoder]
    for step in steps:
        kind = step.get("type") if isinstance(step, dict) else None
        if kind not in known or (kind == "Replace" and "String" not in step["pattern"]):
            raise ModelError(f"{path}: decoder {shorten(kind)} is not supported. Known: {', '.join(known)}")
    return steps


def _removes_leading_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) > 0)
    if step["type"] == "WordPiece":
        return True
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _apply_steps(piece: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "Replace":
            piece = piece.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            piece = piece.replace(step.get("replacement", SPACE_SYMBOL), " ")
        elif step["type"] == "WordPiece":  # pieces of one word follow each other without a space
            prefix = step.get("prefix", "##")
            piece = piece.removeprefix(prefix) if piece.startswith(prefix) else f" {piece}"
        elif step["type"] == "ByteFallback" and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
    return piece.encode()


def _printable_byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: printable Latin-1 maps to itself, other bytes to characters from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR: Final = _printable_byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:  # an added token, which is plain text
        return piece.encode()


SPECIAL_NAMES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file does not exist. Raise ModelError for any other content."""
    return read_json_object(path, MAX_FILE_BYTES, parse_json) if path.exists() else {}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `tokenizer_config.json`. If it lists no added tokens, add those of `added_tokens.json`, and the
    names of special tokens in `special_tokens_map.json`. Raise ModelError if a file is unreadable.
    """
    config = read_json(folder / CONFIG_FILE)
    if _lists_tokens(config):
        return config
    config |= read_json(folder / SPECIAL_FILE)
    special = {*special_texts(config).values(), *more_special_texts(config)}
    added = {
        str(token_id): {"content": text, "special": text in special}
        for text, token_id in read_json(folder / ADDED_FILE).items()
    }
    return config | {"added_tokens_decoder": added} if added else config


def config_files(folder: Path) -> list[Path]:
    """Return the files that `read_tokenizer_config` reads, whether or not they exist. Raise its errors."""
    first = folder / CONFIG_FILE
    return [first] if _lists_tokens(read_json(first)) else [first, folder / SPECIAL_FILE, folder / ADDED_FILE]


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name in SPECIAL_NAMES if (text := _text(config.get(name)))}


def more_special_texts(config: Mapping[str, Any]) -> list[str]:
    items = config.get(MORE_SPECIAL)
    texts = map(_text, items) if isinstance(items, list) else ()
    return [text for text in texts if text]


def flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _lists_tokens(config: Mapping[str, Any]) -> bool:
    return "added_tokens_decoder" in config


def _text(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None
