"""Metrics of each request class: load, refusals, preemptions, time to first token, and service level objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.observability.metric_families import LATENCY_BUCKETS, Histogram, Labels

REFUSALS: Final = (
    "max_waiting_queue",
    "max_waiting_tokens",
    "class_max_waiting",
    "key_max_waiting",
    "slo",
    "deadline",
    "never_fits",
)
"""Reasons of refusals: limits of the admission queue, the predicted TTFT, the size of the request."""
TARGETS: Final = ("ttft", "tpot", "all")
"""Service level objectives of a class: time to first token, time per output token, or both (goodput)."""


class ClassLoad(NamedTuple):
    num_waiting: int
    num_running: int


class ClassMetrics:
    """Metrics of each request class, with `labels` and the label `priority_class`. `classes`: by ascending rank."""

    def __init__(self, labels: Labels, classes: Sequence[RequestClass]) -> None:
        self.load: Callable[[str], ClassLoad] = lambda name: ClassLoad(0, 0)
        """Returns the load of a class. Each scrape calls it for each class."""
        self.predicted_s: Callable[[str], float | None] = lambda name: None
        """Returns the predicted TTFT in seconds of a short request of the class that arrives now; None: unknown."""
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
        it had already missed.

        Args:
            ttft_s: Seconds from arrival to the first token; None: no token.
            tpot_s: Mean seconds between tokens; None: fewer than two tokens.
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
        """Return class -> configured target -> (number of requests that met it, number that missed it)."""
        with self._lock:
            counts = dict(self._slo)
        found: dict[str, dict[str, tuple[int, int]]] = {each.name: {} for each in self._classes}
        for name, target, _ in counts:
            found[name][target] = counts[name, target, True], counts[name, target, False]
        return found

    def collect(self) -> Iterator[Metric]:
        names, values = [*self._labels, "priority_class"], list(self._labels.values())
        loads = {each.name: self.load(each.name) for each in self._classes}
        waiting = GaugeMetricFamily(
            "llm_serving:num_requests_waiting", "Admitted requests that were never scheduled.", labels=names
        )
        running = GaugeMetricFamily(
            "llm_serving:num_requests_running", "Requests that were scheduled and have not finished.", labels=names
        )
        preemptions = CounterMetricFamily(
            "llm_serving:preemptions_total", "Times a running request lost its blocks.", labels=names
        )
        first_tokens = HistogramMetricFamily(
            "llm_serving:time_to_first_token_seconds", "From arrival to the first token.", labels=names
        )
        predicted = GaugeMetricFamily(
            "llm_serving:predicted_time_to_first_token_seconds",
            "Predicted for a short request of the class that arrives now; use it for autoscaling.",
            labels=names,
        )
        for name, load in loads.items():
            if (seconds := self.predicted_s(name)) is not None:
                predicted.add_metric([*values, name], seconds)
            waiting.add_metric([*values, name], load.num_waiting)
            running.add_metric([*values, name], load.num_running)
            preemptions.add_metric([*values, name], self._preemptions[name])
            first_tokens.add_metric([*values, name], *self._ttft[name].buckets())
        refusals = CounterMetricFamily(
            "llm_serving:requests_refused_total",
            "Requests refused by admission control, by reason.",
            labels=[*names, "reason"],
        )
        for (name, reason), count in self._refusals.items():
            refusals.add_metric([*values, name, reason], count)
        slo = CounterMetricFamily(
            "llm_serving:slo_requests_total",
            "Requests that met a target of their class, or missed it; `all` met is goodput.",
            labels=[*names, "target", "met"],
        )
        for (name, target, met), count in self._slo.items():
            slo.add_metric([*values, name, target, str(met).lower()], count)
        yield from (waiting, running, preemptions, first_tokens, refusals, slo, predicted)


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
