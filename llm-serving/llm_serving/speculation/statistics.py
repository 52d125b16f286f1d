"""Acceptance rates of draft tokens, and a model of the step time as a function of the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.core.enums import Proposer

RATE_MEMORY: Final = 8
RATE_DECAY: Final = 1 - 1 / RATE_MEMORY
FIRST_TOKEN_RATE: Final = 0.3
"""Assumed acceptance rate of the first token of a new n-gram match."""
FURTHER_TOKEN_RATE: Final = 0.8
"""Assumed acceptance rate of a draft token after an accepted one."""
MIN_ACCEPTANCE_RATE: Final = 0.5
"""Below this rate, a request gets no tokens from the draft model or from its constraint."""
FIRST_PAUSE_TOKENS: Final = 32
"""Output tokens of the first pause of the draft model for a request. Each further pause is twice as long."""
FIRST_FORCED_TOKENS: Final = 1.0
"""Assumed number of tokens per step that a constraint forces, until the first measurement."""
FORCED_MEMORY: Final = 8
FORCED_MEMORY_TOKENS: Final = 128
"""Output tokens in which an old average of forced tokens decays to `FIRST_FORCED_TOKENS` (time constant)."""
MAX_OUTLIER: Final = 4
"""Maximum ratio of a measurement to the average. Larger ones, for example of a paused thread, are clipped."""
STEP_DECAY: Final = 1 - 1 / 256
"""Factor by which each later step reduces the weight of a recorded step."""
SIZE_DECAY: Final = 1 / 1024
"""Weight of a recorded step if its size class differs by one; for a difference of n, the n-th power of this."""
SMALLEST_SIZE: Final = 7
"""A step's size class is the bit length of SMALLEST_SIZE + its number of tokens: 1 to 8 tokens form one class."""
MIN_VARIANCE: Final = 1e-6
"""Minimum relative variance of token counts for an estimate of the time of one token."""

PROMPT_MEMORY: Final = 64
GAIN_MEMORY: Final = 8
FIRST_GAIN: Final = 1.15
MIN_GAIN: Final = 1.03
FIRST_PAUSE_STEPS: Final = 256
"""Number of steps of the first pause of all drafts. Each further pause is twice as long."""
MAX_PAUSE_STEPS: Final = 4096


def no_time() -> float:
    return 0.0


class VerifiedDraft(NamedTuple):
    proposer: Proposer
    num_draft_tokens: int
    num_accepted_tokens: int


class Acceptance(NamedTuple):
    """Expected acceptance rates of a draft's first token, and of each token after an accepted one."""

    first: float
    further: float


def updated_rate(rate: float, num_accepted: int, is_rejected: bool, memory: int = RATE_MEMORY) -> float:
    """Return the moving average `rate` over `memory` tokens after more accepted tokens and perhaps a rejected one."""
    decay = 1 - 1 / memory
    rate = 1 - (1 - rate) * decay**num_accepted
    return float(rate * decay if is_rejected else rate)


class MovingAverage:
    """Exponential moving average of seconds, with clipped outliers. `memory`: time constant in measurements."""

    __slots__ = ("_memory", "value")

    def __init__(self, memory: int, value: float = 0.0) -> None:
        self._memory = memory
        self.value = value

    def add(self, seconds: float) -> None:
        mean = self.value
        self.value = mean + (min(seconds, MAX_OUTLIER * mean) - mean) / self._memory if mean else seconds


@dataclass(eq=False)
class RequestStatistics:
    model_rate: float
    match_rate: float = 0.0
    """Fraction of the latest output tokens that the n-gram draft predicted."""
    forced_rate: float = 1.0
    num_proposed: int = 0
    """Number of tokens of the latest draft that `proposer` proposed. The constraint forced the rest."""
    proposer: Proposer = Proposer.NGRAM
    _first: float = field(default=FIRST_TOKEN_RATE, init=False)
    _further: float = field(default=FURTHER_TOKEN_RATE, init=False)
    _is_confirmed: bool = field(default=False, init=False)
    _forced_tokens: float = field(default=FIRST_FORCED_TOKENS, init=False)
    _forced_at: int = field(default=0, init=False)
    _model_pause: int = field(default=FIRST_PAUSE_TOKENS, init=False)
    _model_resumes_at: int = field(default=0, init=False)

    @property
    def acceptance(self) -> Acceptance:
        """Expected acceptance rates of the n-gram draft. A new match is often wrong, a confirmed match rarely."""
        return Acceptance(self._further if self._is_confirmed else self._first, self._further)

    def record_match(self, num_matched: int, is_mismatched: bool) -> None:
        """Record how many output tokens the n-gram draft predicted. `is_mismatched`: the next one differed."""
        if not num_matched and not is_mismatched:
            return
        self.match_rate = updated_rate(self.match_rate, num_matched, is_mismatched)
        num_further, is_further_mismatched = num_matched, is_mismatched
        if not self._is_confirmed:
            self._first = updated_rate(self._first, min(num_matched, 1), not num_matched)
            num_further, is_further_mismatched = max(0, num_matched - 1), is_mismatched and num_matched > 0
        self._further = updated_rate(self._further, num_further, is_further_mismatched)
        self._is_confirmed = not is_mismatched

    def forced_tokens(self, num_output_tokens: int) -> float:
        known = (1 - 1 / FORCED_MEMORY_TOKENS) ** (num_output_tokens - self._forced_at)
        return FIRST_FORCED_TOKENS + known * (self._forced_tokens - FIRST_FORCED_TOKENS)

    def record_forced(self, num_draft_tokens: int, num_accepted: int, num_output_tokens: int) -> None:
        """Record how many draft tokens the grammar forced and how many were accepted, after `num_output_tokens`."""
        expected = self.forced_tokens(num_output_tokens)
        self._forced_tokens = expected + (num_accepted - expected) / FORCED_MEMORY
        self._forced_at = num_output_tokens
        self.forced_rate = updated_rate(self.forced_rate, num_accepted, num_accepted < num_draft_tokens)

    def may_use_model(self, num_output_tokens: int) -> bool:
        """Return whether the draft model may be used. A pause (`record_model`) ends at a number of output tokens."""
        return num_output_tokens >= self._model_resumes_at

    def record_model(self, num_draft_tokens: int, num_accepted: int, num_output_tokens: int) -> None:
        """Record accepted tokens of the draft model. At a low rate, pause the model for some further output tokens."""
        self.model_rate = updated_rate(self.model_rate, num_accepted, num_accepted < num_draft_tokens)
        if self.model_rate < MIN_ACCEPTANCE_RATE:
            self.model_rate = MIN_ACCEPTANCE_RATE
            self._model_resumes_at = num_output_tokens + self._model_pause
            self._model_pause *= 2


class StepTimeModel:
    """Predicts the duration of a decode step from its number of tokens.

    If memory bandwidth limits a step, a few more tokens hardly prolong it. If arithmetic limits it, its duration is
    proportional to the number of tokens. So each size class (powers of two) has its own line, fitted to the latest
    steps by weighted least squares. Steps of other size classes have less weight.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._classes: dict[int, _Sums] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        sums = self._classes.setdefault(_size_class(num_tokens), _Sums())
        decay = STEP_DECAY ** (self._num_steps - sums.newest)
        sums.newest = self._num_steps
        sums.weight = decay * sums.weight + 1
        sums.tokens = decay * sums.tokens + num_tokens
        sums.seconds = decay * sums.seconds + seconds
        sums.squares = decay * sums.squares + num_tokens**2
        sums.products = decay * sums.products + num_tokens * seconds

    def step_s(self, num_tokens: float) -> float:
        """Return the predicted seconds of a step; 0 before the first step."""
        weight = tokens = seconds = squares = products = 0.0
        own_size = _size_class(num_tokens)
        for size, sums in self._classes.items():
            share = SIZE_DECAY ** abs(size - own_size) * STEP_DECAY ** (self._num_steps - sums.newest)
            weight += share * sums.weight
            tokens += share * sums.tokens
            seconds += share * sums.seconds
            squares += share * sums.squares
            products += share * sums.products
        if not weight:
            return 0.0
        mean, mean_s = tokens / weight, seconds / weight
        variance = squares - tokens * mean
        if variance <= MIN_VARIANCE * tokens * mean:
            return mean_s
        slope = max(0.0, (products - seconds * mean) / variance)
        return max(0.1 * mean_s, mean_s + slope * (num_tokens - mean))

    def added_s(self, num_tokens: int, num_more: float) -> float:
        """Return how many seconds `num_more` tokens add to a step of `num_tokens` tokens.

        Each adds at most the step's mean time per token. While all steps have had the same size, the result is 0, so
        that drafts are tried and measured.
        """
        seconds = self.step_s(num_tokens)
        return min(max(0.0, self.step_s(num_tokens + num_more) - seconds), seconds * num_more / num_tokens)


class MeasuredGain:
    """Measures how much faster requests get tokens with drafts, and pauses all drafts if the gain is too small.

    With drafts, the master forms a step only after the previous reply, and may first wait for CPU cores, clients and
    the Python interpreter. A cost model cannot predict this wait, but the time between two replies includes it.
    """

    def __init__(self) -> None:
        self._plain = StepTimeModel()
        self._plain_s = 0.0
        self._saved_s = self._spent_s = 0.0
        """Decaying sums over steps with drafts: `_saved_s`, the seconds that their tokens would take without drafts,
        and `_spent_s`, the seconds that they took.
        """
        self.prompt_share = 0.0
        self._num_steps = self._resumes_at = 0
        self._pause = FIRST_PAUSE_STEPS

    @property
    def is_paused(self) -> bool:
        return self._num_steps < self._resumes_at

    def add(self, num_tokens: int, factor: float, seconds: float, *, has_prompts: bool, pays: bool) -> None:
        """Record a step, and pause drafts if they save too little. `seconds`: time since the previous reply.

        `num_tokens`: tokens of the step without drafts. `factor`: number of the step's output tokens, divided by the
        number expected without drafts. `pays`: whether drafts are in use.
        """
        self._num_steps += 1
        self.prompt_share += (has_prompts - self.prompt_share) / PROMPT_MEMORY
        if not pays:
            self._plain_s = min(seconds, MAX_OUTLIER * self._plain_s) if self._plain_s else seconds
            self._plain.add(num_tokens, self._plain_s)
            return
        plain_s = self._plain.step_s(num_tokens)
        if not plain_s:
            return
        if not self._spent_s:
            self._saved_s, self._spent_s = FIRST_GAIN * GAIN_MEMORY * plain_s, GAIN_MEMORY * plain_s
        decay = 1 - 1 / GAIN_MEMORY
        self._saved_s = decay * self._saved_s + factor * plain_s
        self._spent_s = decay * self._spent_s + min(seconds, MAX_OUTLIER * plain_s)
        if self._saved_s < MIN_GAIN * self._spent_s:
            self._saved_s, self._spent_s, self._resumes_at = 0.0, 0.0, self._num_steps + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_STEPS)
        elif self._saved_s > FIRST_GAIN * self._spent_s:
            self._pause = FIRST_PAUSE_STEPS


@dataclass(slots=True)
class _Sums:
    """Weighted sums over the recorded steps of one size class, see `SMALLEST_SIZE`. The latest of these steps, number
    `newest`, has weight 1 when it is added. Each later step multiplies the weights of earlier ones by `STEP_DECAY`.
    """

    newest: int = 0
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0


def _size_class(num_tokens: float) -> int:
    return (round(num_tokens) + SMALLEST_SIZE).bit_length()
