"""A WorkAgent that takes the seconds of a profile for a step and computes nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llm_serving.core.step import AllowedTokens, Int32Array, StepInput, StepOutput, no_top_tokens
from llm_serving.executor.executor import Unsupervised
from llm_serving.whatif.profile import Profile
from llm_serving.whatif.step_shape import StepShape, shape_of
from llm_serving.whatif.timeline import EngineClock

END_TOKEN = 2
"""What every answer ends with that ends by itself."""
FIRST_TOKEN = 3
"""From here on ids are words."""


class _Computed(NamedTuple):
    """A step under way."""

    step: StepInput
    shape: StepShape
    ends: float
    announced: bool
    """Whether its end is announced."""


class VirtualAgent(Unsupervised):
    """The executor of one replica; the seed of a request's sampling is its number in `lengths`.

    Args:
        profile: What takes how long.
        clock: Of the engine.
        wait_until: Lets the rest of the world go on to a time, as far as the engine can know of it.
        lengths: [requests, 2], tokens of each request's prompt, and after how many of output the model ends it.
        vocab_size: Of the model.
        rng: Draws how far from what is predicted each step is.
    """

    max_steps_in_flight = 2
    awaits_allowed = False

    def __init__(
        self,
        profile: Profile,
        clock: EngineClock,
        wait_until: Callable[[float], None],
        lengths: Int32Array,
        vocab_size: int,
        rng: random.Random,
    ) -> None:
        self.next_step = 0
        self.spans: list[tuple[float, float]] = []
        """(when a step began, seconds that it took)."""
        self._profile, self._clock, self._wait_until = profile, clock, wait_until
        self._lengths, self._vocab_size, self._rng = lengths, vocab_size, rng
        self._in_flight: deque[_Computed] = deque()
        self._free = 0.0

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        shape, profile, clock = shape_of(step), self._profile, self._clock
        clock.spend(profile.form.seconds(shape))
        seconds = profile.step.seconds(shape) * self._spread(profile.spread)
        begins = max(clock.now + profile.latency_s, self._free)
        self._free = begins + seconds
        self.spans.append((begins, seconds))
        self._in_flight.append(_Computed(step, shape, self._free, announce_ending))
        self.next_step += 1

    def allow(self, allowed: AllowedTokens) -> None:
        """Nothing is constrained here."""

    def await_ending(self) -> None:
        if self._in_flight and self._in_flight[-1].announced:
            self._wait(self._in_flight[-1].ends - self._profile.lead_s)

    def collect(self) -> StepOutput:
        step, shape, ends, _ = self._in_flight.popleft()
        self._wait(ends + self._profile.latency_s)
        self._clock.spend(self._profile.take.seconds(shape))
        sampling = step.sampling
        count = sampling.num_samples
        return StepOutput(step.step, self._tokens(step), np.zeros(count, np.float32), no_top_tokens(count))

    def _tokens(self, step: StepInput) -> Int32Array:
        """Names of request and position, and the end where it is due."""
        sampling = step.sampling
        requests = sampling.seed.astype(np.int64)
        prompt_lens, output_lens = self._lengths[requests, 0], self._lengths[requests, 1]
        words = FIRST_TOKEN + (requests * 7919 + sampling.position) % (self._vocab_size - FIRST_TOKEN)
        ends = sampling.position - prompt_lens + 1 >= output_lens
        return np.where(ends, END_TOKEN, words).astype(np.int32)

    def _spread(self, factors: Sequence[float]) -> float:
        if not factors:
            return 1.0
        place = self._rng.random() * (len(factors) - 1)
        below = int(place)
        return factors[below] + (place - below) * (factors[below + 1] - factors[below])

    def _wait(self, time: float) -> None:
        self._wait_until(time)
        self._clock.reach(time)

    def fileno(self) -> int | None:
        return None
