"""An engine over a fake model whose WorkAgent dies or fails when the test lets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.engine.recovery import Recovery
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.executor import LocalExecutor
from support.engine_harness import Harness
from support.fake_runner import FakeRunner, expected_output


class FragileExecutor(LocalExecutor):
    """Runs two steps at a time, and restarts a dead WorkAgent; calls `spoil` with every step it runs."""

    max_steps_in_flight = 2

    def __init__(self, new_runner: Callable[[], Any], max_restarts: int = 1000) -> None:
        super().__init__(new_runner())
        self._new_runner = new_runner
        self._max_restarts = max_restarts
        self.num_restarts = 0
        self.num_collected = 0
        self.spoil: Callable[[StepInput], None] = lambda step: None
        self.before_restart: Callable[[str], None] = lambda reason: None

    def collect(self) -> StepOutput:
        self.num_collected += 1
        step = self._submitted.popleft()
        try:
            self.spoil(step)
        finally:
            output = self._runner.execute(step)  # a step that fails may have written some of its keys
        return output

    def restart(self, reason: str) -> None:
        self.before_restart(reason)
        if self.num_restarts == self._max_restarts:
            raise WorkerDiedError(reason)
        self.num_restarts += 1
        self._runner = self._new_runner()
        self._submitted.clear()
        self.next_step = 0


class FragileHarness(Harness):
    def __init__(self, max_restarts: int = 1000, new_runner: Callable[[], Any] | None = None, **harness: Any) -> None:
        """`new_runner` returns the runner of each WorkAgent; None: the fake model."""
        super().__init__(**harness)
        blocks = self.scheduler.blocks
        sizes = blocks.pool.num_blocks, blocks.block_size, blocks.host_pool.num_blocks, blocks.groups
        slots = 0 if blocks.states is None else blocks.states.pool.num_blocks
        self.executor = FragileExecutor(new_runner or (lambda: FakeRunner(*sizes, num_state_slots=slots)), max_restarts)
        self.engine.executor = self.executor
        engine = self.engine
        engine._recovery = Recovery(
            self.scheduler, self.executor, self.metrics, engine._on_restart_attempt, engine._on_bisection_step
        )
        self.engine._max_steps_in_flight = 2

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def assert_exact(self, *requests: Request) -> None:
        for request in requests:
            expected = expected_output(request.prompt_token_ids, request.sampling.max_tokens, request.sampling.seed)
            assert self.token_ids(request.request_id) == expected
            assert self.last(request.request_id).finish_reason is FinishReason.LENGTH
        assert self.scheduler.blocks.pool.num_used_blocks == 0
        assert self.scheduler.blocks.host_pool.num_used_blocks == 0
