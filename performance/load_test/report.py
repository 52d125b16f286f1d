"""Output of a load test: progress bar, table of metrics, and the files of the older load test in their formats."""

from __future__ import annotations

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from load_test.metrics import Distribution, ExactMatch, RequestRecord, ServiceLevel, Summary


class ProgressBar:
    """A progress line, redrawn at most ten times a second; hidden if the stream is no terminal."""

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
    """Return the metrics of a run, one on a line."""
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


def without_nan(value: Any) -> Any:
    """Return a value with None in place of NaN, which JSON cannot represent. Tuples become lists."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """Return the most frequent reasons of failure, each with its count."""
    reasons = Counter(r.error for r in records if r.error is not None)
    return [f"{count} x {reason}" for reason, count in reasons.most_common(5)]


def _server_cpu(summary: Summary, server_cpu_s: float | None) -> str:
    """Return the CPU time of the master process for each token; the WorkAgents' computation is not included."""
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


def legacy_fields(record: RequestRecord) -> dict[str, str | float]:
    """Return a request's fields of the legacy log, times in seconds; a failed request has its error as its text."""
    return {
        "input": record.prompt,
        "resp_text": record.text if record.ok else f"error: {record.error}",
        "res_time": record.latency_s,
        "first_token_time": record.ttft_s,
    }


class LegacyLog:
    """`testLog/test_performance_<YYYY-mm-dd-HH_MM>.log` under `folder`; runs of the same minute share a file.

    Each record begins as in the older load test: time, logger and level.
    """

    def __init__(self, folder: Path, num_requests: int) -> None:
        self._num_requests = num_requests
        self._num_done = 0
        self.path = folder / "testLog" / f"test_performance_{time.strftime('%Y-%m-%d-%H_%M')}.log"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered, so that a run can be followed.
        self._file: TextIO = self.path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: RequestRecord) -> None:
        self._num_done += 1
        self._write(f"{legacy_fields(record)}\nTest Progress --> {self._num_done}/{self._num_requests}")

    def close(self, exec_time_s: float) -> None:
        self._write(f"All Tasks Done; Exec Time is {exec_time_s}")
        self._file.close()

    def _write(self, record: str) -> None:
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        self._file.write(f"{clock},{int(now % 1 * 1000):03} - test_llama.log - INFO - {record}\n")


def write_result(folder: Path, name: str, records: list[RequestRecord]) -> Path:
    """Write `result_<name>.json`: one object for each request, with the fields of the log."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"result_{name}.json"
    path.write_text(json.dumps([legacy_fields(r) for r in records], ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def describe() -> dict[str, str]:
    return {"platform": platform.platform(), "processor": _processor(), "python": platform.python_version()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()
