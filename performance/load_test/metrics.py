"""Records of requests as the clients saw them, and the serving metrics that are computed from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Attempt:
    """One attempt of a request.

    Attributes:
        sent_s: Time of sending.
        retry_after_s: Seconds after which the client has to retry; None: the request was admitted.
        predicted_s: Predicted seconds from sending to the first token, including the wait before a retry.
        request_id: Id of the request at the server; empty if the server sends none.
    """

    sent_s: float
    retry_after_s: float | None
    predicted_s: float | None
    request_id: str = ""


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it. All times are seconds since the start of the run.

    Attributes:
        due_s: Time of arrival by the schedule; latencies count from here, so a late client or a retry is not hidden.
        sent_s: Time at which the client sent it.
        end_s: Time at which the response was complete or had failed.
        token_times_s: Arrival of each token event; an event may carry several tokens.
        num_output_tokens: Number that the server reported, or the number of token events.
        expected: The reference answer, or None.
        error: Reason of the failure; None for an answered request.
        attempts: All attempts of an answered request.
    """

    index: int
    prompt: str
    task: str
    expected: str | None
    due_s: float
    sent_s: float
    end_s: float
    token_times_s: tuple[float, ...] = ()
    num_output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    num_retries: int = 0
    error: str | None = None
    attempts: tuple[Attempt, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def lateness_s(self) -> float:
        """Delay of the load generator itself."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to first token; the whole latency of an answer without tokens."""
        return (self.token_times_s[0] if self.token_times_s else self.end_s) - self.due_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive token events."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def exact(self) -> bool | None:
        """Whether the answer equals the expected one, surrounding white space aside; None: no answer is expected."""
        if self.expected is None:
            return None
        return self.ok and self.text.strip() == self.expected.strip()


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of values, in their unit; NaN for no values."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        return cls(mean, percentile(ordered, 50), percentile(ordered, 99))


@dataclass(frozen=True)
class ServiceLevel:
    """Targets of one request, in milliseconds; None: no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether a request met its targets: a failed one meets none; below two tokens there is no TPOT."""
        if not record.ok:
            return False
        if self.ttft_ms is not None and record.ttft_s * 1e3 > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.tpot_s is None or record.tpot_s * 1e3 <= self.tpot_ms


@dataclass(frozen=True)
class ExactMatch:
    """Number of answers that equal the expected one, and of requests that have one."""

    num_exact: int
    num_expected: int

    @property
    def rate(self) -> float:
        return self.num_exact / self.num_expected if self.num_expected else math.nan


@dataclass(frozen=True)
class Summary:
    """Metrics of a run. Latency distributions are over answered requests, in milliseconds; ITL is over all gaps."""

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
    """Return the `q`-th percentile (0 to 100) of ascending values, NaN for no values.

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
    """Return the seconds from the first arrival to the end of the last response."""
    return max(r.end_s for r in records) - min(r.due_s for r in records) if records else 0.0


def exact_match(records: Iterable[RequestRecord]) -> ExactMatch:
    """Count exact answers; a failed request with an expected answer counts as wrong."""
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
