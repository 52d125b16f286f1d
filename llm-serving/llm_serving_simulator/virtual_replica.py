"""One replica of a simulation: a shipping engine, a virtual WorkAgent, and the time of its thread."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llm_serving.admission.ttft_predictor import TtftPredictor
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.engine.engine import Engine, Publish
from llm_serving.engine.replica import build_engine
from llm_serving.engine.sinks import Desk, receive
from llm_serving.errors import ConfigError
from llm_serving.scheduler.schedule import Blocked, Schedule

from llm_serving_simulator.counted_answer import CountedAnswer, Told
from llm_serving_simulator.interpreter import Cores, Interpreter
from llm_serving_simulator.outcome import Outcome
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.reach import Beyond
from llm_serving_simulator.steady_engine import SteadyEngine
from llm_serving_simulator.tally import Tally
from llm_serving_simulator.timeline import EngineClock
from llm_serving_simulator.virtual_agent import END_TOKEN, Beside, Lengths, VirtualAgent, virtual_step
from llm_serving_simulator.virtual_drafter import VirtualSpeculationController
from llm_serving_simulator.virtual_inbox import VirtualInbox

CHECK_EVERY: Final = 256
"""Steps between two looks at all blocks and places; bounds are watched at every one."""
MAX_BLOCKS: Final = 10_000_000
"""Of a replica: each takes memory here too."""
LEAST_SLEEP_S: Final = 1e-6


@dataclass(frozen=True)
class Parts:
    """What all replicas of a simulation have in common."""

    config: ServingConfig
    profile: Profile
    lengths: Lengths
    texts: Sequence[Sequence[int]]
    """The known tokens of each answer; empty: no speculative decoding."""
    vocab_size: int
    window: int | None
    """Tokens that every layer of the model sees at most; None: one sees all."""
    seed: int
    tally: Tally
    master: Interpreter | Cores
    """What the master's threads compute by."""
    beyond: Beyond
    """Looks at the steps of all."""
    looks_alike: bool = True
    """Whether steps that are alike are taken for that; otherwise each is decided request by request."""
    predicts: bool = True
    """Whether anything is decided by when a first token is expected, which takes long to tell where many wait."""


class World(Protocol):
    """What a replica knows of the simulation it is part of."""

    def drive(self, index: int, make: Callable[[Publish], Engine]) -> Engine:
        """Has the master serve with an engine."""

    def let_happen(self, time: float, clock: EngineClock) -> None:
        """Lets the world go on to a time, as far as the other engines have come."""

    def now_steps(self, clock: EngineClock) -> None:
        """Whatever engines ask of the event loop from now on is asked by the one with this clock."""

    def beside(self, index: int) -> Beside:
        """What has been done until now beside the steps of a replica."""

    def called(self, index: int) -> None:
        """Something has come to the inbox of a replica, or somebody waits there although it sleeps."""

    def goes_on(self, time: float, index: int) -> None:
        """A replica has something to do from that time on, infinite: until it is woken it has not."""

    def outcome_of(self, request_id: str) -> Outcome:
        """What becomes of a request that has come to a replica."""

    def deliver(self, time: float, count: int, index: int) -> list[float] | None:
        """Has the event loop pass so many tokens on at once, and tells when each arrives; None: it cannot yet."""

    def publish_at(self, time: float, pieces: Sequence[Told], publish: Publish, index: int) -> None:
        """Has the event loop pass pieces of a replica on at a time."""


class VirtualReplica:
    """Steps when it is told to; `wakes` says from when on."""

    def __init__(self, world: World, parts: Parts, index: int) -> None:
        self.clock = EngineClock(parts.master)
        self.wakes = math.inf
        """When it goes on; infinite while it has nothing to do."""
        self._sleeps = True
        self._wake_s = parts.profile.wake_s
        self._world, self._index = world, index
        config, profile = parts.config, parts.profile
        self.agent = VirtualAgent(
            profile,
            self.clock,
            lambda time: world.let_happen(time, self.clock),
            lambda: world.beside(index),
            parts.lengths,
            parts.texts,
            parts.vocab_size,
            random.Random(f"{parts.seed} {index}"),
            parts.beyond,
        )
        num_blocks = config.pa.num_blocks or profile.blocks_of(config.pa.block_size)
        if num_blocks is None:
            raise ConfigError("pa_config.num_blocks must be given: the profile does not tell how many blocks there are")
        if num_blocks > MAX_BLOCKS:
            rule = f"must be at most {MAX_BLOCKS} in a simulation"
            raise ConfigError(f"pa_config.num_blocks, or `num_blocks` of the profile, {rule}. Given: {num_blocks}")

        self._drafter = VirtualSpeculationController(config, self.agent) if parts.texts else None

        def make(publish: Publish) -> Engine:
            return build_engine(
                config,
                num_blocks,
                self.agent,
                NO_TOKENIZER,
                parts.tally,
                lambda pieces: world.publish_at(self.clock.now, pieces, publish, index),
                index,
                config.pa.num_swap_blocks,
                parts.window,
                clock=self.clock,
                build_drafter=lambda config, executor, clock: self._drafter,
                build_step=self._build,
                attach_sink=self._receive,
            )

        self.engine = world.drive(index, make)
        self.engine.replace_inbox(VirtualInbox(lambda: world.called(index)))
        self._predicts, self._looks_alike = parts.predicts, parts.looks_alike
        self._newest: Schedule | None = None
        """The newest step that was formed request by request."""
        self._steady: SteadyEngine | None = None
        if not parts.predicts:
            nothing = _PredictsNothing(self.engine.scheduler.limits)
            self.engine.ttft_predictor = self.engine._reports.predictor = nothing
        self._num_since_check = 0

    def wake(self, now: float) -> None:
        """Something may have come into its inbox."""
        if self.wakes > now and self.engine.num_waiting:
            self.clock.reach(now + self._wake_s if self._sleeps else now)
            self._goes_on(self.clock.now, sleeps=False)

    def step(self) -> int:
        """Lets its engine do what it does until it would sleep or look again; returns how many steps these were.

        Raises:
            AssertionError: A block or a request is where it cannot be, or nothing moves.
        """
        self.clock.reach(self.wakes)
        self._world.now_steps(self.clock)
        if num_steps := self._step():
            self._goes_on(self.clock.now, sleeps=False)
            self._num_since_check += num_steps
            if self._num_since_check >= CHECK_EVERY:
                self.check()
            return num_steps
        if self.engine.num_waiting:
            self._world.called(self._index)
        idle_s = self.engine.idle_s
        assert idle_s is None or idle_s > 0 or not self.engine.num_waiting, "nothing moves although somebody waits"
        self._goes_on(math.inf if idle_s is None else self.clock.now + max(idle_s, LEAST_SLEEP_S), sleeps=True)
        return 0

    def _goes_on(self, time: float, *, sleeps: bool) -> None:
        self.wakes, self._sleeps = time, sleeps
        self._world.goes_on(time, self._index)

    def _step(self) -> int:
        """As `Engine.step`, several times where steps are like the one before, which take less time here."""
        if self._steady is None and self._newest is not None and self._looks_alike:
            self._steady = SteadyEngine.of(
                self.engine, self.agent, self._drafter, self._newest, self._predicts, self._deliver
            )
        self._newest = None
        if self._steady is not None:
            num_steps = self._steady.advance()
            if not self._steady.goes_on:
                self._steady = None
            if num_steps:
                return num_steps
        return self.engine.step()

    def _deliver(self, time: float, count: int) -> list[float] | None:
        return self._world.deliver(time, count, self._index)

    def _build(self, schedule: Schedule, number: int) -> Any:
        self._newest = schedule
        return virtual_step(schedule, number)

    def _receive(self, request: Request, desk: Desk) -> None:
        """Who is told only that there is another token, unless more is to be known of it."""
        if request.moves or self.engine.audits(request):
            receive(request, desk)
            return
        request.receiver = answer = CountedAnswer(request, desk, self._world.outcome_of(request.request_id))
        answer.begin()

    def check(self) -> None:
        """Raises AssertionError when a block or a request is where it cannot be."""
        if self._steady is not None:
            self._steady.settle()
        self._num_since_check = 0
        self.engine.scheduler.check_integrity()

    def check_end(self) -> None:
        """Raises AssertionError unless all have ended and given everything back."""
        self.check()
        scheduler = self.engine.scheduler
        assert not scheduler.has_unfinished_requests, "a request has not ended"
        pools = scheduler.blocks.pool, scheduler.blocks.host_pool
        assert not any(pool.num_used_blocks for pool in pools), "blocks are not given back"


class _PredictsNothing(TtftPredictor):
    """For loads nothing of which is decided by predictions."""

    def record_running(self, num_running: int, blocked: Blocked | None = None) -> None:
        """Measure nothing."""

    def record_step(self, *, num_tokens: int, num_rows: int, seconds: float, num_finished: int) -> None:
        """Measure nothing."""


class _NoTokenizer:
    """For engines that make no text."""

    eos_token_ids = (END_TOKEN,)


NO_TOKENIZER: Any = _NoTokenizer()
