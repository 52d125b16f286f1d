"""A replica of the simulation of a master (`tests/tools/simulation.py`): its engine is real, its WorkAgents are not."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from llm_serving.engine.engine import Engine
from llm_serving.engine.replica import create_transfer_pool
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.supervisor import SupervisedExecutor
from llm_serving.executor.worker_process import StartCancellation
from llm_serving.transport.messages import Loaded
from support.factories import create_scheduler
from support.fake_speculation import RandomDrafts
from support.simulated_agent import Faults, SimulatedAgent
from support.simulated_client import RESTARTING
from support.word_tokenizer import WordTokenizer

STEP_TIMEOUT_S = 1.0
TOKENIZER: Any = WordTokenizer()


class EventLoop:
    """An event loop that runs the callbacks of engines when the simulation calls `run`."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()

    def call_soon_threadsafe(self, callback: Callable[[Any], None], argument: object) -> None:
        self._calls.append((callback, argument))

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def run(self) -> None:
        while self._calls:
            callback, argument = self._calls.popleft()
            callback(argument)


class Replica:
    """An engine and all WorkAgents that it has started."""

    def __init__(self, simulation: Any, index: int, scheduler: dict[str, Any]) -> None:
        """Start the first WorkAgent.

        Args:
            simulation: The simulation to which the replica belongs.
            index: Index of the replica.
            scheduler: Options of `create_scheduler`.

        Raises:
            WorkerDiedError: No WorkAgent becomes ready.
        """
        self._simulation = simulation
        self.index = index
        rng = simulation.rng
        self.faults = Faults(
            rng,
            rate=rng.choice((0.0, 0.05, 0.3)),
            distance=rng.choice((0, 25)),
            poison_kills=rng.random() < 0.5,
        )
        max_steps_in_flight = rng.choice((1, 2))
        num_transfer = simulation.num_transfer_blocks
        exports = create_transfer_pool(num_transfer, index * num_transfer) if num_transfer else None
        self.scheduler = create_scheduler(**scheduler, max_steps_in_flight=max_steps_in_flight, exports=exports)
        self.stopped = False
        """Whether the replica was stopped together with the master."""
        self.agents: list[SimulatedAgent] = []
        self.rate_of_failing_starts = rng.choice((0.2, 0.2, 0.8))
        self.num_failed_starts = 0
        cancellation = StartCancellation()
        self.executor = SupervisedExecutor(
            self._start,
            STEP_TIMEOUT_S,
            rng.choice((2, 50)),
            simulation.clock,
            pause=lambda delay_s: cancellation.is_cancelled,
            cancellation=cancellation,
        )
        self.restart_wait_s = rng.choice((0.5, 1000.0))
        drafts = RandomDrafts(rng, rng.choice((0.0, 0.3)), self.scheduler.blocks.groups.windows[0].num_tokens)
        self.engine = Engine(
            self.scheduler,
            self.executor,
            TOKENIZER,
            simulation.metrics,
            lambda pieces: simulation.publish(pieces, self.engine),
            index=index,
            clock=simulation.clock,
            max_steps_in_flight=max_steps_in_flight,
            audit_every=rng.choice((0, 0, 1, 3)),
            restart_wait_s=self.restart_wait_s,
            drafter=rng.choice((None, drafts)),
        )

    def _start(self, like: Loaded | None, timeout_s: float | None) -> SimulatedAgent:
        simulation = self._simulation
        if like is not None:
            simulation.let_clients_act(RESTARTING, self.engine)
            if self.faults.rate and simulation.rng.random() < self.rate_of_failing_starts:
                simulation.clock.now += simulation.rng.uniform(0.0, 1.0)
                self.num_failed_starts += 1
                raise WorkerDiedError("it ended before it was ready")
        make = functools.partial(
            SimulatedAgent,
            simulation.rng,
            simulation.clock,
            self.faults,
            self.scheduler.blocks,
            simulation.let_clients_act,
            transfer=simulation.transfer if simulation.num_transfer_blocks else None,
        )
        agent = make() if simulation.network is None else simulation.network.start(make)
        self.agents.append(agent)
        return agent

    def step(self) -> bool:
        """Run a step; return whether there was or will be work."""
        if self.engine.dead is not None:
            return False
        # the engine may be in the middle of a step when it is stopped, and notice that later
        if self.engine.is_stopping:
            chance = self._simulation.rng.random()
            if chance < 0.3:
                self._step()
            if chance < 0.6 and self.engine.dead is None:
                self._end()
            return True
        return self._step()

    def _step(self) -> bool:
        try:
            progressed = self.engine.step()
        except WorkerDiedError:  # the engine was stopped while it restarted its WorkAgent
            assert self.engine.is_stopping
            self._end()
            return True
        self.scheduler.check_integrity()
        return progressed

    def stop(self) -> None:
        self.stopped = True
        if self.engine.dead is None:
            self.engine.stop()
            self._end()

    def _end(self) -> None:
        self.engine.run()  # returns when the engine has ended
        self.scheduler.check_integrity()
        self._simulation.on_replica_end(self)
        self.close()

    def check_end(self) -> None:
        assert not self.scheduler.has_unfinished_requests
        blocks = self.scheduler.blocks
        assert blocks.pool.num_used_blocks == blocks.host_pool.num_used_blocks == 0
        if self.engine.dead is None:
            assert blocks.transfer_pool.pool.num_used_blocks == 0, "exported blocks were not freed"

    def may_have_failed_requests(self, poisoned: bool) -> bool:
        """Return whether a fault may have ended a request that did not cause it."""
        network = self._simulation.network
        lost_steps = network is not None and bool(network.counts)
        suspicious = poisoned or self.faults.distance == 0 or lost_steps
        return self.stopped or (bool(self.faults.counts or (lost_steps and poisoned)) and suspicious)

    def close(self) -> None:
        self.executor.close()
        self.engine.close()
