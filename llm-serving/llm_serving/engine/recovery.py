"""After a lost step: who made it fail, and how the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.engine.bisection import find_culprits
from llm_serving.engine.executor import Executor, StepFailedError
from llm_serving.engine.step_builder import StepBuilder
from llm_serving.errors import WorkerError
from llm_serving.kvcache import BlockManager
from llm_serving.log import get_logger
from llm_serving.scheduler import Scheduler, SchedulerLimits
from llm_serving.scheduler.policy import Mixed

logger = get_logger(__name__)

DEATHS_TO_SUSPECT: Final = 2
"""A WorkAgent may die of many things; a request that was computed both times it died is looked at."""
MAX_LOST_STEPS: Final = 4
"""A request whose steps are lost so often in a row ends, even if it cannot be shown to be the cause."""


def culprits_of_failure(suspects: Sequence[Request], scheduler: Scheduler, executor: Executor) -> list[Request]:
    """Requests of a step that failed which make it fail again, or failed too often; the cache must be lost already."""
    guilty = find_culprits(suspects, lambda group: _passes(group, scheduler, executor))
    return guilty + [each for each in suspects if each.num_lost_steps >= MAX_LOST_STEPS and each not in guilty]


def culprits_of_death(lost: Sequence[Request], scheduler: Scheduler, executor: Executor) -> list[Request]:
    """As `culprits_of_failure`, of requests whose step was lost with its WorkAgent; a new one is at work."""
    suspects = [each for each in lost if each.num_lost_steps >= DEATHS_TO_SUSPECT]
    return culprits_of_failure(suspects, scheduler, executor) if suspects else []


def _passes(group: Sequence[Request], scheduler: Scheduler, executor: Executor) -> bool:
    """Whether the WorkAgent can compute these requests up to their newest token and one further.

    Answers are exact, so a copy of a request meets whatever the request met. The trial has the whole cache to itself.
    """
    pool = scheduler.blocks.pool
    blocks = BlockManager(pool.num_blocks, scheduler.blocks.block_size, prefix_caching=False)
    trial = Scheduler(
        _trial_limits(scheduler.limits), Mixed(ServingConfig()), blocks, (RequestClass(name="trial", rank=0),)
    )
    builder = StepBuilder(blocks)
    for request in group:
        trial.add(_copy(request))
    try:
        while (schedule := trial.schedule(0.0)) is not None:
            executor.submit(builder.build(schedule, executor.next_step))
            trial.update(schedule, executor.collect().token_ids.tolist())
    except StepFailedError:
        return False
    except WorkerError as error:
        logger.error("the WorkAgent did not survive a trial of %d requests: %s", len(group), error)
        executor.restart(str(error))
        return False
    return True


def _trial_limits(limits: SchedulerLimits) -> SchedulerLimits:
    return replace(limits, max_overtakes=0, static_batching=False, batch_waiting_time=0.0)


def _copy(request: Request) -> Request:
    max_tokens = min(len(request.output_token_ids) + 2, request.sampling.max_tokens)
    min_tokens = min(request.sampling.min_tokens, max_tokens)
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling=replace(request.sampling, max_tokens=max_tokens, min_tokens=min_tokens),
        stop_token_ids=request.stop_token_ids,
    )
