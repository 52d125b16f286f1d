"""Reads the tokenizer in a GGUF file: `llama` (sentencepiece), `gpt2` (byte pairs) or `bert` (word pieces)."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tokenizers import AddedToken

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.gguf import read_gguf
from llm_serving.formats.mindspore_ckpt import content, number
from llm_serving.text.tokenizer.byte_pairs import GPT2, LLAMA3_WORDS, QWEN2, SMOLLM, Words, joins, tokenizer_json
from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tiktoken import LLAMA3
from llm_serving.text.tokenizer.vocabulary import (
    SPACE_SYMBOL,
    USUAL_NAMES,
    TokenizersVocabulary,
    Vocabulary,
)
from llm_serving.text.tokenizer.word_pieces import word_pieces

_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(suffix: str, digits: str, *, upper: str = _UPPER, lower: str = _LOWER, end: str = _END) -> str:
    """Return a regular expression that matches a word ("HelloWorld" has two) and `suffix`, or `digits`, or `end`."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{digits}|{end}"


_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN: Final = _by_case("", r"\p{N}")
_GPT4O: Final = _by_case(_CONTRACTION, r"\p{N}{1,3}")
_KIMI: Final = r"\p{Han}+|" + _by_case(
    _CONTRACTION,
    r"\p{N}{1,3}",
    upper=r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    lower=r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    end=_END.replace("/", ""),
)
_SEED: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED: Final = (
    rb"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    rb"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    rb"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    rb"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    rb"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    rb"\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    rb"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    rb"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    rb"\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
).decode("unicode_escape")
"""Letters with two cases, as DeepSeek's tokenizers up to V2 list them."""
_HAN: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK: Final = Words(
    (
        "[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER: Final = Words(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"))
_DEEPSEEK3: Final = Words(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_GPT4: Final = Words((LLAMA3.pattern,))

PRES: Final[Mapping[str, Words]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), LLAMA3_WORDS),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    **dict.fromkeys(("hunyuan", "stablelm2"), QWEN2._replace(composes=False)),
    "qwen35": Words((_QWEN35,), composes=True),
    **dict.fromkeys(("gpt-2", "granite-docling", "olmo", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), SMOLLM),
    "tekken": Words((_TEKKEN,), whole=True),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), Words((_GPT4O,))),
    "kimi-k2": Words((_KIMI,)),
    "seed-coder": Words((_SEED,)),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
}
"""Value of `tokenizer.ggml.pre` -> rule that splits a text into words."""
_BEGINS: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken")
"""Values of `tokenizer.ggml.pre` with which texts begin with the BOS token, if the file has no `add_bos_token`."""


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types, the same in sentencepiece and ggml."""

_KEYS: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_TURN_ENDS: Final = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Texts of the tokens that end a turn, for files that name no end-of-turn token."""
_HARMONY_ENDS: Final = ("<|call|>", "<|return|>")
"""Texts of the tokens that end a turn of gpt-oss. Its `<|end|>` ends only a message."""
_PHI3: Final = "phi3"
_KEEPS_SPACE: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 after which white space remains text. Other special tokens absorb it."""
_BPE: Final = 2
"""`TrainerSpec.model_type` of sentencepiece: pieces are merged by their scores."""


class GgufTokenizer(NamedTuple):
    """A file's tokenizer. `config`: settings as in `tokenizer_config.json`. `end_ids`: tokens that end an answer."""

    vocabulary: Vocabulary
    config: dict[str, Any]
    end_ids: list[int]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Read the tokenizer of a file. Raise ModelError if it is missing, of an unsupported kind, or inconsistent."""
    metadata = _Metadata(path, read_gguf(path, texts=True).metadata)
    kind = metadata.get("model")
    tokens, types = metadata.tokens()
    readers = {"llama": _sentencepiece, "gpt2": _byte_pairs, "bert": _word_pieces}
    if not isinstance(kind, str) or kind not in readers:
        rule = f"must be one of {', '.join(readers)}: name another tokenizer with model_config.tokenizer_path"
        raise metadata.fail("model", rule)
    return GgufTokenizer(*readers[kind](metadata, tokens, types), metadata.end_ids(tokens, types))


class _Metadata:
    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        architecture = values.get("general.architecture")
        self.architecture = architecture if isinstance(architecture, str) else ""
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(_KEYS + key)
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
        tokens = self.texts("tokens")
        if not tokens:
            raise self.fail("tokens", "must hold at least one token")
        types = self.numbers("token_type", "iu", len(tokens)) or [NORMAL] * len(tokens)
        if any(not NORMAL <= each <= BYTE for each in types):
            raise self.fail("token_type", f"must be types from {NORMAL} to {BYTE}")
        return tokens, types

    def token_id(self, key: str, count: int) -> int | None:
        token_id = self.get(key)
        if token_id is not None and (type(token_id) is not int or not 0 <= token_id < count):
            raise self.fail(key, f"must be the id of one of {count} tokens")
        return token_id

    def end_ids(self, tokens: Sequence[str], types: Sequence[int]) -> list[int]:
        """Return the ids of the tokens that end an answer: the end tokens that the file names. If it names no
        end-of-turn token, the tokens with a text in `_TURN_ENDS` are added. For gpt-oss, the result is the
        end-of-sequence token and the tokens in `_HARMONY_ENDS`.
        """
        ids = [self.token_id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
        usual: tuple[str, ...] = _TURN_ENDS if ids[1] is None else ()
        if _HARMONY_ENDS[0] in tokens:
            ids, usual = ids[:1], _HARMONY_ENDS
        ids += [i for i, text in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED) and text in usual]
        return list(dict.fromkeys(each for each in ids if each is not None))

    def config(self, tokens: Sequence[str], begins: bool) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        config: dict[str, Any] = {}
        for name, theirs in names.items():
            if (token_id := self.token_id(f"{theirs}_token_id", len(tokens))) is not None:
                config[f"{name}_token"] = tokens[token_id]
        begins = self.flag("add_bos_token", begins) and "bos_token" in config
        config |= {"add_bos_token": begins, "add_eos_token": self.flag("add_eos_token", False)}
        if isinstance(template := self._values.get(_TEMPLATE), str):
            config["chat_template"] = template
        return config

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.path}: `{_KEYS}{key}` {rule}. Given: {shorten(self.get(key))}")


def _byte_pairs(metadata: _Metadata, tokens: list[str], types: list[int]) -> tuple[Vocabulary, dict[str, Any]]:
    name = metadata.get("pre", "gpt-2")
    words = PRES.get(name) if isinstance(name, str) else None
    if words is None:
        known = ", ".join(PRES)
        raise metadata.fail("pre", f"must be one of {known}; or set model_config.tokenizer_path to another tokenizer")
    vocab = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] != UNUSED}
    if len(vocab) != len(tokens) - types.count(UNUSED):
        raise ModelError(f"{metadata.path}: `{_KEYS}tokens` must hold each text once")
    merges = metadata.texts("merges")
    if wrong := next((each for each in merges if not joins(each, vocab)), None):
        rule = "must list pairs of tokens that form a token"
        raise ModelError(f"{metadata.path}: `{_KEYS}merges` {rule}. Found: {shorten(wrong)}")
    ends = metadata.end_ids(tokens, types)  # some files mark special tokens as user-defined
    added = (
        {"id": token_id, "content": text, "special": kind == CONTROL or token_id in ends, **_AS_WRITTEN}
        for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) and text
    )
    content = tokenizer_json(vocab, merges, words, added)
    return TokenizersVocabulary(metadata.path, content=content), metadata.config(tokens, name in _BEGINS)


def _word_pieces(metadata: _Metadata, tokens: list[str], types: list[int]) -> tuple[Vocabulary, dict[str, Any]]:
    """Read BERT's tokenizer, and convert its pieces to those of a `vocab.txt`. A GGUF file marks the pieces that begin
    a word, but a `vocab.txt` marks the pieces that continue a word.
    """
    names = {"unk": "unknown", "pad": "padding", "cls": "cls", "sep": "seperator", "mask": "mask"}
    ids = {name: metadata.token_id(f"{theirs}_token_id", len(tokens)) for name, theirs in names.items()}
    pieces = [
        text if kind in (CONTROL, UNKNOWN) else text[1:] if text.startswith(SPACE_SYMBOL) else f"##{text}"
        for text, kind in zip(tokens, types, strict=True)
    ]
    config: dict[str, Any] = {f"{name}_token": pieces[each] for name, each in ids.items() if each is not None}
    lowers = metadata.flag("normalizer.lowercase", True)
    config |= {"do_lower_case": lowers, "strip_accents": metadata.flag("normalizer.strip_accents", lowers)}
    return word_pieces(metadata.path, pieces, config), config


_AS_WRITTEN: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _sentencepiece(metadata: _Metadata, tokens: list[str], types: list[int]) -> tuple[Vocabulary, dict[str, Any]]:
    scores = metadata.numbers("scores", "f", len(tokens))
    if scores is None:
        raise metadata.fail("scores", "must be given")
    if UNKNOWN not in types and (unknown_id := metadata.token_id("unknown_token_id", len(tokens))) is not None:
        types[unknown_id] = UNKNOWN  # some converters mark the unknown token as a control token, such as Gemma's
    if types.count(UNKNOWN) != 1:
        raise metadata.fail("token_type", f"must mark one token as the unknown token ({UNKNOWN})")
    prefix = metadata.flag("add_space_prefix", True)
    pieces = zip(tokens, scores, types, strict=True)
    messages = [content(1, _piece(*each)) for each in pieces]
    messages.append(content(2, number(3, _BPE) + number(35, int(BYTE in types))))
    messages.append(content(3, number(3, int(prefix)) + number(4, 0) + number(5, 1)))
    config = metadata.config(tokens, begins=True)
    names = [config[key] for key in ("bos_token", "eos_token", "pad_token") if key in config]
    unknown = tokens[types.index(UNKNOWN)]
    vocabulary = SentencePieceVocabulary(
        metadata.path,
        _absorbing(tokens, types) if metadata.architecture == _PHI3 else {},
        [*USUAL_NAMES.values(), *names],
        add_prefix_space=prefix,
        unk_token=unknown,
        content=b"".join(messages),
    )
    return vocabulary, config


def _absorbing(tokens: Sequence[str], types: Sequence[int]) -> dict[int, AddedToken]:
    """Return Phi-3's special tokens, most of which absorb following white space; a GGUF file does not say so."""
    return {
        token_id: AddedToken(text, special=kind == CONTROL, rstrip=text not in _KEEPS_SPACE)
        for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    }


def _piece(text: str, score: float, kind: int) -> bytes:
    if kind == USER_DEFINED:
        text = text.replace(" ", SPACE_SYMBOL)  # llama.cpp's converter writes spaces only in tokens of this type
    return content(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
