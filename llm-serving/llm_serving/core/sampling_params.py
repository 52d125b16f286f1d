"""Sampling parameters of a request, their ranges, beam search parameters, and the defaults in a model folder.

This module alone defines the name, default, range and meaning of each parameter. A real number is rounded to float32
before its range is checked, because tokens are sampled in float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from ctypes import c_float
from dataclasses import dataclass, field, fields
from itertools import compress
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from llm_serving.core.files import read_json_object
from llm_serving.errors import ModelError, RequestError, shorten

MAX_INT32: Final = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_SEED = 2**64 - 1
NOT_WITH_A_CONSTRAINT: Final = ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids")
"""Parameters that forbid tokens. Together with a constraint, they could leave no token."""
GENERATION_CONFIG: Final = "generation_config.json"
MAX_BYTES: Final = 2**20
MAX_END_IDS: Final = 256
PARAMETERS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of the file -> sampling parameter. Other keys, such as `do_sample`, have no effect."""


def as_float32(value: float) -> float:
    """Round to single precision. Numbers that are too large become infinite."""
    try:
        return c_float(value).value
    except OverflowError:  # an integer beyond every float
        return math.inf if value > 0 else -math.inf


class ParameterRule(Protocol):
    """Range of a parameter. `text` follows a field's name in a sentence, as in "must be an integer from 0 to 20"."""

    @property
    def text(self) -> str: ...

    def checked(self, field: str, value: Any) -> Any:
        """Return the value as it is stored, for example as a tuple. Raise RequestError if it is outside the range."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int = MAX_INT32
    optional: bool = False

    @property
    def text(self) -> str:
        return f"must be an integer from {self.low} to {self.high}"

    def checked(self, field: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise RequestError(field, self.text, value)
        return value


@dataclass(frozen=True, slots=True)
class Real:
    low: float
    high: float
    above_low: bool = False

    @property
    def text(self) -> str:
        if self.above_low:
            return f"must be above {self.low} and at most {self.high}"
        return f"must be a number from {self.low} to {self.high}"

    def checked(self, field: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(field, self.text, value)
        used = as_float32(value)
        if not self.holds(used):
            rounded = f" in single precision, where {value!r} is {used!r}" if self.holds(value) else ""
            raise RequestError(field, self.text + rounded, value)
        return used

    def holds(self, value: float) -> bool:
        low, high = as_float32(self.low), as_float32(self.high)
        return low <= value <= high and not (self.above_low and value == low)


@dataclass(frozen=True, slots=True)
class Flag:
    text: ClassVar[str] = "must be true or false"

    def checked(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise RequestError(field, self.text, value)
        return value


@dataclass(frozen=True, slots=True)
class GrammarText:
    text: ClassVar[str] = "must be a grammar"

    def checked(self, field: str, value: Any) -> str | None:
        if value is not None and not (isinstance(value, str) and value):
            raise RequestError(field, self.text, value)
        return value


_TOKEN_ID: Final = Whole(0)


def _is_list(value: Any) -> bool:
    if type(value) in (tuple, list):  # fast, because a request may hold hundreds of pairs
        return True
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


@dataclass(frozen=True, slots=True)
class _Items:
    """A list, stored as a tuple. Admission control checks later whether token ids in it are in the vocabulary."""

    max_count: int
    noun: ClassVar[str] = "ids"
    items: ClassVar[str] = "token ids"

    @property
    def text(self) -> str:
        return f"must hold at most {self.max_count} {self.noun}"

    def checked(self, field: str, value: Any) -> Any:
        if not _is_list(value):
            raise RequestError(field, f"must be a list of {self.items}", value)
        if len(value) > self.max_count:
            raise RequestError(field, self.text, len(value))
        return tuple([self.checked_item(field, each) for each in value])

    def checked_item(self, field: str, item: Any) -> Any:
        return _TOKEN_ID.checked(field, item)


class TokenIds(_Items):
    __slots__ = ()


class SomeTokenIds(_Items):
    __slots__ = ()

    @property
    def text(self) -> str:
        return f"must hold 1 to {self.max_count} ids"

    def checked(self, field: str, value: Any) -> Any:
        if value is None:
            return None
        found = super().checked(field, value)
        if not found:
            raise RequestError(field, self.text, 0)
        return found


@dataclass(frozen=True, slots=True)
class Texts(_Items):
    max_chars: int
    noun = items = "strings"

    def checked_item(self, field: str, item: Any) -> Any:
        if not isinstance(item, str) or not 1 <= len(item) <= self.max_chars:
            given = len(item) if isinstance(item, str) else item
            raise RequestError(field, f"must hold strings of 1 to {self.max_chars} characters", given)
        return item


@dataclass(frozen=True, slots=True)
class TokenSequences(_Items):
    max_len: int
    noun = "words"
    items = "words, each a list of token ids"

    def checked_item(self, field: str, item: Any) -> tuple[int, ...]:
        if not _is_list(item):
            raise RequestError(field, f"must hold {self.items}", item)
        if not 1 <= len(item) <= self.max_len:
            raise RequestError(field, f"must hold words of 1 to {self.max_len} tokens", len(item))
        return tuple([_TOKEN_ID.checked(field, token_id) for token_id in item])


@dataclass(frozen=True, slots=True)
class TokenBiases(_Items):
    bias: Real
    noun = "tokens"
    items = "pairs of a token id and a bias"

    def checked_item(self, field: str, item: Any) -> tuple[int, float]:
        if not _is_list(item) or len(item) != 2:
            raise RequestError(field, "must hold pairs of a token id and a bias", item)
        token, bias = item
        return _TOKEN_ID.checked(field, token), self.bias.checked(field, bias)


LOGIT_BIAS = Real(-100.0, 100.0)


def _parameter(default: Any, rule: ParameterRule) -> Any:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Raise RequestError on construction if a field is outside its range."""

    max_tokens: int = _parameter(16, Whole(0))
    """Maximum number of tokens to generate. 0: only the prompt is computed."""
    min_tokens: int = _parameter(0, Whole(0))
    """Number of tokens, at most `max_tokens`, before an end-of-sequence or stop token id may be sampled."""
    temperature: float = _parameter(1.0, Real(0.0, 100.0))
    """Divisor of the logits; 0 means greedy sampling."""
    top_k: int = _parameter(0, Whole(0))
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = _parameter(1.0, Real(0.0, 1.0, above_low=True))
    """Keep the smallest set of tokens whose total probability reaches this value."""
    min_p: float = _parameter(0.0, Real(0.0, 1.0))
    """Drop tokens whose probability is below this fraction of the most likely token's."""
    typical_p: float = _parameter(1.0, Real(0.0, 1.0, above_low=True))
    """Keep the most typical tokens (Meister et al. 2022, section 4) whose total probability reaches this value."""
    repetition_penalty: float = _parameter(1.0, Real(0.01, 100.0))
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019)."""
    presence_penalty: float = _parameter(0.0, Real(-2.0, 2.0))
    """Subtracted from the logit of every token already generated."""
    frequency_penalty: float = _parameter(0.0, Real(-2.0, 2.0))
    """Subtracted from the logit of a token once for each earlier occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = _parameter((), TokenBiases(MAX_LOGIT_BIAS, LOGIT_BIAS))
    """(token id, number added to its logit) pairs; -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = _parameter(None, SomeTokenIds(MAX_ALLOWED_TOKEN_IDS))
    """The only tokens that may be sampled. None: all."""
    bad_words: tuple[tuple[int, ...], ...] = _parameter((), TokenSequences(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
    """Banned token sequences: the last token of a sequence cannot be sampled after the others."""
    constraint: str | None = _parameter(None, GrammarText())
    """A grammar in llguidance's format (docs/guides/structured_output.md). The output conforms to it, and ends only
    where the grammar allows.
    """
    seed: int = _parameter(0, Whole(0, MAX_SEED))
    """Seed of the random numbers, together with the token position: same seed, same tokens."""
    stop: tuple[str, ...] = _parameter((), Texts(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS))
    """Generation ends before the first occurrence of one of these strings in the text."""
    stop_token_ids: tuple[int, ...] = _parameter((), TokenIds(MAX_STOP_TOKEN_IDS))
    """Token ids at which generation ends, in addition to the model's end of sequence."""
    include_stop_str_in_output: bool = _parameter(False, Flag())
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = _parameter(False, Flag())
    """Continue past the model's end-of-sequence ids. `stop_token_ids` of the request still end the output."""
    logprobs: int | None = _parameter(None, Whole(0, MAX_LOGPROBS, optional=True))
    """n: return log-probabilities of the chosen token and of the n most likely ones. None: return none."""
    prompt_logprobs: int | None = _parameter(None, Whole(0, MAX_LOGPROBS, optional=True))
    """n: return the log-probabilities of every prompt token but the first, and of the n most
    likely. None: return none.
    """
    skip_special_tokens: bool = _parameter(True, Flag())
    """Leave special tokens out of the text."""
    detokenize: bool = _parameter(True, Flag())
    """False: return token ids but no text. Stop strings then cannot be found."""

    def __post_init__(self) -> None:
        # `compress` and `map` run in C. They keep only the fields whose value is not the default object.
        for name in compress(RULES, map(is_not, _VALUES(self), DEFAULTS.values())):
            object.__setattr__(self, name, RULES[name].checked(name, getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"must be an integer from 0 to {self.max_tokens}", self.min_tokens)
        if self.constraint is not None:
            for name in NOT_WITH_A_CONSTRAINT:
                if getattr(self, name) != DEFAULTS[name]:
                    raise RequestError(
                        name, "is not supported with structured output: both together might leave no token to choose"
                    )
        if self.stop and not self.detokenize:
            raise RequestError("stop", "must be empty with detokenize: false, because there is no text to search")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_known_output(self) -> bool:
        """Whether a step can be formed only after all earlier tokens are known. Bad words of several tokens need this.
        A constraint does not, because the master sends the allowed tokens during the step.
        """
        return any(len(sequence) > 1 for sequence in self.bad_words)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


RULES: Final[Mapping[str, ParameterRule]] = {each.name: each.metadata["rule"] for each in fields(SamplingParams)}
DEFAULTS: Final[Mapping[str, Any]] = {each.name: each.default for each in fields(SamplingParams)}
_VALUES: Final = attrgetter(*DEFAULTS)


MAX_BEAM_WIDTH: Final = MAX_LOGPROBS // 2
"""Maximum width of a beam search. The search needs log-probabilities of twice as many tokens as it has beams."""
LENGTH_PENALTY: Final = Real(-10.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. Raise RequestError on construction if a field is outside its range."""

    width: int
    """Number of beams, and of finished sequences to keep; 1 to 10."""
    num_returned: int = 1
    """Number of best finished sequences to return; 1 to `width`."""
    length_penalty: float = 1.0
    """A sequence's score is its log-probability divided by its number of generated tokens to this power, -10 to 10. 0
    compares sums, 1 compares means, larger values prefer longer sequences.
    """
    early_stopping: bool = False
    """End as soon as `width` sequences have finished, even if an unfinished one could still be better."""

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            raise RequestError("best_of", f"must be from 1 to {MAX_BEAM_WIDTH} with use_beam_search", self.width)
        if not 1 <= self.num_returned <= self.width:
            raise RequestError("n", f"must be from 1 to {self.width}, the width of the beam search", self.num_returned)
        object.__setattr__(self, "length_penalty", LENGTH_PENALTY.checked("length_penalty", self.length_penalty))


AT_LEAST_ONE: Final = Whole(1)
"""For parameters whose value 0 is valid in a request but would be a mistake as a default."""


def generation_defaults(folder: Path | None) -> dict[str, Any]:
    """Return the defaults in a folder's generation config. Raise ModelError if a value or the file is invalid."""
    if folder is None:
        return {}
    path, content = folder / GENERATION_CONFIG, _read(folder / GENERATION_CONFIG)
    defaults = {}
    for key, name in PARAMETERS.items():
        value = content.get(key)
        if value is not None:
            try:
                rule = AT_LEAST_ONE if key == "max_new_tokens" else RULES[name]
                defaults[name] = rule.checked(key, 0 if key == "top_k" and value == -1 else value)
            except RequestError as error:
                raise ModelError(
                    f"{path}: {error}. Correct the file, or set model_config.generation_config: none"
                ) from None
    return defaults


def generation_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids of `eos_token_id` in a folder's generation config. Raise ModelError if file or ids are invalid."""
    path = folder / GENERATION_CONFIG
    value = _read(path).get("eos_token_id")
    items = value if isinstance(value, list) else [] if value is None else [value]
    if len(items) > MAX_END_IDS or not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ModelError(
            f"{path}: `eos_token_id` must be a token id or a list of at most {MAX_END_IDS}. Given: {shorten(value)}"
        )
    return tuple(dict.fromkeys(item for item in items if item >= 0))


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, MAX_BYTES) if path.exists() else {}
