"""Predicts the time to first token from measured step times and the requests ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.scheduler import SchedulerLimits
from llm_serving.scheduler.schedule import Blocked, WaitReason

STEP_MEMORY: Final = 128
"""Time constant, in steps, of the moving averages of step times. Decode-only steps have an average of their own."""
FINISH_MEMORY: Final = 1024
"""Time constant of the finish rate, in steps. It is longer than `STEP_MEMORY`, because few steps finish a request."""
MIN_STEPS: Final = 32
MIN_FINISHED: Final = 8
MIN_SPREAD: Final = 0.1
"""Minimum relative standard deviation of the tokens per step for a measurement of the time of a token."""


class InFlightSteps(NamedTuple):
    """The steps of a replica that are scheduled but not completed. A new request joins only a later step."""

    num_steps: int = 0
    num_tokens: int = 0
    """Number of tokens of these steps, not counting one token of each row."""
    num_tokens_left: int = 0
    """Number of prompt tokens that these steps leave of the prompts that they compute in part."""
    since: float = math.inf
    """Engine time at which the oldest step began, or the latest one ended; infinite before the first step."""


NO_STEPS: Final = InFlightSteps()


@dataclass(frozen=True, slots=True)
class QueueAhead:
    """The work that a replica does before the first token of a request, including the request's own prompt."""

    num_requests: int
    num_tokens: int
    num_running: int
    """Number of running requests that the new one cannot preempt."""
    num_running_in_all: int
    in_flight: InFlightSteps = NO_STEPS
    elapsed_s: float = 0.0
    num_finishes: int = 0
    """Number of requests of the same tenant that must finish first, because of the tenant's concurrency limit."""
    tenant_slots: int = 1


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """Measured speed of a replica. A step of `n` tokens takes `step_s` + `n` * `token_s` seconds."""

    limits: SchedulerLimits
    step_s: float
    token_s: float
    finish_rate: float | None
    """Fraction of a step's rows that finish with the step: 1 / (steps per request). None until it is measured."""
    num_slots: int
    """Number of running slots: the configured number, or fewer while the KV cache is full."""

    def seconds_to_first_token(self, queue: QueueAhead) -> float | None:
        """Return the seconds until the last request of the queue has its first token, or None if they are unknown.

        The prediction uses the larger of two numbers of steps: the steps that compute all prompts in the token budget
        left by decoding, and the steps until finished requests have freed enough running slots.
        """
        num_decoding = min(queue.num_running_in_all, self.num_slots)
        in_flight = queue.in_flight
        num_tokens = queue.num_tokens + in_flight.num_tokens_left
        num_steps = max(
            math.ceil(num_tokens / max(1, self.limits.max_num_batched_tokens - num_decoding)),
            math.ceil(queue.num_requests / self.limits.max_prefill_seqs),
        )
        num_steps += in_flight.num_steps
        num_finishes = queue.num_running + queue.num_requests - self.num_slots
        for num, num_slots in ((num_finishes, self.num_slots), (queue.num_finishes, queue.tenant_slots)):
            if num <= 0:
                continue
            if self.finish_rate is None:
                return None
            # Steps that are scheduled ahead do not see that a request has finished.
            num_to_slot = math.ceil(num / (num_slots * self.finish_rate)) + self.limits.max_steps_in_flight
            num_steps = max(num_steps, num_to_slot)
        step_s = self.step_s + num_decoding * self.token_s
        seconds = num_steps * step_s + (num_tokens + in_flight.num_tokens) * self.token_s
        if in_flight.num_steps:
            mean_s = step_s + in_flight.num_tokens * self.token_s / in_flight.num_steps
            seconds -= min(queue.elapsed_s, mean_s)
        return seconds


class TtftPredictor:
    """Measures the steps of one replica. Only the engine's thread records; any thread may read the attributes.

    A linear regression of step time on the number of tokens gives the time per step and per token. Steps with prompts
    and decode-only steps have separate moving averages, so that frequent steps do not displace rare ones.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.speed: ReplicaSpeed | None = None
        self.in_flight = NO_STEPS
        self._num_slots: int | None = None
        """Number of running requests when the KV cache became full, or None while it is not full."""
        self._prefill_steps = _Moments()
        self._decode_steps = _Moments()
        self._num_steps = 0
        self._num_finished = 0
        self._finished = 0.0
        self._rows = 0.0

    def record_running(self, num_running: int, blocked: Blocked | None = None, has_room: bool = False) -> None:
        """Record, after a step was scheduled, whether the KV cache limits the number of running requests. `blocked`:
        the request that could not be admitted, if any. `has_room`: whether no request waits and one more would fit.
        """
        if blocked is not None and blocked.reason in (WaitReason.SLOTS, WaitReason.BLOCKS):
            self._num_slots = num_running if blocked.reason is WaitReason.BLOCKS else None
        elif self._num_slots is not None:
            self._num_slots = max(self._num_slots, num_running)
        if has_room:
            self._num_slots = None

    def record_step(self, *, num_tokens: int, num_rows: int, seconds: float, num_finished: int) -> None:
        """Record a step. `seconds`: from its submission (or the previous reply, if that was later) to its reply."""
        moments = self._prefill_steps if num_tokens > num_rows else self._decode_steps
        keep = 1 - 1 / STEP_MEMORY
        moments.weight = moments.weight * keep + 1
        moments.tokens = moments.tokens * keep + num_tokens
        moments.seconds = moments.seconds * keep + seconds
        moments.tokens_squared = moments.tokens_squared * keep + num_tokens * num_tokens
        moments.tokens_seconds = moments.tokens_seconds * keep + num_tokens * seconds
        keep = 1 - 1 / FINISH_MEMORY
        self._finished = self._finished * keep + num_finished
        self._rows = self._rows * keep + num_rows
        self._num_steps += 1
        self._num_finished += num_finished
        cost = self._cost()
        if cost is None or self._num_steps < MIN_STEPS:
            self.speed = None
            return
        finish_rate = None
        if self._num_finished >= MIN_FINISHED:  # no request runs for more steps than it may have tokens
            finish_rate = max(self._finished / self._rows, 1 / self.limits.max_model_len)
        num_slots = self.limits.max_num_seqs
        if self._num_slots is not None:
            num_slots = min(num_slots, max(1, self._num_slots))
        self.speed = ReplicaSpeed(self.limits, *cost, finish_rate, num_slots)

    def _cost(self) -> tuple[float, float] | None:
        """Return the seconds per step and per token, or None if the steps had too similar numbers of tokens."""
        prefill, decode = self._prefill_steps, self._decode_steps
        weight = prefill.weight + decode.weight
        tokens = (prefill.tokens + decode.tokens) / weight
        seconds = (prefill.seconds + decode.seconds) / weight
        variance = (prefill.tokens_squared + decode.tokens_squared) / weight - tokens**2
        if variance < (MIN_SPREAD * tokens) ** 2:
            return None
        covariance = (prefill.tokens_seconds + decode.tokens_seconds) / weight - tokens * seconds
        token_s = min(max(covariance / variance, 0.0), seconds / tokens)
        return seconds - token_s * tokens, token_s


@dataclass(slots=True)
class _Moments:
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0
