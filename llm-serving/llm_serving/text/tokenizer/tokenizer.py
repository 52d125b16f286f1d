"""The tokenizer of a model: its file, text to token ids and back, special tokens, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llm_serving.core.sampling_params import generation_end_ids
from llm_serving.errors import ModelError, shorten
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.text.answer_parser import REASONING_FORMATS
from llm_serving.text.chat_template import Conversations, read_templates, templates_of
from llm_serving.text.tokenizer import tiktoken
from llm_serving.text.tokenizer.byte_pairs import MERGES_FILE, VOCAB_FILE, read_byte_pairs
from llm_serving.text.tokenizer.gguf import read_gguf_tokenizer
from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.typed_text import TypedText
from llm_serving.text.tokenizer.vocabulary import (
    MORE_SPECIAL,
    USUAL_NAMES,
    TokenizersVocabulary,
    Vocabulary,
    cut_lengths,
    flag,
    more_special_texts,
    read_added_tokens,
    read_limited,
    read_tokenizer_config,
    special_texts,
)
from llm_serving.text.tokenizer.word_pieces import PIECES_FILE, read_word_pieces

TEKKEN_FILE: Final = "tekken.json"
FILES: Final = ("tokenizer.json", "tokenizer.model", TEKKEN_FILE, "qwen.tiktoken")


def find_vocabulary(folder: Path) -> Path:
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
    return [path, path.with_name(MERGES_FILE)] if path.name == VOCAB_FILE else [path]


def read_vocabulary(path: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read a tokenizer file. `config`: content of `tokenizer_config.json`. Raise ModelError if it is not valid."""
    added, names = read_added_tokens(config), special_texts(config)
    special = [*names.values(), *more_special_texts(config)]
    if path.name == TEKKEN_FILE:
        return tiktoken.read_tekken(path, added)
    if path.name == VOCAB_FILE:
        return read_byte_pairs(path, config, added, special)
    if path.name == PIECES_FILE:
        return read_word_pieces(path, config, added, special)
    if path.suffix == ".json":
        return TokenizersVocabulary(path, added, special)
    if path.suffix == ".tiktoken" or tiktoken.is_tiktoken_file(read_limited(path)[:256]):
        return tiktoken.read_tiktoken(path, _family(path, config), added)
    return SentencePieceVocabulary(
        path,
        added,
        [*USUAL_NAMES.values(), *special],
        legacy=flag(config, "legacy", True) is not False,
        add_prefix_space=flag(config, "add_prefix_space", True) is not False,
        unk_token=names.get("unk_token", USUAL_NAMES["unk_token"]),
    )


def _family(path: Path, config: Mapping[str, Any]) -> tiktoken.TiktokenFamily:
    if path.name.startswith("qwen"):
        return tiktoken.QWEN
    return tiktoken.GLM4 if "GLM" in str(config.get("tokenizer_class")) else tiktoken.LLAMA3


class Tokenizer:
    """The tokenizer of a model folder. It runs no code of the folder except the chat template, in a confined process.
    `config`: content of `tokenizer_config.json`. `more_eos_token_ids`: ids that end a text in addition to the config's
    `eos_token`. `chat_templates`: templates by name, or None to use those of the config. Raise ModelError if the config
    contradicts itself or the vocabulary.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        config: Mapping[str, Any],
        more_eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self.strips_leading_space = vocabulary.strips_leading_space
        self.special_token_ids = vocabulary.special_ids
        named = config.get("tokenizer_class")
        self.named_class = named if isinstance(named, str) else None
        self.special_texts = special_texts(config)
        for name, text in vocabulary.usual_names.items():
            if name not in self.special_texts and vocabulary.token_id(text) is not None:
                self.special_texts[name] = text
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*([] if self.eos_token_id is None else [self.eos_token_id]), *more_eos_token_ids])
        )
        prescribed = vocabulary.adds_special_tokens
        self._add_bos = flag(config, "add_bos_token", None if prescribed else self.bos_token_id is not None)
        self._add_eos = flag(config, "add_eos_token", None if prescribed else False)
        if chat_templates is None:
            chat_templates = templates_of(config.get("chat_template"))
        more = {MORE_SPECIAL: texts} if (texts := more_special_texts(config)) else {}
        self._conversations = Conversations(chat_templates, self.special_texts | more)

    @classmethod
    def load(cls, folder: Path, vocab_file: Path | None = None) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder or a GGUF file. `vocab_file`: tokenizer file, GGUF file or folder
        to load instead. Raise ModelError if no tokenizer is found, or if it cannot be read.
        """
        end_ids = generation_end_ids(folder)
        if vocab_file is not None and vocab_file.is_dir():
            folder, vocab_file = vocab_file, None
        if vocab_file is None:
            vocab_file = folder if is_gguf(folder) else find_vocabulary(folder)
        elif not vocab_file.exists():
            raise ModelError(f"tokenizer file {vocab_file} does not exist")
        if is_gguf(vocab_file):
            found = read_gguf_tokenizer(vocab_file)
            return cls(found.vocabulary, found.config, [*end_ids, *found.end_ids])
        config = read_tokenizer_config(folder)
        vocabulary = read_vocabulary(vocab_file, config)
        return cls(vocabulary, config, end_ids, read_templates(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text. The model's own vocabulary may be padded beyond it."""
        return len(self._vocabulary.token_bytes)

    @cached_property
    def max_token_chars(self) -> int:
        return max(len(text.decode("utf-8", "replace")) for text in self._vocabulary.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which must have no lone surrogates. Special tokens in it are recognised."""
        by_hand = self._add_bos is not None
        ids = self._vocabulary.encode(text, add_special_tokens and not by_hand)
        if add_special_tokens and by_hand:
            if self._add_bos and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
            if self._add_eos and self.eos_token_ids:
                ids = [*ids, self.eos_token_ids[0]]
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts with the special tokens around them, and the type of each token: 0 or 1. If
        the ids exceed `max_tokens`, the longer text is cut first. Vocabularies other than `TokenizersVocabulary` do not
        specify special tokens and types for pairs: then no special tokens are added, and all types are 0.
        """
        if isinstance(self._vocabulary, TokenizersVocabulary):
            return self._vocabulary.encode_pair(first, second, max_tokens)
        lists = self.encode(first, False), self.encode(second, False)
        lengths = cut_lengths(len(lists[0]), len(lists[1]), max_tokens)
        ids = [token_id for part, length in zip(lists, lengths, strict=True) for token_id in part[:length]]
        return ids, [0] * len(ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids: their bytes as UTF-8, with U+FFFD for invalid parts."""
        table, _ = self.token_tables(skip_special_tokens)
        data = b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < len(table)])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character. A special token has the bytes of its name."""
        table = self._vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        r"""Return a readable form of one token: its text, or "bytes:\xe4\xbd" if it is part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_tables(self, skip_special_tokens: bool) -> tuple[list[bytes], list[str | None]]:
        """Return the bytes of each token id, and its text, or None if the bytes are not complete characters. With
        `skip_special_tokens`, the bytes and texts of special tokens are empty.
        """
        return self._tables_without_special if skip_special_tokens else self._tables

    @cached_property
    def _tables(self) -> tuple[list[bytes], list[str | None]]:
        table = self._vocabulary.token_bytes
        return table, [_complete_text(data) for data in table]

    @cached_property
    def _tables_without_special(self) -> tuple[list[bytes], list[str | None]]:
        special = self.special_token_ids
        table = [b"" if token_id in special else data for token_id, data in enumerate(self._vocabulary.token_bytes)]
        return table, [_complete_text(data) for data in table]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        """Return the prompt text, which has all special tokens: encode it with `add_special_tokens=False`."""
        return self._conversations.render(messages, **given)

    def chat_template(self, *, with_tools: bool = False) -> str:
        return self._conversations.source(with_tools=with_tools)

    @cached_property
    def typed_text(self) -> TypedText:
        special = {self.token_bytes(each).decode("utf-8", "replace"): each for each in sorted(self.special_token_ids)}
        return TypedText(self.encode, special, self.token_bytes)

    @cached_property
    def delimiter_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text in structured output: special tokens and reasoning tags."""
        delimiters = {text for each in REASONING_FORMATS.values() for text in (each.opening, each.closing)}
        ids = map(self._vocabulary.token_id, delimiters)
        return self.special_token_ids.union(token_id for token_id in ids if token_id is not None)

    def delimiter_id(self, text: str) -> int | None:
        token_id = self._vocabulary.token_id(text)
        return token_id if token_id in self.delimiter_ids else None

    def _special_id(self, name: str) -> int | None:
        if (text := self.special_texts.get(name)) is None:
            return None
        token_id = self._vocabulary.token_id(text)
        if token_id is None:
            raise ModelError(f"tokenizer_config.json: `{name}` must be in the vocabulary. Given: {shorten(text)}")
        return token_id


def _complete_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def notice_of_unknown_tokens(tokenizer: Tokenizer, vocab_size: int) -> str | None:
    """Return a warning if the tokenizer has tokens that the model's vocabulary lacks, such as image tokens."""
    count = tokenizer.vocab_size - vocab_size
    if count <= 0:
        return None
    first = json.dumps(tokenizer.token_text(vocab_size), ensure_ascii=False)
    return (
        f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}: a prompt with one of the last "
        f"{count}, {first} the first of them, is refused"
    )


def check_draft_vocabulary(tokenizer: Tokenizer, draft_model_path: Path) -> None:
    """Raise ModelError unless a draft model has the same tokens as the model, because draft tokens are ids."""
    draft = Tokenizer.load(draft_model_path)
    rule = f"scheduler_config.draft_model_path: {draft_model_path} must have the vocabulary of the model"
    if draft.vocab_size != tokenizer.vocab_size:
        raise ModelError(f"{rule}, which has {tokenizer.vocab_size} tokens. Given: {draft.vocab_size} tokens")
    for token_id in range(tokenizer.vocab_size):
        if draft.token_bytes(token_id) != tokenizer.token_bytes(token_id):
            expected, given = (_quoted(each, token_id) for each in (tokenizer, draft))
            raise ModelError(f"{rule}, where token {token_id} is {expected}. Given: {given}")
    if other := draft.special_token_ids ^ tokenizer.special_token_ids:
        token_id = min(other)
        kind = "a special token" if token_id in tokenizer.special_token_ids else "no special token"
        raise ModelError(f"{rule}, where token {token_id}, {_quoted(tokenizer, token_id)}, is {kind}")
    if (size := ModelSpec.from_folder(draft_model_path).vocab_size) < tokenizer.vocab_size:
        raise ModelError(f"{rule}, which has {tokenizer.vocab_size} tokens. Given: weights for {size} tokens")


def _quoted(tokenizer: Tokenizer, token_id: int) -> str:
    return json.dumps(tokenizer.token_text(token_id), ensure_ascii=False)
