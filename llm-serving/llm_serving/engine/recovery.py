"""Recovery after a failed step: a bisection finds the requests that cause the failure, and the others continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import PoolingMode
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.step import all_tokens_allowed
from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.executor.executor import Executor, RestartFailedError, StepFailedError
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.kvcache import BlockManager, StateSlots
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler, SchedulingRules
from llm_serving.scheduler.policies import ArrivalOrder, Mixed

T = TypeVar("T")

logger = get_logger(__name__)
DEATHS_TO_SUSPECT: Final = 2
"""A request is tested after the WorkAgent has exited in this many consecutive steps with the request."""
MAX_LOST_STEPS: Final = 4
"""Number of consecutive lost steps after which a request ends even if no test shows that it is the cause."""


def find_culprits(suspects: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return the suspects that fail alone. A bisection finds each of them with about 2 log2(n) calls of `passes`."""
    if passes(suspects):
        return []
    if len(suspects) == 1:
        return list(suspects)
    half = len(suspects) // 2
    return find_culprits(suspects[:half], passes) + find_culprits(suspects[half:], passes)


@dataclass(eq=False)
class Recovery:
    """Restores a replica after steps were lost. The WorkAgent recomputes lost KV blocks from the master's token ids.

    `_on_restart_attempt` runs after each attempt to restart the WorkAgent. `_on_trial_step` runs before each step that
    tests suspected requests.
    """

    _scheduler: Scheduler
    _executor: Executor
    _metrics: Metrics
    _on_restart_attempt: Callable[[str], None] = lambda reason: None
    _on_trial_step: Callable[[], None] = lambda: None
    _pooling: PoolingMode = PoolingMode.LAST
    _index: int = 0
    restarting: str | None = field(default=None, init=False)

    def culprits(self, error: LLMServingError, in_flight: Sequence[Schedule]) -> list[Request]:
        """Restart the WorkAgent if necessary, however long that takes. Return the requests that caused the failure.
        `error`: why the oldest step in flight or a submission failed. Raise WorkerDiedError if no restart succeeds.
        """
        logger.error("WorkAgent %d lost the results of the submitted steps: %s", self._index, error)
        failed = isinstance(error, StepFailedError) and self._survives(in_flight[1:])
        steps = in_flight[:1] if failed else in_flight
        rows = [row for schedule in steps for row in schedule.rows]
        requests = {id(row.request): row.request for row in rows}
        lost = [request for request in requests.values() if not request.is_finished]
        for request in lost:
            request.num_lost_steps += 1
        for row in rows:
            # The next attempt may compute another part of a prompt first, so a request has passed the lost step only
            # when it has computed all tokens up to the end of that step.
            reached = row.end - row.num_drafts - 1
            row.request.num_tokens_at_loss = max(row.request.num_tokens_at_loss, reached)
        self._scheduler.reset_cache()
        if failed:
            return self._culprits_among(lost)
        self._restart(str(error))
        return self._culprits_among(
            [each for each in lost if each.num_lost_steps >= DEATHS_TO_SUSPECT and not each.is_finished]
        )

    def _survives(self, further: Sequence[Schedule]) -> bool:
        for schedule in further:
            if self._executor.needs_allowed_tokens:
                self._executor.set_allowed_tokens(all_tokens_allowed(schedule.num_samples))
            try:
                self._executor.collect()
            except StepFailedError:
                pass
            except WorkerError as error:
                logger.error("WorkAgent %d lost the results of the submitted steps: %s", self._index, error)
                return False
        return True

    def _restart(self, reason: str) -> None:
        self.restarting = reason
        while True:
            try:
                self._executor.restart(reason)
                break
            except RestartFailedError as error:
                self.restarting = reason = str(error)
                logger.error("WorkAgent %d was not restarted: %s", self._index, reason)
                self._on_restart_attempt(reason)
        self.restarting = None
        self._metrics.add(worker_restarts=1)
        self._on_restart_attempt(reason)

    def _culprits_among(self, suspects: Sequence[Request]) -> list[Request]:
        """Return the suspects that make a repeated step fail. If none does, return those with too many lost steps."""
        if not suspects:
            return []
        guilty = find_culprits(suspects, self._passes)
        if not guilty:
            return [each for each in suspects if each.num_lost_steps >= MAX_LOST_STEPS]
        for each in suspects:  # the culprits, which now end, caused these losses
            each.num_lost_steps = 0
        return guilty

    def _passes(self, group: Sequence[Request]) -> bool:
        scheduler, executor = self._scheduler, self._executor
        pool, size, states = scheduler.blocks.pool, scheduler.blocks.block_size, scheduler.blocks.states
        if states is not None:
            states = StateSlots(states.pool.num_blocks, states.max_running, size)
        groups, slots = scheduler.blocks.groups, scheduler.blocks.adapters
        adapters = None if slots is None else AdapterSlots(slots.num_slots)
        blocks = BlockManager(pool.num_blocks, size, groups=groups, states=states, adapters=adapters)
        limits = replace(
            scheduler.limits,
            max_overtakes=0,
            static_batching=False,
            batch_waiting_time=0.0,
            max_running_per_tenant=None,
            max_running_of_tenant={},
        )
        classes = (RequestClass(name="trial", rank=0),)
        rules = SchedulingRules(limits, Mixed(ServingConfig()), classes, ArrivalOrder(), prefix_caching=False)
        trial = Scheduler(rules, blocks)
        builder = StepBuilder(blocks, self._pooling)
        for request in group:
            trial.add(_copy(request))
        try:
            while (schedule := trial.schedule(0.0)) is not None:
                self._on_trial_step()
                executor.submit(builder.build(schedule, executor.next_step))
                if executor.needs_allowed_tokens:
                    executor.set_allowed_tokens(builder.allowed(schedule))
                trial.update(schedule, executor.collect().token_ids.tolist())
        except StepFailedError:
            return False
        except WorkerError as error:
            logger.error(
                "WorkAgent %d exited in a test of %d requests, one of which may have ended it before: %s",
                self._index,
                len(group),
                error,
            )
            self._restart(str(error))
            return False
        return True


def _copy(request: Request) -> Request:
    max_tokens = min(len(request.output_token_ids) + 2, request.sampling.max_tokens)
    min_tokens = min(request.sampling.min_tokens, max_tokens)
    sampling = replace(request.sampling, max_tokens=max_tokens, min_tokens=min_tokens)
    return Request.derived(request, sampling=sampling, output_token_ids=list(request.output_token_ids))
