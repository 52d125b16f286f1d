"""How long a request would wait for its first token: arithmetic over measured steps and what is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.admission.overruns import Overruns, remaining
from llm_serving.admission.slots import Slots
from llm_serving.scheduler import SchedulerLimits
from llm_serving.scheduler.schedule import Blocked, WaitReason

STEP_MEMORY: Final = 128
"""Steps of a kind after which a measured time counts 1/e."""
END_MEMORY: Final = 1024
"""Steps after which an ended request counts 1/e; ends are rarer than steps."""
MIN_STEPS: Final = 32
"""Steps that must have been measured before anything is predicted."""
MIN_ENDS: Final = 8
"""Requests that must have ended before the wait for a slot is predicted."""
MIN_SPREAD: Final = 0.1
"""Standard deviation of the tokens a step, against their mean; below, what a token costs cannot be told."""


class UnderWay(NamedTuple):
    """The steps of a replica that have been formed and not been replied to, oldest first."""

    num_tokens: tuple[int, ...] = ()
    """That each computes, beyond one for each of its rows."""
    num_left: int = 0
    """Tokens of prompts that these steps begin and do not compute."""
    began: float = math.inf
    """When the oldest of them did, on the engine's clock; without any, when the newest ended. Infinite: none was."""


NOTHING: Final = UnderWay()


@dataclass(frozen=True, slots=True)
class Queue:
    """What a request meets at its replica, itself included."""

    num_requests: int
    """Waiting, of its class and higher ones, and itself."""
    num_tokens: int
    """Of their prompts."""
    num_running: int
    """Running requests that do not give way to it."""
    num_running_in_all: int
    num_steps_to_slot: int | None = None
    """Until there is a slot for the last of them, where that is known of the running requests themselves."""
    under_way: UnderWay = NOTHING
    elapsed_s: float = 0.0
    """Since the oldest of these steps began."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What has been measured until now; seconds of a step = `step_s` + `token_s` * its tokens."""

    limits: SchedulerLimits
    step_s: float
    token_s: float
    ends_per_row: float | None
    """Share of the rows after which a request ended; its inverse is the steps a request runs for. None: too few."""
    num_slots: int
    """Requests that can run at once: the limit, or fewer when the cache is full."""
    overruns: Sequence[float] = ()
    """Times of the newest steps as multiples of what was expected of each, ascending."""

    def num_ends(self, queue: Queue) -> int:
        """Requests that must end before the last of the queue can start; 0 or less: none."""
        return queue.num_running + queue.num_requests - self.num_slots

    def seconds_to_first_token(self, queue: Queue) -> float | None:
        """Until the last of the queue has its first token, when nobody comes in between.

        Prompts are computed in what decoding leaves of each step's budget. Those that find no free slot wait for ends:
        as `num_steps_to_slot` says, or of `num_slots` rows a step the share `ends_per_row` ends. Whichever takes more
        steps counts. Before come the steps that are under way, of which the oldest has run for a while; after an end,
        those that have been formed ahead of it.

        Returns:
            Seconds; None when slots are full and too few requests have ended to tell how fast they get free.
        """
        num_decoding = min(queue.num_running_in_all, self.num_slots)
        under_way = queue.under_way
        num_tokens = queue.num_tokens + under_way.num_left
        num_steps = max(
            math.ceil(num_tokens / max(1, self.limits.max_num_batched_tokens - num_decoding)),
            math.ceil(queue.num_requests / self.limits.max_prefill_seqs),
        )
        num_steps += len(under_way.num_tokens)
        num_ends = self.num_ends(queue)
        num_steps_to_slot = queue.num_steps_to_slot
        if num_steps_to_slot is None and num_ends > 0:
            if self.ends_per_row is None:
                return None
            num_steps_to_slot = math.ceil(num_ends / (self.num_slots * self.ends_per_row))
        if num_steps_to_slot is not None:
            num_steps = max(num_steps, num_steps_to_slot + self.limits.max_steps_in_flight)
        step_s = self.step_s + num_decoding * self.token_s
        seconds = num_steps * step_s + (num_tokens + sum(under_way.num_tokens)) * self.token_s
        if under_way.num_tokens:
            oldest_s = step_s + under_way.num_tokens[0] * self.token_s
            if oldest_s > 0:
                seconds += oldest_s * (remaining(self.overruns, queue.elapsed_s / oldest_s) - 1)
        return seconds


class LoadEstimator:
    """Fed with every step by the engine loop; `measured` may be read by any thread.

    Steps that compute prompts and steps that only decode are remembered apart, so that a long time of one kind does not
    wash out the other; the line through both tells what a step costs and what a token costs.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.measured: Measured | None = None
        """None until enough has been measured."""
        self.slots: Slots | None = None
        """The requests that have a place at this moment; None before the first has one."""
        self.under_way = NOTHING
        self._num_slots: int | None = None
        """Of those that had one when there was no block for another; None: places are the limit."""
        self.limits = limits
        self._overruns = Overruns()
        self._prompt_steps = _Moments()
        self._decode_steps = _Moments()
        self._num_steps = 0
        self._num_ends = 0
        self._ends = 0.0
        self._rows = 0.0

    def placed(self, slots: Slots, blocked: Blocked | None = None) -> None:
        """Requests were given their places, or have left them.

        Args:
            slots: Those that have one now.
            blocked: Whom the scheduler left waiting; None where it was not asked, or left nobody.
        """
        self.slots = slots
        if blocked is not None and blocked.reason in (WaitReason.SLOTS, WaitReason.BLOCKS):
            self._num_slots = len(slots) if blocked.reason is WaitReason.BLOCKS else None
        elif self._num_slots is not None:
            self._num_slots = max(self._num_slots, len(slots))

    def has_room(self) -> None:
        """There are blocks for another one beside those that have a place: they are not what is short."""
        self._num_slots = None

    def step(
        self,
        *,
        num_tokens: int,
        num_rows: int,
        seconds: float,
        num_ended: int,
    ) -> None:
        """One step has been computed.

        Args:
            num_tokens: Tokens it computed.
            num_rows: Requests it computed them for.
            seconds: It took, from the end of the one before or from being submitted.
            num_ended: Requests whose last token it was.
        """
        if self.measured is not None:
            self._overruns.add(seconds, self.measured.step_s + num_tokens * self.measured.token_s)
        moments = self._prompt_steps if num_tokens > num_rows else self._decode_steps
        moments.add(num_tokens, seconds)
        keep = 1 - 1 / END_MEMORY
        self._ends = self._ends * keep + num_ended
        self._rows = self._rows * keep + num_rows
        self._num_steps += 1
        self._num_ends += num_ended
        cost = self._cost()
        if cost is None or self._num_steps < MIN_STEPS:
            self.measured = None
            return
        ends_per_row = None
        if self._num_ends >= MIN_ENDS:  # none has more rows than it may have tokens, however long no one has ended
            ends_per_row = max(self._ends / self._rows, 1 / self.limits.max_model_len)
        most = self.limits.max_num_seqs
        num = most if self._num_slots is None else min(most, max(1, self._num_slots))
        self.measured = Measured(self.limits, *cost, ends_per_row, num, self._overruns.ascending)

    def _cost(self) -> tuple[float, float] | None:
        """Seconds of a step and of a token, by least squares; neither is negative."""
        prompts, decodes = self._prompt_steps, self._decode_steps
        weight = prompts.weight + decodes.weight
        tokens = (prompts.tokens + decodes.tokens) / weight
        seconds = (prompts.seconds + decodes.seconds) / weight
        variance = (prompts.tokens_squared + decodes.tokens_squared) / weight - tokens**2
        if variance < (MIN_SPREAD * tokens) ** 2:
            return None
        covariance = (prompts.tokens_seconds + decodes.tokens_seconds) / weight - tokens * seconds
        token_s = min(max(covariance / variance, 0.0), seconds / tokens)
        return seconds - token_s * tokens, token_s


@dataclass(slots=True)
class _Moments:
    """Exponentially weighted sums over steps of one kind."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 1 - 1 / STEP_MEMORY
        self.weight = self.weight * keep + 1
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.tokens_squared = self.tokens_squared * keep + tokens * tokens
        self.tokens_seconds = self.tokens_seconds * keep + tokens * seconds
