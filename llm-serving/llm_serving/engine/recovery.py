"""Recovery after a failed step: find the request that makes it fail by bisection, and continue the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.step import all_tokens_allowed
from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.executor.executor import Executor, RestartFailedError, StepFailedError
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.kvcache import BlockManager
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler, SchedulerLimits
from llm_serving.scheduler.policies import Mixed

T = TypeVar("T")

logger = get_logger(__name__)
DEATHS_TO_SUSPECT: Final = 2
"""A WorkAgent may die of many things; a request that was computed both times it died is looked at."""
MAX_LOST_STEPS: Final = 4
"""A request whose steps are lost so often before it gets further ends, even if it is not shown to be the cause."""


def find_culprits(suspects: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """The suspects that fail alone, found by halving: about 2 log2(n) trials a culprit.

    Args:
        suspects: Of something that failed when they took part in it together.
        passes: Whether it goes well with these only.

    Returns:
        In the order of `suspects`. Empty if the failure does not come again, or only comes of a combination.
    """
    if passes(suspects):
        return []
    if len(suspects) == 1:
        return list(suspects)
    half = len(suspects) // 2
    return find_culprits(suspects[:half], passes) + find_culprits(suspects[half:], passes)


class Recovery:
    """Brings a replica back after steps were lost.

    Nothing is lost but time: the tokens of every request are here, and computing them again gives the same bytes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        metrics: Metrics,
        meanwhile: Callable[[str], None] = lambda reason: None,
        listen: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            scheduler: Of the replica.
            executor: As well.
            metrics: Of the server.
            meanwhile: Called with the reason after every attempt to start the WorkAgent again.
            listen: Called before every step of a trial, which may have many.
        """
        self.restarting: str | None = None
        """Why the WorkAgent is being started again, while it is."""
        self._scheduler = scheduler
        self._executor = executor
        self._metrics = metrics
        self._meanwhile = meanwhile
        self._listen = listen

    def culprits(self, error: LLMServingError, in_flight: Sequence[Schedule]) -> list[Request]:
        """Makes everything ready to go on, however long it takes, and finds the requests that must not.

        Args:
            error: What the oldest step in flight met, or a step that could not be submitted.
            in_flight: The steps that were not replied to; none of them will be.

        Raises:
            WorkerDiedError: There is no WorkAgent any more, and there shall be none.
        """
        logger.error("steps are lost: %s", error)
        failed = isinstance(error, StepFailedError) and self._survives(in_flight[1:])
        steps = in_flight[:1] if failed else in_flight
        lost = _requests_of(steps)
        for request in lost:
            request.num_lost_steps += 1
        for row in [row for schedule in steps for row in schedule.rows]:
            # Only what reaches the end of the lost step has passed it: what is at fault may stand anywhere in a prompt,
            # of which the next attempt may compute another part at first.
            reached = row.end - row.num_drafts - 1
            row.request.num_tokens_at_loss = max(row.request.num_tokens_at_loss, reached)
        self._scheduler.reset_cache()
        if failed:
            return self._guilty(lost)
        self._restart(str(error))
        return self._guilty(
            [each for each in lost if each.num_lost_steps >= DEATHS_TO_SUSPECT and not each.is_finished]
        )

    def _survives(self, further: Sequence[Schedule]) -> bool:
        """Throws the replies to the steps after a failed one away; False if the WorkAgent is gone meanwhile."""
        for schedule in further:
            if self._executor.needs_allowed_tokens:
                self._executor.set_allowed_tokens(all_tokens_allowed(schedule.num_samples))
            try:
                self._executor.collect()
            except StepFailedError:
                pass
            except WorkerError as error:
                logger.error("steps are lost: %s", error)
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
                logger.error("the WorkAgent cannot be started again: %s", reason)
                self._meanwhile(reason)
        self.restarting = None
        self._metrics.worker_restarted()
        self._meanwhile(reason)

    def _guilty(self, suspects: Sequence[Request]) -> list[Request]:
        """Those that make a step fail again, or else were lost too often; the cache must be lost already."""
        if not suspects:
            return []
        guilty = find_culprits(suspects, self._passes)
        if not guilty:
            return [each for each in suspects if each.num_lost_steps >= MAX_LOST_STEPS]
        for each in suspects:  # what the others lost is explained; each explanation ends a request, so this ends too
            each.num_lost_steps = 0
        return guilty

    def _passes(self, group: Sequence[Request]) -> bool:
        """Whether the WorkAgent can compute these requests up to their newest token and one further.

        Answers are exact, so a copy of a request meets whatever the request met. The trial has the whole cache to
        itself.
        """
        scheduler, executor = self._scheduler, self._executor
        pool = scheduler.blocks.pool
        blocks = BlockManager(
            pool.num_blocks, scheduler.blocks.block_size, prefix_caching=False, window=scheduler.blocks.window
        )
        trial = Scheduler(
            _trial_limits(scheduler.limits), Mixed(ServingConfig()), blocks, (RequestClass(name="trial", rank=0),)
        )
        builder = StepBuilder(blocks)
        for request in group:
            trial.add(_copy(request))
        try:
            while (schedule := trial.schedule(0.0)) is not None:
                self._listen()
                executor.submit(builder.build(schedule, executor.next_step))
                if executor.needs_allowed_tokens:
                    executor.set_allowed_tokens(builder.allowed(schedule))
                trial.update(schedule, executor.collect().token_ids.tolist())
        except StepFailedError:
            return False
        except WorkerError as error:
            logger.error("the WorkAgent did not survive a trial of %d requests: %s", len(group), error)
            self._restart(str(error))
            return False
        return True


def _requests_of(schedules: Sequence[Schedule]) -> list[Request]:
    """Each request of these steps that has not ended, once."""
    requests = {id(row.request): row.request for schedule in schedules for row in schedule.rows}
    return [request for request in requests.values() if not request.is_finished]


def _trial_limits(limits: SchedulerLimits) -> SchedulerLimits:
    unlimited: dict[str, Any] = {"max_running_per_tenant": None, "max_running_of_tenant": {}}
    return replace(limits, max_overtakes=0, static_batching=False, batch_waiting_time=0.0, **unlimited)


def _copy(request: Request) -> Request:
    max_tokens = min(len(request.output_token_ids) + 2, request.sampling.max_tokens)
    min_tokens = min(request.sampling.min_tokens, max_tokens)
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling=replace(request.sampling, max_tokens=max_tokens, min_tokens=min_tokens),
        stop_token_ids=request.stop_token_ids,
        constraint=request.constraint,
        wants_vector=request.wants_vector,
    )
