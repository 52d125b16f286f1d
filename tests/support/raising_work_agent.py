"""The shipping WorkAgent, whose step raises after computing if it contains a certain token."""

from __future__ import annotations

import sys
from typing import Any

from llm_serving import work_agent
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.token_graph import StartedStep

POISON = 900
"""A token id."""

start = ModelRunner.start


def start_and_raise(runner: ModelRunner, step: StepInput, *await_allowed: Any) -> StepOutput | StartedStep:
    output = start(runner, step, *await_allowed)
    if POISON in step.token_ids:
        raise FloatingPointError("poison")
    return output


if __name__ == "__main__":
    ModelRunner.start = start_and_raise  # type: ignore[method-assign]
    sys.exit(work_agent.main())
