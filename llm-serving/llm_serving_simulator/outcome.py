"""What a simulation produces: the outcome of each request, and the counts of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock
from llm_serving.observability.metrics import Metrics

from llm_serving_simulator.profile import Profile


@dataclass(slots=True)
class Outcome:
    """The outcome of one request as its client sees it; times in seconds since the start of the workload."""

    stream: str
    request_class: RequestClass
    tenant: str
    num_prompt_tokens: int
    num_expected_tokens: int
    """Output tokens of the complete answer."""
    due_s: float
    """First arrival; a retry does not change it."""
    end_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    finish: str = ""
    """Finish reason, or `refused`; empty while the request is open."""
    error: str = ""
    num_retries: int = 0
    num_cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def met_slo(self) -> bool:
        """Whether the request was answered within the TTFT and TPOT objectives of its class."""
        ttft, tpot, slo = self.ttft_s, self.tpot_s, self.request_class
        if not self.ok or ttft is None:
            return False
        if slo.ttft_slo_s is not None and ttft > slo.ttft_slo_s:
            return False
        return slo.tpot_slo_s is None or tpot is None or tpot <= slo.tpot_slo_s


@dataclass
class SimulationResult:
    """The outcomes and counts of one simulation."""

    name: str
    load: str
    """Name of the workload."""
    profile: Profile
    outcomes: list[Outcome]
    num_steps: int = 0
    num_tokens: int = 0
    """Tokens computed by all steps, prompts included."""
    num_extrapolated_steps: int = 0
    """Steps larger than any step that the profile was measured with."""
    busy_share: float = 0.0
    """Share of the time in which WorkAgents computed."""
    master_share: float = 0.0
    """CPU time of the master's threads per second; above 1 if several threads work at once."""
    preemptions: int = 0
    bound_violations: int = 0
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_tokens: int = 0
    """Draft tokens accepted."""
    block_use: list[tuple[float, float]] = field(default_factory=list)
    """(time, share of a replica's blocks in use) after each step."""
    num_blocks: int = 0
    notices: tuple[str, ...] = ()
    complete: bool = True
    """False if the simulation was stopped early."""
    num_unservable: int = 0
    """Requests that the configuration can never serve, even when it is idle."""
    unservable: str = ""
    """Why the first of them cannot be served."""


class StepCounters(Metrics):
    """Metrics that count what a result needs, in place of histograms."""

    def __init__(self, config: ServingConfig, clock: Clock) -> None:
        super().__init__(config.model.model_name, config.request_classes)
        self.num_tokens = self.num_preempted = self.num_violations = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.block_use: list[tuple[float, float]] = []
        self._clock = clock

    def record_step(
        self, num_running: int, num_waiting: int, kv_usage: float, num_tokens: int, *, replica: int = 0
    ) -> None:
        self.num_tokens += num_tokens
        self.block_use.append((self._clock(), kv_usage))

    def record_first_token(self, seconds: float, priority: int = 0) -> None:
        """Do nothing: `Outcome` has the time."""

    def record_inter_tokens(self, seconds: Sequence[float]) -> None:
        """Do nothing: `Outcome` has the times."""

    def record_verified_drafts(self, verified: Iterable[tuple[str, int, int]]) -> None:
        for _, num_draft_tokens, num_accepted in verified:
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted

    def record_preempted(self, priorities: Sequence[int]) -> None:
        self.num_preempted += len(priorities)

    def record_bound_violations(self, count: int) -> None:
        """Raise AssertionError: the scheduler broke a guaranteed maximum wait."""
        self.num_violations += count
        raise AssertionError(f"a bound on waiting is broken at {self._clock():.6g} s")
