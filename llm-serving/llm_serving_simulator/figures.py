"""What a simulation produces: the outcome of each request, the counts of its steps, and their figures.

Figures are named numbers of all requests, of each class and of each tenant, and the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock
from llm_serving.observability.metrics import Metrics

from llm_serving_simulator.profile import Profile
from llm_serving_simulator.workload import Workload


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

    def record_load(
        self,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_step_tokens: int | None = None,
        *,
        replica: int = 0,
    ) -> None:
        if num_step_tokens is not None:
            self.num_tokens += num_step_tokens
            self.block_use.append((self._clock(), kv_usage))

    def record_first_token(self, seconds: float, priority: int = 0) -> None: ...

    def record_inter_tokens(self, seconds: Sequence[float]) -> None: ...

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


LATENCIES: Final = ("ttft", "tpot", "itl", "latency")
QUANTILES: Final = ("p50", "p99")
GROUP_FIGURES: Final = (
    "requests",
    "answered",
    "refused",
    "failed",
    "retries",
    "requests_per_s",
    "output_tokens_per_s",
    "goodput_per_s",
    "goodput_share",
    *(f"{latency}_{quantile}_ms" for latency in LATENCIES for quantile in QUANTILES),
)
"""Figures of all requests, of a class (`interactive.ttft_p99_ms`), or of a tenant (`tenant alice.goodput_share`)."""
SERVER_FIGURES: Final = (
    "duration_s",
    "fairness",
    "preemptions",
    "bound_violations",
    "block_use_mean",
    "block_use_peak",
    "busy_share",
    "steps",
    "extrapolated_steps",
    "tokens_per_step",
    "draft_tokens",
    "accepted_draft_tokens",
)
RENAMED: Final = {
    "steps_beyond": "extrapolated_steps",
    "guesses": "draft_tokens",
    "guesses_right": "accepted_draft_tokens",
}
"""Old names of figures, which JSON output and constraints keep for one release."""
SHARES: Final = ("goodput_share", "block_use_mean", "block_use_peak", "busy_share", "fairness")
"""Figures from 0 to 1."""
LESS_IS_BETTER: Final = frozenset(
    name
    for name in (*GROUP_FIGURES, *SERVER_FIGURES)
    if name.endswith("_ms")
    or name
    in ("refused", "failed", "retries", "duration_s", "preemptions", "bound_violations", "steps", "extrapolated_steps")
    or name.startswith("block_use")
)

Figures = dict[str, float]


def figures_of(result: SimulationResult) -> Figures:
    """Return all figures of a result; NaN where nothing was measured. Latencies are those of answered requests. Goodput
    counts the requests that met the objectives of their class. Fairness is Jain's index over the share of its tokens
    that each tenant got (Jain, Chiu and Hawe, DEC-TR-301, 1984): 1 where all tenants got the same share.
    """
    outcomes = result.outcomes
    end_s = max((each.end_s for each in outcomes), default=0.0)
    span = end_s - min((each.due_s for each in outcomes), default=0.0)
    figures = _group(outcomes, span)
    for name, members in _by(outcomes, lambda each: each.request_class.name).items():
        figures |= {f"{name}.{key}": value for key, value in _group(members, span).items()}
    tenants = _by(outcomes, lambda each: each.tenant)
    if len(tenants) > 1 or "" not in tenants:
        for name, members in tenants.items():
            figures |= {f"tenant {name}.{key}": value for key, value in _group(members, span).items()}
    use = [share for time, share in result.block_use if time <= end_s]
    values = (
        span,
        _fairness(tenants.values()),
        result.preemptions,
        result.bound_violations,
        sum(use) / len(use) if use else math.nan,
        max(use, default=math.nan),
        result.busy_share,
        result.num_steps,
        result.num_extrapolated_steps,
        result.num_tokens / max(1, result.num_steps),
        result.num_draft_tokens,
        result.num_accepted_tokens,
    )
    return figures | dict(zip(SERVER_FIGURES, values, strict=True))


def _by(outcomes: Iterable[Outcome], key: Callable[[Outcome], str]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(key(each), []).append(each)
    return dict(sorted(groups.items()))


def _group(outcomes: Sequence[Outcome], span: float) -> Figures:
    answered = [each for each in outcomes if each.ok]
    num_met = sum(each.met_slo for each in outcomes)
    refused = sum(each.finish == "refused" for each in outcomes)

    def per_s(count: float) -> float:
        return count / span if span > 0 else 0.0

    latencies: dict[str, list[float]] = {
        "ttft": [each.ttft_s for each in answered if each.ttft_s is not None],
        "tpot": [each.tpot_s for each in answered if each.tpot_s is not None],
        "itl": [
            after - before
            for each in answered
            for before, after in zip(each.token_times_s, each.token_times_s[1:], strict=False)
        ],
        "latency": [each.end_s - each.due_s for each in answered],
    }
    figures: Figures = {
        "requests": len(outcomes),
        "answered": len(answered),
        "refused": refused,
        "failed": len(outcomes) - len(answered) - refused,
        "retries": sum(each.num_retries for each in outcomes),
        "requests_per_s": per_s(len(answered)),
        "output_tokens_per_s": per_s(sum(len(each.token_times_s) for each in answered)),
        "goodput_per_s": per_s(num_met),
        "goodput_share": num_met / len(outcomes) if outcomes else math.nan,
    }
    for name, seconds in latencies.items():
        ordered = sorted(seconds)
        for quantile in QUANTILES:
            figures[f"{name}_{quantile}_ms"] = 1e3 * percentile(ordered, float(quantile[1:]))
    return figures


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the `q`-th percentile (0 to 100) of ascending values by linear interpolation; NaN for none."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _fairness(tenants: Iterable[Sequence[Outcome]]) -> float:
    shares = []
    for members in tenants:
        demand = sum(each.num_prompt_tokens + each.num_expected_tokens for each in members)
        got = sum(each.num_prompt_tokens + len(each.token_times_s) for each in members if each.ok)
        shares.append(got / demand if demand else 1.0)
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan


# --- capacity ---------------------------------------------------------------------------------------------------------

MIN_GOODPUT_SHARE: Final = 0.99
PRECISION: Final = 0.02
"""Relative precision of the highest rate."""
MAX_FACTOR: Final = 256.0
MIN_FACTOR: Final = 1 / 16


class Capacity(NamedTuple):
    """The highest arrival rate at which nearly all requests meet their objectives."""

    requests_per_s: float
    """Offered rate; 0 if the objectives are missed even at a sixteenth of the workload's rate."""
    factor: float
    """Factor of the workload's own rate."""
    result: SimulationResult
    """Result at that rate."""
    figures: Figures
    is_highest: bool
    """False if the search reached its end: a workload of more requests would give a higher rate."""


def highest_rate(
    workload: Workload,
    simulate: Callable[[Workload], SimulationResult],
    min_goodput_share: float = MIN_GOODPUT_SHARE,
) -> Capacity:
    """Search by bisection for the highest rate at which `min_goodput_share` of the requests meet their objectives,
    assuming that goodput falls with the rate. The same requests of an open loop arrive in less time.
    """
    offered = offered_rate(workload)

    def at(factor: float) -> tuple[SimulationResult, Figures, bool]:
        result = simulate(workload.faster(factor))
        figures = figures_of(result)
        return result, figures, figures["goodput_share"] >= min_goodput_share

    low, high = 0.0, math.inf
    best = at(1.0)
    if best[2]:
        low = 1.0
        while high == math.inf and low < MAX_FACTOR:
            tried = at(2 * low)
            low, high, best = (2 * low, high, tried) if tried[2] else (low, 2 * low, best)
    else:
        high = 1.0
        while low == 0.0 and high > MIN_FACTOR:
            tried = at(high / 2)
            low, high, best = (high / 2, high, tried) if tried[2] else (0.0, high / 2, tried)
    while low and high < math.inf and (high - low) > PRECISION * low:
        factor = (low * high) ** 0.5
        tried = at(factor)
        low, high, best = (factor, high, tried) if tried[2] else (low, factor, best)
    return Capacity(offered * low, low, best[0], best[1], high < math.inf)


def offered_rate(workload: Workload) -> float:
    """Return the mean arrival rate of open loops; NaN if there are none, or all requests arrive at once."""
    due = [each.due_s for stream in workload.streams if stream.concurrency is None for each in stream.requests]
    span_s = max(due) - min(due) if due else 0.0
    return (len(due) - 1) / span_s if span_s > 0 else math.nan
