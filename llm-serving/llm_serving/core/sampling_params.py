"""How the tokens of one request are chosen and when they end: the table of sampling parameters.

Name, default, range and meaning of each stand here and nowhere else. Routes, the offline interface, step arrays and the
WorkAgent's checks follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from llm_serving.core.parameter_rules import (
    Flag,
    GrammarText,
    ParameterRule,
    Real,
    SomeTokenIds,
    Texts,
    TokenBiases,
    TokenIds,
    TokenSequences,
    Whole,
)
from llm_serving.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_SEED = 2**64 - 1
LOGIT_BIAS = Real(-100.0, 100.0)


def _parameter(default: Any, rule: ParameterRule) -> Any:
    return field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling half of a request; every field is checked on construction and then holds the value that is used.

    Raises:
        RequestError: A field is outside its range; names field, rule and value.
    """

    max_tokens: int = _parameter(16, Whole(0))
    """Most tokens to generate; 0: the prompt is computed and nothing follows it."""
    min_tokens: int = _parameter(0, Whole(0))
    """End-of-sequence and stop token ids cannot be sampled before this many tokens; at most `max_tokens`."""
    temperature: float = _parameter(1.0, Real(0.0, 100.0))
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = _parameter(0, Whole(0))
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = _parameter(1.0, Real(0.0, 1.0, above_low=True))
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = _parameter(0.0, Real(0.0, 1.0))
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = _parameter(1.0, Real(0.01, 100.0))
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019)."""
    presence_penalty: float = _parameter(0.0, Real(-2.0, 2.0))
    """Subtracted from the logit of every token already generated."""
    frequency_penalty: float = _parameter(0.0, Real(-2.0, 2.0))
    """Subtracted once per earlier occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = _parameter((), TokenBiases(MAX_LOGIT_BIAS, LOGIT_BIAS))
    """(token id, added logit) pairs; added logit -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = _parameter(None, SomeTokenIds(MAX_ALLOWED_TOKEN_IDS))
    """Only these tokens can be chosen. None: all."""
    bad_words: tuple[tuple[int, ...], ...] = _parameter((), TokenSequences(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
    """Token sequences: the last token of one cannot follow the others in the output."""
    constraint: str | None = _parameter(None, GrammarText())
    """A grammar as llguidance reads it, of one of the forms of docs/constraints.md: the output keeps to it, and ends
    only where it does."""
    seed: int = _parameter(0, Whole(0, MAX_SEED))
    """With the position it keys the random numbers: same seed, same tokens."""
    stop: tuple[str, ...] = _parameter((), Texts(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS))
    """Generation ends before the first of these strings to appear in the text."""
    stop_token_ids: tuple[int, ...] = _parameter((), TokenIds(MAX_STOP_TOKEN_IDS))
    """Generation ends at these ids, as at the model's own end of sequence."""
    include_stop_str_in_output: bool = _parameter(False, Flag())
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = _parameter(False, Flag())
    """Go on past the model's end-of-sequence ids (explicit `stop_token_ids` still end)."""
    logprobs: int | None = _parameter(None, Whole(0, MAX_LOGPROBS, optional=True))
    """None: none; n: the chosen token's log-probability and those of the n most likely."""
    prompt_logprobs: int | None = _parameter(None, Whole(0, MAX_LOGPROBS, optional=True))
    """None: none; n: the log-probability of every token of the prompt but the first, and those of the n most likely."""
    skip_special_tokens: bool = _parameter(True, Flag())
    """Leave special tokens out of the text."""
    detokenize: bool = _parameter(True, Flag())
    """False: token ids alone, no text; stop strings cannot be found then."""

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"must be an integer from 0 to {self.max_tokens}", self.min_tokens)
        if self.constraint is not None:
            for name in NOT_WITH_A_CONSTRAINT:
                if getattr(self, name) != DEFAULTS[name]:
                    raise RequestError(name, "is not supported with a constraint: it might leave no token to choose")
        if self.stop and not self.detokenize:
            raise RequestError("stop", "must be empty with detokenize: false, as there is no text to find it in")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_known_output(self) -> bool:
        """Whether a step depends on all tokens that came before, so that it cannot be formed ahead.

        A constraint does, too, but is told later: `StepInput.allowed_follow`.
        """
        return any(len(sequence) > 1 for sequence in self.bad_words)

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens that came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


RULES: Final[Mapping[str, ParameterRule]] = {each.name: each.metadata["rule"] for each in fields(SamplingParams)}
"""Name of a parameter -> what it may be."""
DEFAULTS: Final[Mapping[str, Any]] = {each.name: each.default for each in fields(SamplingParams)}
"""Name of a parameter -> what it is when nobody says."""
NOT_WITH_A_CONSTRAINT: Final = ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids")
"""Parameters that decide as well which tokens may come."""
