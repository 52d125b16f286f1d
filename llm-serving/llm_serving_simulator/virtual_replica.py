"""One replica of a simulation: the shipping engine, a virtual WorkAgent, and the time of the engine's thread."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llm_serving.admission.ttft_predictor import TtftPredictor
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Inbox, Publish
from llm_serving.engine.replica import build_engine
from llm_serving.engine.sinks import SinkContext, attach_sink
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.network.caches import CacheLayout
from llm_serving.scheduler.schedule import Blocked, Schedule

from llm_serving_simulator.fast_forward import EngineOutput, FastForwardEngine, TokenCounter
from llm_serving_simulator.figures import Outcome, StepCounters
from llm_serving_simulator.profile import Profile, RangeMonitor
from llm_serving_simulator.virtual_time import EngineClock, MasterCPU
from llm_serving_simulator.virtual_work_agent import (
    END_TOKEN,
    MasterWork,
    RequestLengths,
    VirtualSpeculationController,
    VirtualWorkAgent,
    virtual_step,
)

CHECK_INTERVAL: Final = 256
"""Steps between two integrity checks of blocks and running slots."""
MAX_BLOCKS: Final = 10_000_000
"""Blocks of a replica; each one takes memory of the simulation."""
MIN_SLEEP_S: Final = 1e-6


@dataclass(frozen=True)
class ReplicaOptions:
    """What all replicas of a simulation share."""

    config: ServingConfig
    profile: Profile
    lengths: RequestLengths
    texts: Sequence[Sequence[int]]
    """Known answers by number of the request; empty: speculative decoding is off."""
    vocab_size: int
    layout: CacheLayout
    """The groups of layers of the model."""
    num_state_slots: int
    """Slots for states of fixed size; 0: no layer of the model keeps any."""
    seed: int
    counters: StepCounters
    master: MasterCPU
    range_monitor: RangeMonitor
    fast_forward: bool = True
    """Whether uniform decode steps are fast-forwarded."""
    predicts: bool = True
    """Whether anything depends on predicted TTFT, whose prediction takes long where many requests wait."""


class World(Protocol):
    """The parts of the simulation that a replica uses."""

    def drive(self, index: int, make: Callable[[Publish], Engine]) -> Engine: ...

    def run_until(self, time: float, clock: EngineClock) -> None:
        """Run the rest of the simulation up to a time, as far as other engines have come."""

    def set_active(self, clock: EngineClock) -> None:
        """Attribute calls of the event loop from now on to the engine with this clock."""

    def master_work(self, index: int) -> MasterWork:
        """Return the event loop's work until now that affects a replica."""

    def mark_pending(self, index: int) -> None:
        """Mark a replica that may have to wake: its inbox has a message, or a request waits."""

    def reschedule(self, time: float, index: int) -> None:
        """Set the time at which a replica runs next; infinite: when it is woken."""

    def outcome_of(self, request_id: str) -> Outcome: ...

    def send_tokens(self, time: float, count: int, index: int) -> list[float] | None:
        """Send tokens to clients now and return when each arrives; None if another event comes first."""

    def publish_at(self, time: float, outputs: Sequence[EngineOutput], publish: Publish, index: int) -> None:
        """Schedule the event loop to pass on a replica's outputs."""


class VirtualReplica:
    """An engine that runs when the simulation calls `step`, from `wake_time` on."""

    def __init__(self, world: World, options: ReplicaOptions, index: int) -> None:
        self.clock = EngineClock(options.master)
        self.wake_time = math.inf
        """Infinite while the replica has nothing to do."""
        self._sleeps = True
        self._wake_s = options.profile.wake_s
        self._world, self._index = world, index
        config, profile = options.config, options.profile
        self.agent = VirtualWorkAgent(
            profile,
            self.clock,
            lambda time: world.run_until(time, self.clock),
            lambda: world.master_work(index),
            options.lengths,
            options.texts,
            options.vocab_size,
            random.Random(f"{options.seed} {index}"),
            options.range_monitor,
        )
        num_blocks = options.layout.num_blocks(config.pa.num_blocks or 0) or profile.blocks_of(config.pa.block_size)
        if num_blocks is None:
            raise ConfigError("pa_config.num_blocks must be given: the profile has no number of blocks")
        if num_blocks > MAX_BLOCKS:
            rule = f"must be at most {MAX_BLOCKS} in a simulation"
            raise ConfigError(f"pa_config.num_blocks, or `num_blocks` of the profile, {rule}. Given: {num_blocks}")

        self._drafter = VirtualSpeculationController(config, self.agent) if options.texts else None

        def make(publish: Publish) -> Engine:
            return build_engine(
                config,
                num_blocks,
                self.agent,
                NO_TOKENIZER,
                options.counters,
                lambda outputs: world.publish_at(self.clock.now, outputs, publish, index),
                index,
                options.layout.num_blocks(config.pa.num_swap_blocks),
                options.layout.windows,
                clock=self.clock,
                num_state_slots=options.num_state_slots,
                build_drafter=lambda config, executor, clock, blocks: self._drafter,
                build_step=self._build_step,
                attach_sink=self._attach_sink,
            )

        self.engine = world.drive(index, make)
        self.engine.replace_inbox(VirtualInbox(lambda: world.mark_pending(index)))
        self._predicts, self._fast_forwards = options.predicts, options.fast_forward
        self._newest: Schedule | None = None
        """The newest step, if it was scheduled request by request."""
        self._fast_forward: FastForwardEngine | None = None
        if not options.predicts:
            nothing = _NoPredictions(self.engine.scheduler.limits)
            self.engine.ttft_predictor = self.engine._reports.predictor = nothing
        self._num_unchecked_steps = 0

    def wake(self, now: float) -> None:
        """Run at `now`, if the engine has requests and would run later."""
        if self.wake_time > now and self.engine.num_waiting:
            self.clock.advance_to(now + self._wake_s if self._sleeps else now)
            self._reschedule(self.clock.now, sleeps=False)

    def step(self) -> int:
        """Run the engine until it would sleep or check its inbox again; return the number of steps.

        Raises:
            AssertionError: The engine breaks an invariant, or makes no progress although requests wait.
        """
        self.clock.advance_to(self.wake_time)
        self._world.set_active(self.clock)
        if num_steps := self._step():
            self._reschedule(self.clock.now, sleeps=False)
            self._num_unchecked_steps += num_steps
            if self._num_unchecked_steps >= CHECK_INTERVAL:
                self.check()
            return num_steps
        if self.engine.num_waiting:
            self._world.mark_pending(self._index)
        idle_s = self.engine.idle_s
        assert idle_s is None or idle_s > 0 or not self.engine.num_waiting, "no progress although requests wait"
        self._reschedule(math.inf if idle_s is None else self.clock.now + max(idle_s, MIN_SLEEP_S), sleeps=True)
        return 0

    def _reschedule(self, time: float, *, sleeps: bool) -> None:
        self.wake_time, self._sleeps = time, sleeps
        self._world.reschedule(time, self._index)

    def _step(self) -> int:
        """Do as `Engine.step`, for several steps where they are uniform."""
        if self._fast_forward is None and self._newest is not None and self._fast_forwards:
            self._fast_forward = FastForwardEngine.start(
                self.engine, self.agent, self._drafter, self._newest, self._predicts, self._send_tokens
            )
        self._newest = None
        if self._fast_forward is not None:
            num_steps = self._fast_forward.advance()
            if not self._fast_forward.is_active:
                self._fast_forward = None
            if num_steps:
                return num_steps
        return self.engine.step()

    def _send_tokens(self, time: float, count: int) -> list[float] | None:
        return self._world.send_tokens(time, count, self._index)

    def _build_step(self, schedule: Schedule, number: int) -> Any:
        self._newest = schedule
        return virtual_step(schedule, number)

    def _attach_sink(self, request: Request, context: SinkContext) -> None:
        """Give a request a `TokenCounter`, unless its outputs must be complete."""
        if request.wants_migration or self.engine.audits(request):
            attach_sink(request, context)
            return
        request.sink = counter = TokenCounter(request, context, self._world.outcome_of(request.request_id))
        counter.start()

    def check(self) -> None:
        """Raise AssertionError if blocks or running slots are inconsistent."""
        if self._fast_forward is not None:
            self._fast_forward.settle()
        self._num_unchecked_steps = 0
        self.engine.scheduler.check_integrity()

    def check_end(self) -> None:
        """Raise AssertionError unless all requests have finished and all blocks are free."""
        self.check()
        scheduler = self.engine.scheduler
        assert not scheduler.has_unfinished_requests, "a request has not finished"
        pools = scheduler.blocks.pool, scheduler.blocks.host_pool
        assert not any(pool.num_used_blocks for pool in pools), "blocks are not freed"


class VirtualInbox(Inbox):
    """The inbox of a simulated engine. It has no file descriptor, because a simulation may have many replicas.

    Args:
        on_post: Called for each message.
    """

    def __init__(self, on_post: Callable[[], None]) -> None:
        self.ended: str | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.messages: deque[Callable[[], None]] = deque()
        self._on_post = on_post

    def post(self, message: Callable[[], None]) -> None:
        if self.ended is not None:
            raise WorkerDiedError(self.ended)
        self.messages.append(message)
        self._on_post()

    def wake(self) -> None:
        """Do nothing: no thread sleeps."""

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.on_end()

    def close(self, reason: str) -> None:
        self.end(reason)


class _NoPredictions(TtftPredictor):
    """The TTFT predictor of a simulation in which nothing depends on predictions."""

    def record_running(self, num_running: int, blocked: Blocked | None = None, has_room: bool = False) -> None:
        """Do nothing."""

    def record_step(self, *, num_tokens: int, num_rows: int, seconds: float, num_finished: int) -> None:
        """Do nothing."""


class _NoTokenizer:
    """The tokenizer of engines that produce no text."""

    eos_token_ids = (END_TOKEN,)


NO_TOKENIZER: Any = _NoTokenizer()
