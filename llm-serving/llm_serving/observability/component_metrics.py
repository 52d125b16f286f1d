"""Metrics of parts of a server: request classes, HTTP, swapped blocks, migrated requests, disk cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.core import HistogramMetricFamily, Metric

from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.observability.metric_families import (
    LATENCY_BUCKETS,
    LENGTH_BUCKETS,
    Histogram,
    Labels,
    counter,
    counter_by,
    counters,
    gauge,
    gauges,
)
from llm_serving.scheduler.schedule import Preemption

REFUSALS: Final = (
    "max_waiting_queue",
    "max_waiting_tokens",
    "class_max_waiting",
    "key_max_waiting",
    "slo",
    "deadline",
    "never_fits",
)
TARGETS: Final = ("ttft", "tpot", "all")
"""Service level objectives of a class: time to first token, time per output token, or both (goodput)."""


class ClassLoad(NamedTuple):
    num_waiting: int
    num_running: int


class ClassMetrics:
    """Metrics of each request class, with the label `priority_class`. `classes` are in ascending order of rank."""

    def __init__(self, labels: Labels, classes: Sequence[RequestClass]) -> None:
        self.load: Callable[[str], ClassLoad] = lambda name: ClassLoad(0, 0)
        self.predicted_s: Callable[[str], float | None] = lambda name: None
        self._labels = labels
        self._lock = Lock()
        self._refusals = Counter(dict.fromkeys(((each.name, reason) for each in classes for reason in REFUSALS), 0))
        self._preemptions = Counter(dict.fromkeys((each.name for each in classes), 0))
        self._ttft = {each.name: Histogram(LATENCY_BUCKETS) for each in classes}
        self._slo: Counter[tuple[str, str, bool]] = Counter()
        self.reload(classes)

    def reload(self, classes: Sequence[RequestClass]) -> None:
        with self._lock:
            self._classes = tuple(classes)
            self._targets = {each.name: _targets_of(each) for each in classes}
            for name, targets in self._targets.items():
                for target in targets:
                    for met in (True, False):
                        self._slo.setdefault((name, target, met), 0)

    def refused(self, request_class: RequestClass, reason: str, n: int = 1) -> None:
        with self._lock:
            self._refusals[request_class.name, reason] += n

    def record_preempted(self, priority: int) -> None:
        with self._lock:
            self._preemptions[class_of(priority, self._classes).name] += 1

    def record_first_token(self, priority: int, seconds: float) -> None:
        with self._lock:
            self._ttft[class_of(priority, self._classes).name].observe(seconds)

    def record_finished(
        self, priority: int, reason: FinishReason, ttft_s: float | None, tpot_s: float | None, e2e_s: float
    ) -> None:
        """Count whether a finished request met the targets of its class.

        A failed request met no target. A request that was aborted or reached its deadline counts only for targets that
        it had already missed. `tpot_s` is the mean time between tokens in seconds, or None if the request has fewer
        than two tokens.
        """
        request_class = class_of(priority, self._classes)
        targets = self._targets[request_class.name]
        if not targets:
            return
        failed = reason in (FinishReason.ERROR, FinishReason.UNAVAILABLE)
        aborted = reason in (FinishReason.ABORT, FinishReason.TIMEOUT)
        outcomes: dict[str, bool | None] = {
            "ttft": _is_met(request_class.ttft_slo_s, e2e_s if ttft_s is None else ttft_s, failed and ttft_s is None),
            "tpot": _is_met(request_class.tpot_slo_s, tpot_s, failed),
        }
        if aborted and ttft_s is None and outcomes["ttft"]:
            outcomes["ttft"] = None  # the first token might have been in time
        if failed or False in outcomes.values():
            outcomes["all"] = False
        else:
            outcomes["all"] = None if aborted else True
        with self._lock:
            for target in targets:
                if (met := outcomes[target]) is not None:
                    self._slo[request_class.name, target, met] += 1

    def targets_met(self) -> dict[str, dict[str, tuple[int, int]]]:
        with self._lock:
            counts = dict(self._slo)
        found: dict[str, dict[str, tuple[int, int]]] = {each.name: {} for each in self._classes}
        for name, target, _ in counts:
            found[name][target] = counts[name, target, True], counts[name, target, False]
        return found

    def collect(self) -> Iterator[Metric]:
        labels, names = self._labels, ("priority_class",)
        loads = {(each.name,): self.load(each.name) for each in self._classes}
        text = "Admitted requests that were never scheduled."
        waiting = {at: each.num_waiting for at, each in loads.items()}
        yield gauges("llm_serving:num_requests_waiting", text, labels, names, waiting)
        text = "Requests that were scheduled and have not finished."
        running = {at: each.num_running for at, each in loads.items()}
        yield gauges("llm_serving:num_requests_running", text, labels, names, running)
        text = "Preemptions of running requests."
        preemptions = {at: self._preemptions[at[0]] for at in loads}
        yield counters("llm_serving:preemptions_total", text, labels, names, preemptions)
        text = "Time from arrival to the first token."
        ttft = HistogramMetricFamily("llm_serving:time_to_first_token_seconds", text, labels=[*labels, *names])
        for (name,) in loads:
            ttft.add_metric([*labels.values(), name], *self._ttft[name].buckets())
        yield ttft
        text = "Requests refused by admission control, by reason."
        yield counters("llm_serving:requests_refused_total", text, labels, (*names, "reason"), self._refusals)
        text = "Requests that met or missed an SLO of their class; target `all` with met `true` is goodput."
        slo = {(name, target, str(met).lower()): count for (name, target, met), count in self._slo.items()}
        yield counters("llm_serving:slo_requests_total", text, labels, (*names, "target", "met"), slo)
        text = "Predicted time to first token of a short request that arrives now; use it for autoscaling."
        predicted = {at: seconds for at in loads if (seconds := self.predicted_s(*at)) is not None}
        yield gauges("llm_serving:predicted_time_to_first_token_seconds", text, labels, names, predicted)


def _targets_of(request_class: RequestClass) -> list[str]:
    configured = {"ttft": request_class.ttft_slo_s is not None, "tpot": request_class.tpot_slo_s is not None}
    configured["all"] = any(configured.values())
    return [target for target in TARGETS if configured[target]]


def _is_met(target_s: float | None, seconds: float | None, failed: bool) -> bool | None:
    if target_s is None:
        return None
    if failed:
        return False
    return None if seconds is None else seconds <= target_s


class HttpMetrics:
    """Metrics of HTTP requests by route and status. Only the event loop may record."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._longest = Histogram(LENGTH_BUCKETS)

    def answered(self, method: str, route: str, status: int, longest: Sequence[int] = ()) -> None:
        """Count an HTTP request that was answered. `route` is the path template, because paths could create any number
        of time series. `longest`: for each prompt, the number of tokens of its longest answer.
        """
        self._counts[method, route, status] += 1
        for num_tokens in longest:
            self._longest.observe(num_tokens)

    def refused(self, reason: str) -> None:
        """Count an HTTP request that was refused before routing. `reason`: one of a few fixed reasons."""
        self._refusals[reason] += 1

    def collect(self) -> Iterator[Metric]:
        text = "HTTP requests that were answered, or whose client disconnected before (status 499)."
        names = ("method", "route", "status")
        counts = {(method, route, str(status)): n for (method, route, status), n in self._counts.copy().items()}
        yield counters("llm_serving:http_requests_total", text, self._labels, names, counts)
        text = "HTTP requests refused before any route got them, such as for an unknown API key or a foreign web page."
        yield counter_by("llm_serving:http_refusals_total", text, self._labels, "reason", self._refusals.copy())
        text = "Tokens of the longest answer to a prompt."
        yield self._longest.family("vllm:request_max_num_generation_tokens", text, self._labels)


class SwapLoad(NamedTuple):
    num_requests: int
    num_used_blocks: int
    num_blocks: int


class SwapMetrics:
    """Metrics of requests and blocks that were swapped to host memory, summed over replicas."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self._loads: dict[int, Callable[[], SwapLoad]] = {}
        self._num_requests_out = self._num_blocks_out = self._num_blocks_in = 0

    def watch(self, replica: int, load: Callable[[], SwapLoad]) -> None:
        self._loads[replica] = load

    def record(self, moves: Sequence[BlockMove], preemptions: Sequence[Preemption]) -> None:
        with self._lock:
            self._num_requests_out += sum(preemption.swapped for preemption in preemptions)
            self._num_blocks_out += sum(move.kind == BlockMoveKind.SWAP_OUT for move in moves)
            self._num_blocks_in += sum(move.kind == BlockMoveKind.SWAP_IN for move in moves)

    def collect(self) -> Iterator[Metric]:
        labels, loads = self._labels, [load() for load in list(self._loads.values())]
        for name, text, value in (
            ("vllm:num_requests_swapped", "Preempted requests that wait in host memory.", "num_requests"),
            ("llm_serving:swap_blocks_used", "Blocks of the host pools in use.", "num_used_blocks"),
            ("llm_serving:swap_blocks", "Blocks of the host pools.", "num_blocks"),
        ):
            yield gauge(name, text, labels, sum(getattr(load, value) for load in loads))
        text = "Preempted requests whose blocks were swapped out."
        yield counter("llm_serving:swapped_out_requests_total", text, labels, self._num_requests_out)
        text = "Blocks swapped out to host memory."
        yield counter("llm_serving:swapped_out_blocks_total", text, labels, self._num_blocks_out)
        text = "Blocks swapped in from host memory."
        yield counter("llm_serving:swapped_in_blocks_total", text, labels, self._num_blocks_in)


class MoveMetrics:
    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self.block_bytes = 0
        self._num_requests = self._num_blocks = 0
        self._seconds = 0.0

    def arrived(self, seconds: Sequence[float], moves: Sequence[BlockMove]) -> None:
        """Count requests that migrated here, and their KV blocks, which the copies in `moves` import. `seconds`: for
        each request, the time from its last step on the old replica to its first step here.
        """
        with self._lock:
            self._num_requests += len(seconds)
            self._seconds += sum(seconds)
            self._num_blocks += sum(move.kind == BlockMoveKind.IMPORT for move in moves)

    def collect(self) -> Iterator[Metric]:
        labels = self._labels
        text = "Requests that migrated from the replica that computed their prompt to another replica."
        yield counter("llm_serving:moved_requests_total", text, labels, self._num_requests)
        text = "KV blocks of migrated requests."
        yield counter("llm_serving:moved_blocks_total", text, labels, self._num_blocks)
        text = "Bytes of the KV blocks of migrated requests."
        yield counter("llm_serving:moved_bytes_total", text, labels, self._num_blocks * self.block_bytes)
        text = "Sum of the seconds from a migrated request's last step on one replica to its first step on the next."
        yield counter("llm_serving:move_seconds_total", text, labels, self._seconds)


class DiskMetrics:
    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self.block_bytes = 0
        self._num_looked_up = self._num_read = self._num_damaged = self._num_written = self._num_evicted = 0
        self._num_bytes = -1

    def record_read(self, num_looked_up: int, num_read: int, num_damaged: int, num_bytes: int) -> None:
        """Count a disk lookup of prompt blocks. `num_bytes`: size of all files, or -1 if the folder cannot be used."""
        with self._lock:
            self._num_looked_up += num_looked_up
            self._num_read += num_read
            self._num_damaged += num_damaged
            self._num_bytes = num_bytes

    def record_stored(self, num_written: int, num_evicted: int, num_bytes: int) -> None:
        with self._lock:
            self._num_written += num_written
            self._num_evicted += num_evicted
            self._num_bytes = num_bytes

    def collect(self) -> Iterator[Metric]:
        labels, size = self._labels, self.block_bytes
        for name, text, value in (
            ("queried_blocks", "Prompt blocks looked up because they were not in memory", self._num_looked_up),
            ("hit_blocks", "Prompt blocks that were read", self._num_read),
            ("read_bytes", "Bytes of the blocks that were read", self._num_read * size),
            ("written_blocks", "Blocks that were written", self._num_written),
            ("written_bytes", "Bytes of the blocks that were written", self._num_written * size),
            ("evicted_blocks", "Least recently used blocks that were deleted", self._num_evicted),
            ("damaged_blocks", "Files that were deleted because their checksum did not match", self._num_damaged),
        ):
            yield counter(f"llm_serving:disk_cache_{name}_total", f"Disk cache: {text}.", labels, value)
        text = "Disk cache: size of all files, or -1 if the folder cannot be used."
        yield gauge("llm_serving:disk_cache_bytes", text, labels, self._num_bytes)
