"""Reads the sentencepiece tokenizer in a `tokenizer.model`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from llm_serving.errors import ModelError
from llm_serving.text.tokenizer.vocabulary import (
    BYTE_PIECE,
    SPACE_SYMBOL,
    USUAL_NAMES,
    TokenSplitter,
    read_limited,
)

UNKNOWN_TEXT: Final = " ⁇ "
_NO_DUMMY_PREFIX: Final = b"\x1a\x02\x18\x00"
"""Encoded `normalizer_spec { add_dummy_prefix: false }`. Appended to a model, it overrides the earlier value."""


class SentencePieceVocabulary:
    """The content of a `tokenizer.model`, with the ids of `LlamaTokenizer`. Recognises special tokens in a text.

    `added_tokens`: tokens of `tokenizer_config.json`, by id, which the file may lack. `special_texts`: texts that the
    config names as special tokens, for example as `bos_token`. `legacy`: whether each text between special tokens gets
    a leading space. Otherwise, only the whole text gets one, and only with `add_prefix_space`. `content`: used instead
    of the content of the file; then only error messages use `path`.
    """

    adds_special_tokens = False
    usual_names = USUAL_NAMES

    def __init__(
        self,
        path: Path,
        added_tokens: Mapping[int, AddedToken],
        special_texts: Iterable[str] = (),
        *,
        legacy: bool = True,
        add_prefix_space: bool = True,
        unk_token: str = "<unk>",  # noqa: S107  not a secret
        content: bytes | None = None,
    ) -> None:
        data = read_limited(path) if content is None else content
        try:
            self._processor = SentencePieceProcessor(model_proto=data)
            self._bare = self._processor if legacy else SentencePieceProcessor(model_proto=data + _NO_DUMMY_PREFIX)
        except (OSError, RuntimeError) as error:
            raise ModelError(f"{path}: is not a sentencepiece model: {error}") from None
        if self._processor.unk_id() < 0:
            raise ModelError(f"{path}: is not a sentencepiece model: it has no unknown token")
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
                self.token_bytes[token_id] = token.content.encode()
            self._ids[token.content] = token_id
            if token.special:
                special.add(token_id)
        self._named = frozenset(special_texts)
        for text in self._named - self._ids.keys():
            if (named_id := self.token_id(text)) is not None:
                self._ids[text] = named_id
                special.add(named_id)
        self.special_ids = frozenset(special)
        self.strips_leading_space = self._decodes_without_leading_space() and (legacy or add_prefix_space)
        attributes = {token.content: token for token in added_tokens.values()}
        self._splitter = TokenSplitter(
            {text: attributes.get(text, AddedToken(text, special=True)) for text in self._ids if text}
        )
        self._legacy, self._prefix = legacy, SPACE_SYMBOL if add_prefix_space else ""
        self._unknown = unk_token
        self._unknown_len = len(self._bare.encode(unk_token))

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
        del add_special_tokens  # the file specifies no special tokens to add
        if not text:
            return []
        if not self._legacy:
            text = self._prefix + text.replace(SPACE_SYMBOL, " ")
        parts = self._splitter.split(text)
        pieces = [[self._ids[part]] if is_token else self._encode_part(part) for part, is_token in parts]
        begins_special = len(parts) > 1 and not parts[0][1] and parts[1][1] and parts[1][0] in self._named
        if not self._legacy and begins_special and list(map(self._bare.id_to_piece, pieces[0])) == [SPACE_SYMBOL]:
            del pieces[0]  # no space is added before a text that starts with a special token
        return [token_id for piece in pieces for token_id in piece]

    def _encode_part(self, text: str) -> list[int]:
        ids: list[int]
        if self._legacy or not text.startswith((SPACE_SYMBOL, " ")):
            ids = self._bare.encode(text)
            return ids
        # Sentencepiece may drop spaces at the start of a text, but not after other text.
        ids = self._bare.encode(self._unknown + text)
        return ids[self._unknown_len :]

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        token_id: int = self._processor.piece_to_id(token)
        return None if self._processor.is_unknown(token_id) else token_id
