from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.scheduler import Schedule
from llm_serving_simulator.profile import shape_of_rows
from llm_serving_simulator.virtual_work_agent import virtual_step
from support.factories import create_scheduler
from support.scheduler_loads import arrivals, create_load, scheduler_options


@settings(max_examples=40)
@given(arrivals=arrivals, options=scheduler_options())
def test_virtual_step_has_the_shape_and_samples_of_the_arrays(
    arrivals: list[tuple[Any, ...]], options: dict[str, Any]
) -> None:
    scheduler = create_scheduler(**options | {"max_steps_in_flight": 1})
    builder = StepBuilder(scheduler.blocks)
    for _, _, request in create_load(arrivals):
        scheduler.add(request)
    rng = random.Random(len(arrivals))
    for number in range(60):
        for request in scheduler.running:
            scheduler.set_draft_tokens(request, rng.choices((7, 8), k=rng.randint(1, 6)))
        schedule: Schedule | None = scheduler.schedule(0.0)
        if schedule is None:
            break
        step, virtual = builder.build(schedule, number), virtual_step(schedule, number)
        shape = shape_of_rows(step.query_lens, step.num_computed, step.sampling.num_samples, len(step.block_moves))
        assert virtual.shape == shape
        seeds, positions = step.sampling.seed.tolist(), step.sampling.position.tolist()
        assert virtual.samples == list(zip(seeds, positions, strict=True))
        scheduler.update(schedule, [7] * schedule.num_samples)
