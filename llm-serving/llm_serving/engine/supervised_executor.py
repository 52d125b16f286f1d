"""An executor whose WorkAgent is started again when it dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from llm_serving.core.clock import Clock, monotonic
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.executor import RemoteExecutor
from llm_serving.engine.supervisor import WorkAgentProcess
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.log import get_logger
from llm_serving.transport.messages import Loaded

logger = get_logger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 10.0

StartAgent = Callable[[Loaded | None], WorkAgentProcess]
"""Starts a WorkAgent that is ready; given what the one before it had loaded, the new one loads as much."""


def restart_delay_s(attempt: int) -> float:
    """Seconds to wait before attempt 0, 1, ... in a row: at once, then doubling."""
    return 0.0 if attempt == 0 else min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)


class SupervisedExecutor:
    """Steps go to the WorkAgent of the moment. Gives up after `max_restarts` in a row without a step in between."""

    def __init__(self, start: StartAgent, step_timeout_s: float, max_restarts: int, clock: Clock = monotonic) -> None:
        """Starts the first WorkAgent.

        Raises:
            ConfigError: It cannot load the model.
            WorkerDiedError: It ended before it was ready.
        """
        self._start = start
        self._step_timeout_s = step_timeout_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._num_restarts = 0
        """In a row."""
        self._given_up = threading.Event()
        self._use(start(None))
        self.loaded = self._agent.loaded

    @property
    def max_steps_in_flight(self) -> int:
        return self._executor.max_steps_in_flight

    @property
    def num_compilations(self) -> int:
        """Graphs the WorkAgent of the moment had compiled by its latest step."""
        return self._executor.num_compilations

    @property
    def next_step(self) -> int:
        return self._executor.next_step

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        self._executor.submit(step, announce_ending)

    def await_ending(self) -> None:
        self._executor.await_ending()

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        self._num_restarts = 0
        return output

    def fileno(self) -> int | None:
        return self._executor.fileno()

    def restart(self, reason: str) -> None:
        self._agent.kill()
        while True:
            if self._num_restarts >= self._max_restarts:
                raise WorkerDiedError(f"{reason}; given up after {self._num_restarts} restarts in a row")
            delay_s = restart_delay_s(self._num_restarts)
            self._num_restarts += 1
            logger.warning("starting the WorkAgent again in %g s: %s", delay_s, reason)
            if self._given_up.wait(delay_s):
                raise WorkerDiedError(reason)
            try:
                self._use(self._start(self.loaded))
                return
            except (ConfigError, WorkerDiedError) as error:
                reason = str(error)

    def give_up(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        """Ends the WorkAgent."""
        self._agent.stop()

    def _use(self, agent: WorkAgentProcess) -> None:
        self._agent = agent
        self._executor = RemoteExecutor(agent.channel, agent.buffers, self._step_timeout_s, self._clock)
