"""What a simulation counts of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llm_serving.config.schema import ServingConfig
from llm_serving.core.timings import Clock
from llm_serving.observability.metrics import Metrics


class Tally(Metrics):
    """Metrics that keep what a result tells of steps, in place of histograms."""

    def __init__(self, config: ServingConfig, clock: Clock) -> None:
        super().__init__(config.model.model_name, config.request_classes)
        self.num_tokens = self.num_preempted = self.num_violations = 0
        self.num_draft_tokens = self.num_accepted = 0
        self.block_use: list[tuple[float, float]] = []
        """(time, share of a replica's blocks in use) after each step."""
        self._clock = clock

    def step(self, num_running: int, num_waiting: int, kv_usage: float, num_tokens: int, *, replica: int = 0) -> None:
        self.num_tokens += num_tokens
        self.block_use.append((self._clock(), kv_usage))

    def first_token(self, seconds: float) -> None:
        """Outcomes have it."""

    def inter_tokens(self, seconds: Sequence[float]) -> None:
        """Outcomes have them."""

    def record_verified_drafts(self, verified: Iterable[tuple[str, int, int]]) -> None:
        for _, num_draft_tokens, num_accepted in verified:
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted += num_accepted

    def preempted(self, n: int = 1) -> None:
        self.num_preempted += n

    def bound_violated(self, n: int = 1) -> None:
        """Raises AssertionError: what the scheduler promises is not kept."""
        self.num_violations += n
        raise AssertionError(f"a bound on waiting is broken at {self._clock():.6g} s")
