"""Text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.text.conversation import Conversations
from llm_serving.text.detokenizer import IncrementalDetokenizer
from llm_serving.text.template_files import read_templates, templates_of
from llm_serving.text.vocabulary import (
    AddedToken,
    SentencePieceVocabulary,
    TokenizersVocabulary,
    Vocabulary,
    read_limited,
)

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

TOKENIZERS_FILE: Final = "tokenizer.json"
SENTENCEPIECE_FILE: Final = "tokenizer.model"
_SPECIAL_NAMES: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of a model folder. Nothing of the folder is executed but its chat template, in a sandbox.

    `decode` is by definition the tokens' bytes put together and read as UTF-8, invalid parts as U+FFFD; so it can be
    done token by token with the same result.

    Args:
        vocabulary: What the tokenizer file tells.
        config: Content of `tokenizer_config.json`.
        more_eos_token_ids: Ids that end a text besides `eos_token` of the config.
        chat_templates: Text of each by name; None: those of the config.

    Raises:
        ModelError: The config contradicts itself or the vocabulary.
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
        self._special_texts = {name: text for name in _SPECIAL_NAMES if (text := _text(config, name))}
        self.bos_token_id = self._special_id("bos_token", "<s>")
        eos = self._special_id("eos_token", "</s>")
        self.eos_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*([] if eos is None else [eos]), *more_eos_token_ids])
        )
        """Ids that end a text."""
        prescribed = isinstance(vocabulary, TokenizersVocabulary)
        self._add_bos = _flag(config, "add_bos_token", None if prescribed else self.bos_token_id is not None)
        self._add_eos = _flag(config, "add_eos_token", None if prescribed else False)
        if chat_templates is None:
            chat_templates = templates_of(config.get("chat_template"))
        self._conversations = Conversations(chat_templates, self._special_texts | _more_special_tokens(config))

    @classmethod
    def load(cls, folder: Path, vocab_file: Path | None = None) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face folder.

        Args:
            folder: Holds `tokenizer.json` or `tokenizer.model`, and usually `tokenizer_config.json`.
            vocab_file: A tokenizer file that takes the place of the folder's, or another folder.

        Raises:
            ModelError: No tokenizer is found, or it cannot be read.
        """
        if vocab_file is not None and vocab_file.is_dir():
            folder, vocab_file = vocab_file, None
        if vocab_file is None:
            candidates = [folder / TOKENIZERS_FILE, folder / SENTENCEPIECE_FILE]
            vocab_file = next((path for path in candidates if path.exists()), None)
            if vocab_file is None:
                raise ModelError(f"{folder}: has neither {TOKENIZERS_FILE} nor {SENTENCEPIECE_FILE}")
        elif not vocab_file.exists():
            raise ModelError(f"tokenizer file {vocab_file} does not exist")
        config = _read_json(folder / "tokenizer_config.json")
        vocabulary: Vocabulary
        if vocab_file.suffix == ".json":
            vocabulary = TokenizersVocabulary(vocab_file)
        else:
            vocabulary = SentencePieceVocabulary(vocab_file, _added_tokens(config))
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        more_eos = [item for item in (eos if isinstance(eos, list) else [eos]) if isinstance(item, int) and item >= 0]
        return cls(vocabulary, config, more_eos, read_templates(folder, config))

    @property
    def vocab_size(self) -> int:
        """Ids below this have a text; the model's own vocabulary may be padded beyond."""
        return len(self._vocabulary.token_bytes)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token."""
        return max(len(text.decode("utf-8", "replace")) for text in self._vocabulary.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        Args:
            text: Any text without lone surrogates.
            add_special_tokens: Put in the begin-of-sequence (rarely also end-of-sequence) token the model expects.
        """
        by_hand = self._add_bos is not None
        ids = self._vocabulary.encode(text, add_special_tokens and not by_hand)
        if add_special_tokens and by_hand:
            if self._add_bos and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
            if self._add_eos and self.eos_token_ids:
                ids = [*ids, self.eos_token_ids[0]]
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a text are left out."""
        table, _ = self.token_tables(skip_special_tokens)
        data = b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < len(table)])
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, special ones by their name; may be part of a character."""
        table = self._vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_text(self, token_id: int) -> str:
        r"""One token for people and JSON: its text, or "bytes:\xe4\xbd" where it is part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_tables(self, skip_special_tokens: bool) -> tuple[list[bytes], list[str | None]]:
        """Bytes of every token, and its text where it consists of whole characters, else None."""
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
        """The prompt text of a conversation; encode it with `add_special_tokens=False`. Arguments: `Conversations`.

        Raises:
            RequestError: The model has no chat template, or it refuses these messages.
        """
        return self._conversations.render(messages, **given)

    def _special_id(self, name: str, usual: str) -> int | None:
        text = self._special_texts.get(name)
        token_id = self._vocabulary.token_id(text or usual)
        if token_id is None and text is not None:
            raise ModelError(f"tokenizer_config.json: `{name}` must be in the vocabulary. Given: {shorten(text)}")
        if token_id is not None:
            self._special_texts.setdefault(name, usual)
        return token_id


def _complete_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(read_limited(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(content)}")
    return content


def _text(config: Mapping[str, Any], name: str) -> str | None:
    """A token that is written as text, or as an object that holds it."""
    return _content(config.get(name))


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    tokens = config.get("added_tokens_decoder")
    added = {}
    for token_id, token in tokens.items() if isinstance(tokens, dict) else ():
        if isinstance(token, dict) and token_id.isdecimal() and int(token_id) < 2**24 and token.get("content"):
            added[int(token_id)] = AddedToken(str(token["content"]), bool(token.get("special")))
    return added


def _more_special_tokens(config: Mapping[str, Any]) -> dict[str, list[str]]:
    name = "additional_special_tokens"
    items = config.get(name)
    texts = [_content(item) for item in items] if isinstance(items, list) else []
    given = [text for text in texts if text]
    return {name: given} if given else {}
