"""The virtual WorkAgent, which spends a profile's seconds on a step and computes nothing; and its speculation."""

from __future__ import annotations

import functools
import random
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.step import Float32Array, StepOutput, TopTokens, no_top_tokens
from llm_serving.executor.executor import Executor
from llm_serving.scheduler import Schedule
from llm_serving.speculation import NgramProposer, SpeculationController
from llm_serving.speculation.controller import GainModel
from llm_serving.speculation.ngram import FINISHED_TOKENS, FinishedAnswersIndex, Int64Array, RequestDrafts

from llm_serving_simulator.files import MAX_INTEGER
from llm_serving_simulator.profile import IDLE_AFTER_S, Profile, RangeMonitor, StepShape
from llm_serving_simulator.virtual_time import EngineClock
from llm_serving_simulator.workload import FIRST_TOKEN

END_TOKEN: Final = MAX_INTEGER
"""EOS token of the virtual model; no answer of a workload contains it."""


class VirtualStep(NamedTuple):
    """The parts of a step that the virtual WorkAgent uses."""

    number: int
    shape: StepShape
    samples: list[tuple[int, int]]
    """(number of the request, position of the token) of each token to sample."""


def virtual_step(schedule: Schedule, number: int) -> Any:
    """Build a `VirtualStep`, in place of `StepBuilder.build`."""
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
    moves = len(schedule.block_moves) + len(schedule.exports)
    shape = StepShape(rows, tokens, len(samples), context + tokens, pairs, moves)
    return VirtualStep(number, shape, samples)


@functools.lru_cache(maxsize=4096)
def _no_logprobs(count: int) -> tuple[Float32Array, TopTokens]:
    return np.zeros(count, np.float32), no_top_tokens(count)


def step_output(number: int, token_ids: Sequence[int]) -> StepOutput:
    return StepOutput(number, np.array(token_ids, np.int32), *_no_logprobs(len(token_ids)))


class MasterWork(NamedTuple):
    """Work of the event loop up to some time."""

    sent: int = 0
    """Tokens of the replica sent to clients."""
    read: float = 0.0
    """Requests read, divided by the number of replicas."""


class RequestLengths(NamedTuple):
    """Lengths of all requests of a workload, by number of the request."""

    num_prompt: list[int]
    num_output: list[int]
    """Output tokens after which the model ends the answer."""
    end_positions: list[int]
    """Position of the EOS token among the request's tokens."""

    @classmethod
    def of(cls, num_prompt: list[int], num_output: list[int]) -> RequestLengths:
        ends = [prompt + output - 1 for prompt, output in zip(num_prompt, num_output, strict=True)]
        return cls(num_prompt, num_output, ends)


class _Submitted(NamedTuple):
    """A step in flight."""

    step: VirtualStep
    sent_s: float
    received_s: float
    factor: float
    """Ratio of actual to predicted time."""
    announced: bool
    """Whether the WorkAgent announces the end of the step."""


class VirtualWorkAgent(Executor):
    """The executor of one replica. The seed of a request's sampling parameters is its number in `lengths`.

    Args:
        profile: The costs.
        clock: Clock of the engine.
        wait_until: Runs the other parts of the simulation up to a time.
        master_work: Returns what the event loop has done until now.
        lengths: Lengths of the requests.
        texts: Known answers by number of the request; empty if speculative decoding is off.
        vocab_size: Vocabulary size of the model.
        rng: Draws the ratio of actual to predicted time of each step.
        range_monitor: Checks the steps.
    """

    max_steps_in_flight = 2
    next_step = 0

    def __init__(
        self,
        profile: Profile,
        clock: EngineClock,
        wait_until: Callable[[float], None],
        master_work: Callable[[], MasterWork],
        lengths: RequestLengths,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        rng: random.Random,
        range_monitor: RangeMonitor,
    ) -> None:
        self.spans: list[tuple[float, float]] = []
        """(start, seconds) of each step."""
        self.step_s = 0.0
        """Time of the newest step, from when it was sent, or from the reply before it, to its own reply."""
        self.process_s = 0.0
        """Time that the master took to process the newest reply."""
        self._profile, self._clock, self._wait_until = profile, clock, wait_until
        self._replied_s = 0.0
        self._num_prompt, self._num_output, self._end_positions = lengths
        self._texts = texts
        self._num_words, self._rng = vocab_size - FIRST_TOKEN, rng
        self._master_work, self._range_monitor = master_work, range_monitor
        self._ignores_master = not any(each.of in ("sent", "read") for each in profile.step.terms)
        """Whether the time of a step does not depend on the event loop's work."""
        self._in_flight: deque[_Submitted] = deque()
        self._free_s = -IDLE_AFTER_S
        """Earliest start of the oldest step in flight."""
        self._work_before = MasterWork()
        """Work of the event loop until then."""

    def submit(self, step: Any, announce_ending: bool = False) -> None:
        profile, clock = self._profile, self._clock
        self._range_monitor.check(step.shape)
        clock.work(profile.form.seconds(step.shape))
        sent_s = clock.now
        received_s = sent_s + profile.latency_s
        if not self._in_flight:
            if received_s > self._free_s + IDLE_AFTER_S:
                received_s += profile.idle_s
            self._record_master_work()
        self._in_flight.append(_Submitted(step, sent_s, received_s, self._draw(profile.spread), announce_ending))
        self.next_step += 1

    def await_ending(self) -> None:
        if self._in_flight and self._in_flight[-1].announced:
            self._await_end(self._in_flight[0], self._profile.lead_s)

    def collect(self) -> StepOutput:
        step = self.finish_oldest()
        return step_output(step.number, self._tokens(step.samples))

    def finish_oldest(self) -> VirtualStep:
        """Advance time until the master has processed the reply to the oldest step; return the step."""
        submitted = self._in_flight[0]
        step, start_s = submitted.step, max(submitted.received_s, self._free_s)
        end_s = self._await_end(submitted)
        self._in_flight.popleft()
        self.spans.append((start_s, end_s - start_s))
        self._free_s = end_s
        self._record_master_work()
        self._wait(end_s + self._profile.latency_s)
        replied_s = self._clock.now
        self.step_s, self._replied_s = replied_s - max(submitted.sent_s, self._replied_s), replied_s
        self._clock.work(self._profile.take.seconds(step.shape))
        self.process_s = self._clock.now - replied_s
        return step

    def tokens_of(self, request: Request, start: int, end: int) -> list[int]:
        """Return the tokens that the model samples for positions [start, end) of a request."""
        number = request.sampling.seed or 0
        first_end = min(end, max(start, self._end_positions[number]))
        if self._texts:
            words = [self._word(number, position) for position in range(start, first_end)]
        else:
            first, num_words = number * 7919, self._num_words
            words = [FIRST_TOKEN + (first + position) % num_words for position in range(start, first_end)]
        return words + [END_TOKEN] * (end - first_end)

    def num_output(self, request: Request) -> int:
        return min(self._num_output[request.sampling.seed or 0], request.sampling.max_tokens)

    def _await_end(self, submitted: _Submitted, lead_s: float = 0.0) -> float:
        """Wait until `lead_s` before the end of the oldest step; work of the event loop meanwhile delays the end."""
        start_s, end_s = max(submitted.received_s, self._free_s), -1.0
        if self._ignores_master:
            end_s = start_s + submitted.factor * self._profile.step.seconds(submitted.step.shape)
            self._wait(end_s - lead_s)
            return end_s
        known: MasterWork | None = None
        while (work := self._master_work()) != known:
            known = work
            before = self._work_before
            shape = submitted.step.shape.with_master_work(work.sent - before.sent, work.read - before.read)
            previous, end_s = end_s, start_s + submitted.factor * self._profile.step.seconds(shape)
            if end_s <= previous:
                break
            self._wait(end_s - lead_s)
        return end_s

    def _record_master_work(self) -> None:
        if not self._ignores_master:
            self._work_before = self._master_work()

    def _tokens(self, samples: Sequence[tuple[int, int]]) -> list[int]:
        """Return each sampled token: EOS where the answer ends, otherwise that of its text or an arbitrary one."""
        ends = self._end_positions
        if self._texts:
            word = self._word
            return [END_TOKEN if position >= ends[number] else word(number, position) for number, position in samples]
        num_words = self._num_words
        return [
            END_TOKEN if position >= ends[number] else FIRST_TOKEN + (number * 7919 + position) % num_words
            for number, position in samples
        ]

    def _word(self, number: int, position: int) -> int:
        text, index = self._texts[number], position - self._num_prompt[number]
        if index < len(text):
            return text[index]
        return FIRST_TOKEN + hash((number, position)) % self._num_words  # hashes of integers never vary

    def _draw(self, factors: Sequence[float]) -> float:
        """Draw from a distribution given by its quantiles."""
        if not factors:
            return 1.0
        rank = self._rng.random() * (len(factors) - 1)
        below = int(rank)
        return factors[below] + (rank - below) * (factors[below + 1] - factors[below])

    def _wait(self, time: float) -> None:
        self._wait_until(time)
        self._clock.advance_to(time)


# --- speculative decoding ---------------------------------------------------------------------------------------------

UPDATE_S: Final = 4e-6
"""CPU time of an update of the drafts, measured on Zen 4; the constants below come on top."""
COMPARE_S: Final = 2.5e-6
"""CPU time to compare the output of one request with its draft."""
LOOKUP_S: Final = 8e-6
"""CPU time of one n-gram lookup."""
EVALUATE_S: Final = 14e-6
"""CPU time to compute whether drafting pays off."""
PROPOSE_S: Final = 4e-6
"""CPU time to propose draft tokens for one request."""


class VirtualNgramProposer(NgramProposer):
    """The n-gram proposer of a server, which counts the CPU time that its work takes on a real master."""

    def __init__(self, config: ServingConfig) -> None:
        length = config.scheduler.prompt_lookup_min
        self.worked_s = 0.0
        """CPU time of the proposer and of its controller so far."""
        self.settle: Callable[[Request], None] = keep_state
        """Called before the proposer reads a request, to apply fast-forwarded steps to it."""
        finished = FinishedAnswersIndex(length, FINISHED_TOKENS, table=SparseTable, salt=_salt_of)
        super().__init__(length, finished, lambda: self.worked_s)

    def update(self, num_rows: int, num_steps: int, step_s: float, could_pay: Callable[[], bool]) -> bool:
        self.worked_s += UPDATE_S + COMPARE_S * len(self.matched)
        for request in self.matched:
            self.settle(request)
        return super().update(num_rows, num_steps, step_s, could_pay)

    def _look_up(self, request: Request) -> None:
        self.settle(request)
        self.worked_s += LOOKUP_S
        super()._look_up(request)


class VirtualGainModel(GainModel):
    """The gain model of a server. Step times count as on a master that notes the arrival of a reply when it comes."""

    def __init__(self, config: ServingConfig, agent: VirtualWorkAgent) -> None:
        super().__init__(config.scheduler.num_speculative_tokens)
        self._agent, self._ahead = agent, config.scheduler.async_scheduling

    def record_step(self, num_tokens: int, seconds: float, host_s: float) -> None:
        agent = self._agent
        super().record_step(num_tokens, agent.step_s, host_s + agent.process_s if self._ahead else 0.0)


class VirtualSpeculationController(SpeculationController):
    """The speculation controller of a server, whose work takes no virtual time.

    The CPU time of the work is counted, and decides how often the controller updates the drafts.
    """

    def __init__(self, config: ServingConfig, agent: VirtualWorkAgent) -> None:
        self.ngram = VirtualNgramProposer(config)
        super().__init__(config.scheduler.num_speculative_tokens, self.ngram, clock=lambda: self.ngram.worked_s)
        self.gain = VirtualGainModel(config, agent)

    def _evaluate(self, num_rows: int, model: Mapping[Request, RequestDrafts]) -> bool:
        self.ngram.worked_s += EVALUATE_S
        return super()._evaluate(num_rows, model)

    def _propose_for(self, request: Request, drafts: RequestDrafts, model_draft: list[int]) -> list[int]:
        self.ngram.worked_s += PROPOSE_S
        return super()._propose_for(request, drafts, model_draft)


class SparseTable:
    """A slot table that stores only its nonzero slots, because each of many replicas has one."""

    def __init__(self, num_slots: int) -> None:
        self._values: dict[int, int] = {}

    def __getitem__(self, slot: int) -> int:
        return self._values.get(slot, 0)

    def __setitem__(self, slots: Int64Array, values: Int64Array) -> None:
        self._values.update(zip(slots.tolist(), values.tolist(), strict=True))


def _salt_of(namespace: str) -> int:
    """Return a salt that, unlike the hash of a string, is the same in every process: a seed gives the same drafts."""
    return zlib.crc32(namespace.encode()) << 32  # the upper bits select the slot


def keep_state(request: Request) -> None:
    """Do nothing: every step updates the request."""
