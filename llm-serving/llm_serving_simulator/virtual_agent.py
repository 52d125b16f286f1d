"""A WorkAgent that takes the seconds of a profile for a step and computes nothing."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from llm_serving.core.request import Request
from llm_serving.core.step import AllowedTokens, Continuation, Float32Array, StepOutput, TopTokens, no_top_tokens
from llm_serving.executor.executor import Unsupervised
from llm_serving.scheduler import Schedule

from llm_serving_simulator.document import MOST_WHOLE
from llm_serving_simulator.profile import IDLE_FOR_S, Profile
from llm_serving_simulator.reach import Beyond
from llm_serving_simulator.step_shape import StepShape
from llm_serving_simulator.timeline import EngineClock

END_TOKEN: Final = MOST_WHOLE
"""What every answer ends with that ends by itself; no text of a load has it."""
FIRST_TOKEN: Final = 3
"""From here on ids are words."""


class VirtualStep(NamedTuple):
    """Of a step what a profile needs, and who gets which token."""

    number: int
    shape: StepShape
    samples: list[tuple[int, int]]
    """(seed of the request, position of the token), of each token to be chosen."""


def virtual_step(schedule: Schedule, number: int) -> Any:
    """In place of `StepBuilder.build`, whose arrays nobody reads here."""
    tokens = context = pairs = 0
    samples = []
    for request, num_computed, query_len, num_samples, _ in schedule.rows:
        tokens += query_len
        context += num_computed
        if query_len > 1:
            pairs += query_len * num_computed + query_len * (query_len + 1) // 2
        if num_samples == 1:
            samples.append((request.sampling.seed or 0, num_computed + query_len))
        elif num_samples:  # one after the newest token, and one after each draft token
            end = num_computed + query_len + 1
            samples += [(request.sampling.seed or 0, position) for position in range(end - num_samples, end)]
    rows = len(schedule.rows)
    shape = StepShape(
        rows, tokens, len(samples), context + tokens, pairs, len(schedule.block_moves) + len(schedule.exports)
    )
    return VirtualStep(number, shape, samples)


@functools.lru_cache(maxsize=4096)
def _nothing_more(count: int) -> tuple[Float32Array, TopTokens]:
    """What a reply has beside its tokens."""
    return np.zeros(count, np.float32), no_top_tokens(count)


def reply_of(number: int, token_ids: Sequence[int]) -> StepOutput:
    """The reply to a step that chose these."""
    return StepOutput(number, np.array(token_ids, np.int32), *_nothing_more(len(token_ids)))


class Beside(NamedTuple):
    """What the master has done until a moment."""

    sent: int = 0
    """Tokens of the replica, passed on to clients."""
    read: float = 0.0
    """Requests, shared out among the replicas."""


class Lengths(NamedTuple):
    """Of all requests of a load, by number; one for all replicas."""

    num_prompt: list[int]
    """Tokens of each prompt."""
    num_output: list[int]
    """Of each answer, after which the model ends it."""
    ends: list[int]
    """The place of the token that ends it, among those of the request."""

    @classmethod
    def of(cls, num_prompt: list[int], num_output: list[int]) -> Lengths:
        ends = [prompt + output - 1 for prompt, output in zip(num_prompt, num_output, strict=True)]
        return cls(num_prompt, num_output, ends)


class _Submitted(NamedTuple):
    """A step under way."""

    step: VirtualStep
    sent: float
    came: float
    """When the WorkAgent had it."""
    factor: float
    """By which it differs from what is predicted."""
    announced: bool
    """Whether its end is announced."""


class VirtualAgent(Unsupervised):
    """The executor of one replica; the seed of a request's sampling is its number in `lengths`.

    Args:
        profile: What takes how long.
        clock: Of the engine.
        wait_until: Lets the rest of the world go on to a time, as far as the engine can know of it.
        beside: Tells what the master has done until then.
        lengths: Of the requests.
        texts: Of each request what it is answered, as far as that is known; empty: of none it is.
        vocab_size: Of the model.
        rng: Draws how far from what is predicted each step is.
        beyond: Looks at the steps.
    """

    max_steps_in_flight = 2
    awaits_allowed = False

    def __init__(
        self,
        profile: Profile,
        clock: EngineClock,
        wait_until: Callable[[float], None],
        beside: Callable[[], Beside],
        lengths: Lengths,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        rng: random.Random,
        beyond: Beyond,
    ) -> None:
        self.next_step = 0
        self.spans: list[tuple[float, float]] = []
        """(when a step began, seconds that it took)."""
        self._profile, self._clock, self._wait_until = profile, clock, wait_until
        self.computed_s = 0.0
        """Of the newest step, from when it was sent, or from the reply before it, to its own."""
        self.taken_s = 0.0
        """That taking this reply took."""
        self._replied = 0.0
        """When it was there."""
        self._num_prompt, self._num_output, self._ends = lengths
        self._texts = texts
        self._num_words, self._rng = vocab_size - FIRST_TOKEN, rng
        self._beside, self._beyond = beside, beyond
        self._is_undisturbed = not any(each.of in ("sent", "read") for each in profile.step.pieces)
        """Whether a step takes as long whatever is done beside it."""
        self._in_flight: deque[_Submitted] = deque()
        self._free = -IDLE_FOR_S
        """When the oldest step in flight could begin."""
        self._before = Beside()
        """What had been done beside until then."""

    def submit(self, step: Any, announce_ending: bool = False) -> None:
        """`step`: of `virtual_step`."""
        profile, clock = self._profile, self._clock
        self._beyond.look(step.shape)
        clock.spend(profile.form.seconds(step.shape))
        sent = clock.now
        came = sent + profile.latency_s
        if not self._in_flight:
            if came > self._free + IDLE_FOR_S:
                came += profile.idle_s
            self._look_beside()
        self._in_flight.append(_Submitted(step, sent, came, self._spread(profile.spread), announce_ending))
        self.next_step += 1

    def allow(self, allowed: AllowedTokens) -> None:
        """Nothing is constrained here."""

    def await_ending(self) -> None:
        if self._in_flight and self._in_flight[-1].announced:
            self._await_end(self._in_flight[0], self._profile.lead_s)

    def collect(self) -> StepOutput:
        step = self.finish_oldest()
        return reply_of(step.number, self._tokens(step.samples))

    def finish_oldest(self) -> VirtualStep:
        """Lets the time pass until the reply to the oldest step has been taken."""
        submitted = self._in_flight[0]
        step, began = submitted.step, max(submitted.came, self._free)
        ends = self._await_end(submitted)
        self._in_flight.popleft()
        self.spans.append((began, ends - began))
        self._free = ends
        self._look_beside()
        self._wait(ends + self._profile.latency_s)
        replied = self._clock.now
        self.computed_s, self._replied = replied - max(submitted.sent, self._replied), replied
        self._clock.spend(self._profile.take.seconds(step.shape))
        self.taken_s = self._clock.now - replied
        return step

    def tokens_of(self, request: Request, start: int, end: int) -> list[int]:
        """What is chosen for places [start, end) among a request's tokens."""
        number = request.sampling.seed or 0
        first_end = min(end, max(start, self._ends[number]))
        if self._texts:
            words = [self._word(number, place) for place in range(start, first_end)]
        else:
            first, num_words = number * 7919, self._num_words
            words = [FIRST_TOKEN + (first + place) % num_words for place in range(start, first_end)]
        return words + [END_TOKEN] * (end - first_end)

    def num_output(self, request: Request) -> int:
        """Tokens that its answer has in the end, if nothing ends it before."""
        return min(self._num_output[request.sampling.seed or 0], request.sampling.max_tokens)

    def _await_end(self, submitted: _Submitted, lead_s: float = 0.0) -> float:
        """Waits until so long before the end of the oldest step, which moves off with what is done beside it."""
        began, ends = max(submitted.came, self._free), -1.0
        if self._is_undisturbed:
            ends = began + submitted.factor * self._profile.step.seconds(submitted.step.shape)
            self._wait(ends - lead_s)
            return ends
        known: Beside | None = None
        while (beside := self._beside()) != known:
            known = beside
            shape = submitted.step.shape.beside(beside.sent - self._before.sent, beside.read - self._before.read)
            before, ends = ends, began + submitted.factor * self._profile.step.seconds(shape)
            if ends <= before:
                break
            self._wait(ends - lead_s)
        return ends

    def _look_beside(self) -> None:
        if not self._is_undisturbed:
            self._before = self._beside()

    def _tokens(self, samples: Sequence[tuple[int, int]]) -> list[int]:
        """Of each what its text has there, a word of no meaning where that is not known, or the end where it is due."""
        ends = self._ends
        if self._texts:
            word = self._word
            return [END_TOKEN if place >= ends[request] else word(request, place) for request, place in samples]
        num_words = self._num_words
        return [
            END_TOKEN if place >= ends[request] else FIRST_TOKEN + (request * 7919 + place) % num_words
            for request, place in samples
        ]

    def _word(self, request: int, place: int) -> int:
        text, index = self._texts[request], place - self._num_prompt[request]
        if index < len(text):
            return text[index]
        return FIRST_TOKEN + hash((request, place)) % self._num_words  # of integers, the same in every process

    def _spread(self, factors: Sequence[float]) -> float:
        if not factors:
            return 1.0
        place = self._rng.random() * (len(factors) - 1)
        below = int(place)
        return factors[below] + (place - below) * (factors[below + 1] - factors[below])

    def _wait(self, time: float) -> None:
        self._wait_until(time)
        self._clock.reach(time)

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        """Nothing: what a model would say is not simulated."""
        return [[] for _ in continuations]

    def fileno(self) -> int | None:
        return None
