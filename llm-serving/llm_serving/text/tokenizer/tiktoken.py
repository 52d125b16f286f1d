"""Reads byte-pair tokenizers whose tokens have ranks: tiktoken files, and `tekken.json` of Mistral."""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken

from llm_serving.core.files import parse_json
from llm_serving.errors import ModelError, RequestError, shorten
from llm_serving.text.tokenizer.vocabulary import TokenSplitter, read_limited

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]{1,8}\r?(\n|$)")
MAX_WHITE_SPACE: Final = 100_000
"""Maximum characters of a run of white space before it is split. The regex engine keeps a state for each."""
_SPACES: Final = re.compile(r"\s+")
"""Matches runs of any length. A pattern with a minimum length would scan a shorter run again from each position."""
MAX_SPECIAL_TOKENS: Final = 2**16


@dataclass(frozen=True)
class TiktokenFamily:
    """Properties of a tokenizer that a tiktoken file lacks, the same for all models of a family.

    `pattern`: regular expression that splits a text into words; merges never cross a word boundary. `special`: special
    tokens, whose ids follow those of the file. `names`: name in the config, such as `bos_token` -> special token.
    `prefix`: special tokens before every text. `composes`: texts are first normalized to NFC.
    """

    pattern: str
    special: tuple[str, ...]
    names: Mapping[str, str]
    prefix: tuple[str, ...] = ()
    composes: bool = False


LLAMA3: Final = TiktokenFamily(
    pattern=_WORDS % "{1,3}",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
    ),
    names={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
)
GLM4: Final = TiktokenFamily(
    pattern=_WORDS % "{1,3}",
    special=(
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    ),
    names={"eos_token": "<|endoftext|>"},
    prefix=("[gMASK]", "<sop>"),
)
QWEN: Final = TiktokenFamily(
    pattern=_WORDS % "",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    names={"eos_token": "<|endoftext|>"},
    composes=True,
)


class TiktokenVocabulary:
    """A vocabulary with the ids of the tiktoken library. Raise ModelError if the ranks or the pattern are invalid.

    `ranks`: bytes of every text token -> rank; the pair with the lowest rank is merged first. `first_id`: id of rank 0.
    `tokens`: tokens that are recognised in a text, by id.
    """

    strips_leading_space = False

    def __init__(
        self,
        path: Path,
        ranks: Mapping[bytes, int],
        family: TiktokenFamily,
        tokens: Mapping[int, AddedToken],
        first_id: int = 0,
    ) -> None:
        import tiktoken  # imported here because few models need it

        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ModelError(f"{path}: must have every rank from 0 to {len(ranks) - 1} exactly once")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ModelError(f"{path}: must have a token for every byte. Missing: {shorten(missing)}")
        try:
            self._encoding = tiktoken.Encoding(
                path.name, pat_str=family.pattern, mergeable_ranks=dict(ranks), special_tokens={}
            )
        except Exception as error:  # noqa: BLE001  of a library in another language
            raise ModelError(f"{path}: cannot be read: {str(error)[:200]}") from None
        self.token_bytes = [b""] * (max((first_id + len(ranks) - 1, *tokens)) + 1)
        for data, rank in ranks.items():
            self.token_bytes[first_id + rank] = data
        for token_id, token in tokens.items():
            self.token_bytes[token_id] = token.content.encode()
        self.special_ids = frozenset(token_id for token_id, token in tokens.items() if token.special)
        self.usual_names: Mapping[str, str] = family.names
        self._ids = {token.content: token_id for token_id, token in tokens.items()}
        self._ranks, self._first_id, self._composes = ranks, first_id, family.composes
        self._splitter = TokenSplitter({token.content: token for token in tokens.values()})
        self._prefix = [self._ids[text] for text in family.prefix if text in self._ids]
        self.adds_special_tokens = bool(family.prefix)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = list(self._prefix) if add_special_tokens else []
        text = unicodedata.normalize("NFC", text) if self._composes else text
        for part, is_token in self._splitter.split(text):
            if is_token:
                ids.append(self._ids[part])
            else:
                ids.extend([self._first_id + rank for piece in _cut(part) for rank in self._rank_pieces(piece)])
        return ids

    def token_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        rank = self._ranks.get(token.encode("utf-8", "replace"))
        return None if rank is None else self._first_id + rank

    def _rank_pieces(self, text: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a panic in Rust is not an Exception
                raise
            raise RequestError("prompt", "cannot be split into words by the pattern of the model's tokenizer") from None


def _cut(text: str) -> list[str]:
    if len(text) <= MAX_WHITE_SPACE:
        return [text]
    runs = [(match.start(), match.end()) for match in _SPACES.finditer(text)]
    most = MAX_WHITE_SPACE
    ends = [end for start, stop in runs if stop - start >= most for end in range(start + most, stop + 1, most)]
    return [piece for a, b in zip([0, *ends], [*ends, len(text)], strict=True) if (piece := text[a:b])]


def is_tiktoken_file(data: bytes) -> bool:
    return _LINE.match(data) is not None


def read_tiktoken(path: Path, family: TiktokenFamily, added: Mapping[int, AddedToken]) -> TiktokenVocabulary:
    """Read a tiktoken file: lines of a base64 token and its rank. Raise ModelError if the file is invalid."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_limited(path).splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            rule = f"line {number} must be a token in base64, a space and its rank"
            raise ModelError(f"{path}: {rule}. Given: {shorten(line)}") from None
    special = {len(ranks) + i: AddedToken(text, special=True) for i, text in enumerate(family.special)}
    return TiktokenVocabulary(path, ranks, family, {**special, **added})


_TEKKEN_SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read_tekken(path: Path, added: Mapping[int, AddedToken]) -> TiktokenVocabulary:
    """Read a `tekken.json`, in which special tokens have the first ids. Raise ModelError if the file is invalid."""
    try:
        content: Any = parse_json(read_limited(path))
        config = content["config"]
        num_special = _count(config["default_num_special_tokens"], MAX_SPECIAL_TOKENS)
        num_text = _count(config["default_vocab_size"], 2**24) - num_special
        vocab = content["vocab"][: max(num_text, 0)]
        ranks = {base64.b64decode(item["token_bytes"], validate=True): int(item["rank"]) for item in vocab}
        listed = content.get("special_tokens") or [
            {"rank": i, "token_str": text} for i, text in enumerate(_TEKKEN_SPECIAL)
        ]
        special = {i: AddedToken(f"<SPECIAL_{i}>", special=True) for i in range(num_special)} | {
            _count(item["rank"], num_special - 1): AddedToken(
                str(item["token_str"]), special=bool(item.get("is_control", True))
            )
            for item in listed
        }
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{path}: is not a tekken.json: {type(error).__name__}: {str(error)[:200]}") from None
    family = TiktokenFamily(pattern, (), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return TiktokenVocabulary(path, ranks, family, {**special, **added}, first_id=num_special)


def _count(value: Any, most: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    raise ValueError(f"must be an integer from 0 to {most}. Given: {shorten(value)}")
