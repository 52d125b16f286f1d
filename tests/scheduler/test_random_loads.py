"""Random loads under every configuration: every request finishes within every limit and bound."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from support.factories import create_scheduler
from support.scheduler_loads import arrivals, arrive, create_load, scheduler_options
from support.scheduler_run import SchedulerRun


@settings(max_examples=150)
@given(arrivals=arrivals, options=scheduler_options())
def test_every_request_finishes_with_its_tokens_under_random_loads(
    arrivals: list[tuple[Any, ...]], options: dict[str, Any]
) -> None:
    run = SchedulerRun(create_scheduler(**options))
    load = create_load(arrivals)
    for step in range(26):
        arrive(run, load, step)
        run.step()
    run.finish()
