"""How the tokens of one request are chosen and when they end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_serving.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling half of a request; every field is checked on construction.

    Raises:
        RequestError: A field is outside its range; names field, rule and value.
    """

    max_tokens: int = 16
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. 0 to 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already generated; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence in the output; -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added logit) pairs; added logit -100 to 100."""
    seed: int = 0
    """With the position it keys the random numbers: same seed, same tokens. 0 to 2^64 - 1."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings to appear in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at these ids, as at the model's own end of sequence."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (explicit `stop_token_ids` still end)."""
    logprobs: int | None = None
    """None: none; n: the chosen token's log-probability and those of the n most likely."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError("stop", f"must hold at most {MAX_STOP_STRINGS} strings", len(self.stop))
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError("stop", f"each string must have 1 to {MAX_STOP_STRING_CHARS} characters", len(text))
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError("logit_bias", f"must hold at most {MAX_LOGIT_BIAS} tokens", len(self.logit_bias))
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            rule = f"must hold at most {MAX_STOP_TOKEN_IDS} ids"
            raise RequestError("stop_token_ids", rule, len(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens that came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(field, f"must be an integer from {low} to {high}", value)


def _check_float(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        rule = f"must be above {low} and at most {high}" if open_low else f"must be a number from {low} to {high}"
        raise RequestError(field, rule, value)
