"""What a run prints: a progress bar while it lasts, a table at the end."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from metrics import Distribution, ExactMatch, ServiceLevel, Summary
from records import RequestRecord


class ProgressBar:
    """One line redrawn at most ten times a second; silent where the stream is no terminal."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._visible = stream.isatty()
        self._start = time.monotonic()
        self._drawn = -math.inf
        self._done = self._failed = 0

    def add(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += not record.ok
        now = time.monotonic()
        if self._visible and (now - self._drawn > 0.1 or self._done == self._total):
            self._drawn = now
            bar = "#" * (30 * self._done // self._total)
            failed = f", {self._failed} failed" if self._failed else ""
            self._stream.write(f"\r[{bar:30}] {self._done}/{self._total} in {now - self._start:.0f} s{failed} ")
            self._stream.flush()

    def close(self) -> None:
        if self._visible:
            self._stream.write("\n")


def table(
    summary: Summary, service_level: ServiceLevel, client_cpu_share: float, server_cpu_s: float | None = None
) -> str:
    """The figures of a run, one a line."""
    counts = [
        ("requests", f"{summary.num_requests}"),
        ("failed", f"{summary.num_failed}"),
        ("retries", f"{summary.num_retries}"),
        ("duration", f"{summary.span_s:.2f} s"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("output tokens", f"{summary.num_output_tokens}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("goodput", _goodput(summary, service_level)),
        ("exact match", _exact(summary.exact_match)),
        *((f"  {task}", _exact(match)) for task, match in summary.exact_match_by_task.items()),
        ("client CPU", f"{client_cpu_share:.1%} of one core"),
        ("server CPU", _server_cpu(summary, server_cpu_s)),
        ("client late by", f"at most {summary.max_lateness_ms:.1f} ms"),
    ]
    rows = [f"{'milliseconds':<24}{'mean':>10}{'p50':>10}{'p99':>10}"]
    rows += [
        _distribution("time to first token", summary.ttft_ms),
        _distribution("time per output token", summary.tpot_ms),
        _distribution("inter-token latency", summary.itl_ms),
        _distribution("latency", summary.latency_ms),
    ]
    return "\n".join([f"{name:<24}{value}" for name, value in counts] + ["-" * 54] + rows)


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """The most frequent reasons of failure, each with its count."""
    reasons = Counter(r.error for r in records if r.error is not None)
    return [f"{count} x {reason}" for reason, count in reasons.most_common(5)]


def _server_cpu(summary: Summary, server_cpu_s: float | None) -> str:
    """What the serving process took for each token, the computation in its WorkAgents aside."""
    if server_cpu_s is None or not summary.num_output_tokens:
        return "- (no process_cpu_seconds_total in /metrics)" if server_cpu_s is None else "- (no tokens)"
    return f"{1e6 * server_cpu_s / summary.num_output_tokens:.0f} us per output token"


def _distribution(name: str, values: Distribution) -> str:
    return f"{name:<24}" + "".join(f"{'-' if math.isnan(v) else f'{v:.2f}':>10}" for v in vars(values).values())


def _goodput(summary: Summary, level: ServiceLevel) -> str:
    targets = [
        f"{name} <= {value:g} ms"
        for name, value in (("TTFT", level.ttft_ms), ("TPOT", level.tpot_ms))
        if value is not None
    ]
    if not targets:
        return "- (no target: --slo-ttft-ms, --slo-tpot-ms)"
    return f"{summary.goodput_per_s:.2f} requests/s with {' and '.join(targets)}"


def _exact(match: ExactMatch) -> str:
    if not match.num_expected:
        return "- (no expected answers)"
    return f"{match.rate:.1%} ({match.num_exact} of {match.num_expected})"
