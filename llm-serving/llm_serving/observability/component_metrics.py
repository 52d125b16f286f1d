"""Metrics of request classes and of HTTP requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.core import HistogramMetricFamily, Metric

from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.observability.metric_families import (
    LATENCY_BUCKETS,
    LENGTH_BUCKETS,
    Histogram,
    Labels,
    counter_by,
    counters,
    gauges,
)

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
