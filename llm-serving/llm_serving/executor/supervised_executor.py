"""An executor whose WorkAgent is started again when it dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llm_serving.core.clock import Clock, monotonic
from llm_serving.core.continuation import Continuation
from llm_serving.core.step import AllowedTokens, StepInput, StepOutput
from llm_serving.errors import LLMServingError, WorkerDiedError
from llm_serving.executor.away import Away
from llm_serving.executor.block_link import BlockLink
from llm_serving.executor.executor import RemoteExecutor, RestartFailedError
from llm_serving.executor.given_up import GivenUp
from llm_serving.executor.supervisor import WorkAgentProcess
from llm_serving.log import get_logger
from llm_serving.transport.messages import Loaded

logger = get_logger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0
LEAST_PATIENCE_S: Final = 20.0
"""Seconds that a WorkAgent may take to load again at the first attempt, however quick the first one was."""
PATIENCE: Final = 3.0
"""Times as long as the first one."""

StartAgent = Callable[[Loaded | None, float | None], WorkAgentProcess]
"""Starts a WorkAgent that is ready; given what the one before it had loaded, the new one loads as much. The second
argument is how many seconds it may take."""


def restart_delay_s(attempt: int) -> float:
    """Seconds to wait before attempt 0, 1, ... in a row: at once, then doubling up to a limit."""
    return 0.0 if attempt == 0 else min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 60), LONGEST_DELAY_S)


def patience_s(load_s: float, num_failed: int) -> float:
    """Seconds that an attempt may take after so many that failed, where the first WorkAgent took `load_s`.

    One that hangs while it loads is soon replaced; on a machine that has become slow each attempt gets twice the time
    of the one before, so that one of them is enough.
    """
    return max(LEAST_PATIENCE_S, PATIENCE * load_s) * 2.0 ** min(num_failed, 60)


class SupervisedExecutor:
    """Steps go to the WorkAgent of the moment; another one follows it for as long as somebody asks for it.

    Args:
        start: Starts a WorkAgent.
        step_timeout_s: Seconds a WorkAgent may take for a step.
        max_restarts: In a row, without a step in between: a first WorkAgent that ends before it is ready is given up
            after so many, and later ones are told to be away for good (`Away.used_up`).
        clock: Of the engine.
        given_up: Set by `give_up`; for `start`, which is to break off then.
        pause: Waits for so many seconds, or less if there shall be no restart any more: then it returns True. None:
            it waits for `give_up`.
    """

    def __init__(
        self,
        start: StartAgent,
        step_timeout_s: float,
        max_restarts: int,
        clock: Clock = monotonic,
        pause: Callable[[float], bool] | None = None,
        given_up: GivenUp | None = None,
    ) -> None:
        """Starts the first WorkAgent.

        Raises:
            ConfigError: It cannot load the model.
            WorkerDiedError: It ended before it was ready, and so did those that followed.
        """
        self._start = start
        self._step_timeout_s = step_timeout_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._given_up = GivenUp() if given_up is None else given_up
        self._pause = self._given_up.wait if pause is None else pause
        self._num_restarts = 0
        """In a row."""
        self.away: Away | None = None
        """While it is being started again."""
        self._use(self._first_agent())
        self.loaded = self._agent.loaded

    @property
    def max_steps_in_flight(self) -> int:
        return self._executor.max_steps_in_flight

    @property
    def used_up(self) -> bool:
        return self._num_restarts > self._max_restarts

    @property
    def num_compilations(self) -> int:
        """Graphs the WorkAgent of the moment had compiled by its latest step."""
        return self._executor.num_compilations

    @property
    def machine(self) -> str:
        """Address of the one on which the WorkAgent of the moment runs, or ran; empty: the master's own."""
        return self._agent.machine

    @property
    def block_link(self) -> BlockLink | None:
        """By which blocks of the WorkAgent of the moment come and go; closed when it is gone."""
        return self._agent.block_link

    @property
    def next_step(self) -> int:
        return self._executor.next_step

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        self._executor.submit(step, announce_ending)

    @property
    def awaits_allowed(self) -> bool:
        return self._executor.awaits_allowed

    def allow(self, allowed: AllowedTokens) -> None:
        self._executor.allow(allowed)

    def await_ending(self) -> None:
        self._executor.await_ending()

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        self._num_restarts = 0
        return output

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        return self._executor.propose(continuations)

    def fileno(self) -> int | None:
        return self._executor.fileno()

    def restart(self, reason: str) -> None:
        self._agent.kill()
        now, away = self._clock(), self.away
        delay_s = restart_delay_s(self._num_restarts)
        self._num_restarts += 1
        self.away = Away(
            reason=reason,
            since=now if away is None else away.since,
            begins=now + delay_s,
            load_s=self._load_s,
            num_failed=0 if away is None else away.num_failed + 1,
            num_restarts=self._num_restarts,
            max_restarts=self._max_restarts,
        )
        logger.warning("starting the WorkAgent again in %g s: %s", delay_s, reason)
        if self._pause(delay_s):
            raise WorkerDiedError(reason)
        try:
            self._use(self._start(self.loaded, patience_s(self._load_s, self.away.num_failed)))
        except (LLMServingError, OSError) as error:
            if self._given_up.is_set:
                raise WorkerDiedError(reason) from error
            raise RestartFailedError(str(error)) from error
        self.away = None

    def give_up(self) -> None:
        """There shall be no restart any more, and none that is under way; from any thread."""
        self._given_up.set()

    def close(self) -> None:
        """Ends the WorkAgent."""
        self._agent.stop()

    def _use(self, agent: WorkAgentProcess) -> None:
        self._agent = agent
        self._executor = RemoteExecutor(agent.channel, agent.buffers, self._step_timeout_s, self._clock)

    def _first_agent(self) -> WorkAgentProcess:
        """One that is killed while it loads is replaced like any other; one that says why it cannot load is not."""
        while True:
            began = self._clock()
            try:
                agent = self._start(None, None)
            except WorkerDiedError as error:
                if self._num_restarts >= self._max_restarts:
                    raise
                delay_s = restart_delay_s(self._num_restarts)
                self._num_restarts += 1
                logger.warning("starting the WorkAgent again in %g s: %s", delay_s, error)
                if self._pause(delay_s):
                    raise
            else:
                self._load_s = self._clock() - began
                return agent
