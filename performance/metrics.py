"""Serving metrics as pure functions of request records."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from records import RequestRecord


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of the same values, in their unit; NaN for no values."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        return cls(mean, percentile(ordered, 50), percentile(ordered, 99))


@dataclass(frozen=True)
class ServiceLevel:
    """Targets of one request, in milliseconds; None where there is no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """A failed request meets no target; an answer of fewer than two tokens has no TPOT to miss."""
        if not record.ok:
            return False
        if self.ttft_ms is not None and record.ttft_s * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.tpot_s is None or record.tpot_s * 1e3 <= self.tpot_ms


@dataclass(frozen=True)
class ExactMatch:
    """Answers equal to the expected one, of the requests that have one."""

    num_exact: int
    num_expected: int

    @property
    def rate(self) -> float:
        return self.num_exact / self.num_expected if self.num_expected else math.nan


@dataclass(frozen=True)
class Summary:
    """A run in figures. Latency distributions are over answered requests, in milliseconds; ITL is over all gaps."""

    num_requests: int
    num_failed: int
    num_retries: int
    span_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    latency_ms: Distribution
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    exact_match: ExactMatch
    exact_match_by_task: dict[str, ExactMatch]
    max_lateness_ms: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """The `q`-th percentile (0 to 100) of ascending values, NaN for none.

    Linear interpolation between closest ranks: the value at rank (n - 1) * q / 100, counted from 0; Hyndman and Fan's
    definition 7 (The American Statistician 50, 1996), which is also NumPy's default.
    """
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def span_s(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first request due to the last response complete."""
    return max(r.end_s for r in records) - min(r.due_s for r in records) if records else 0.0


def exact_match(records: Iterable[RequestRecord]) -> ExactMatch:
    """Counts a failed request that has an expected answer as wrong."""
    verdicts = [r.exact for r in records if r.exact is not None]
    return ExactMatch(sum(verdicts), len(verdicts))


def exact_match_by_task(records: Iterable[RequestRecord]) -> dict[str, ExactMatch]:
    by_task: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.expected is not None:
            by_task[record.task].append(record)
    return {task: exact_match(by_task[task]) for task in sorted(by_task)}


def summarize(records: Sequence[RequestRecord], service_level: ServiceLevel) -> Summary:
    answered = [r for r in records if r.ok]
    span = span_s(records)
    num_output_tokens = sum(r.num_output_tokens for r in answered)

    def per_s(count: int) -> float:
        return count / span if span > 0 else 0.0

    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(answered),
        num_retries=sum(r.num_retries for r in records),
        span_s=span,
        ttft_ms=Distribution.of(r.ttft_s * 1e3 for r in answered),
        tpot_ms=Distribution.of(r.tpot_s * 1e3 for r in answered if r.tpot_s is not None),
        itl_ms=Distribution.of(gap * 1e3 for r in answered for gap in r.itl_s),
        latency_ms=Distribution.of(r.latency_s * 1e3 for r in answered),
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=per_s(num_output_tokens),
        requests_per_s=per_s(len(answered)),
        goodput_per_s=per_s(sum(service_level.met_by(r) for r in answered)),
        exact_match=exact_match(records),
        exact_match_by_task=exact_match_by_task(records),
        max_lateness_ms=max((r.lateness_s * 1e3 for r in records), default=0.0),
    )
