"""What each class of requests got: load, refusals, preemptions, first tokens and kept promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.observability.histogram import LATENCY_BUCKETS, Histogram

REFUSALS: Final = (
    "max_waiting_queue",
    "max_waiting_tokens",
    "class_max_waiting",
    "key_max_waiting",
    "slo",
    "deadline",
    "never_fits",
)
"""Reasons of a refusal: the limits of the waiting room, the predicted time to first token, the size of the request."""
TARGETS: Final = ("ttft", "tpot", "all")
"""What is promised: the first token in time, the tokens after it in time, and both: goodput."""


class ClassLoad(NamedTuple):
    num_waiting: int
    num_running: int


class ClassMetrics:
    """Counted by the configured class, whatever order the policy keeps.

    Args:
        labels: Of every metric; `priority_class` is added.
        classes: In ascending order of rank.
    """

    def __init__(self, labels: Mapping[str, str], classes: Sequence[RequestClass]) -> None:
        self.load: Callable[[str], ClassLoad] = lambda name: ClassLoad(0, 0)
        """Asked for each class when the numbers are read."""
        self.predicted_s: Callable[[str], float | None] = lambda name: None
        """Seconds to the first token of a short request of the class that came now; None: too little was measured."""
        self._labels = dict(labels)
        self._classes = tuple(classes)
        self._lock = Lock()
        self._refusals = Counter(dict.fromkeys(((each.name, reason) for each in classes for reason in REFUSALS), 0))
        self._preemptions = Counter(dict.fromkeys((each.name for each in classes), 0))
        self._ttft = {each.name: Histogram(LATENCY_BUCKETS) for each in classes}
        promised = [(each.name, target) for each in classes for target in TARGETS if _promises(each, target)]
        self._slo = Counter(dict.fromkeys(((*each, met) for each in promised for met in (True, False)), 0))

    def reload(self, classes: Sequence[RequestClass]) -> None:
        """The same classes promise something else from now on."""
        with self._lock:
            self._classes = tuple(classes)
            for each in classes:
                for target in TARGETS:
                    if _promises(each, target):
                        for met in (True, False):
                            self._slo.setdefault((each.name, target, met), 0)

    def refused(self, request_class: RequestClass, reason: str, n: int = 1) -> None:
        """Requests were refused at the door, for one of `REFUSALS`."""
        with self._lock:
            self._refusals[request_class.name, reason] += n

    def preempted(self, priority: int) -> None:
        """A running request lost its place."""
        with self._lock:
            self._preemptions[class_of(priority, self._classes).name] += 1

    def first_token(self, priority: int, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        with self._lock:
            self._ttft[class_of(priority, self._classes).name].observe(seconds)

    def ended(
        self, priority: int, reason: FinishReason, ttft_s: float | None, tpot_s: float | None, e2e_s: float
    ) -> None:
        """A request ended; it kept its class's promises or not.

        A request that failed has kept none. One that the client gave up, or gave no more time,
        counts where a promise was broken before.

        Args:
            priority: Of the request.
            reason: Why it ended.
            ttft_s: Seconds from arrival to the first token; None: it got none.
            tpot_s: Mean seconds between its tokens; None: it got fewer than two.
            e2e_s: Seconds from arrival to the end.
        """
        request_class = class_of(priority, self._classes)
        failed = reason in (FinishReason.ERROR, FinishReason.UNAVAILABLE)
        left = reason in (FinishReason.ABORT, FinishReason.TIMEOUT)
        outcomes: dict[str, bool | None] = {
            "ttft": _is_met(request_class.ttft_slo_s, e2e_s if ttft_s is None else ttft_s, failed and ttft_s is None),
            "tpot": _is_met(request_class.tpot_slo_s, tpot_s, failed),
        }
        if left and ttft_s is None and outcomes["ttft"]:
            outcomes["ttft"] = None  # it might have been
        known = [met for met in outcomes.values() if met is not None]
        if failed or not all(known):
            outcomes["all"] = False
        else:
            outcomes["all"] = None if left else True
        with self._lock:
            for target, met in outcomes.items():
                if met is not None and _promises(request_class, target):
                    self._slo[request_class.name, target, met] += 1

    def kept(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Class -> target -> requests that kept what is promised, and those that did not; of what is promised alone."""
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
            "llm_serving:num_requests_waiting", "Requests let in and never scheduled yet.", labels=names
        )
        running = GaugeMetricFamily(
            "llm_serving:num_requests_running", "Requests scheduled once and not ended.", labels=names
        )
        preemptions = CounterMetricFamily(
            "llm_serving:preemptions_total", "Times a running request lost its blocks.", labels=names
        )
        first_tokens = HistogramMetricFamily(
            "llm_serving:time_to_first_token_seconds", "From arrival to the first token.", labels=names
        )
        predicted = GaugeMetricFamily(
            "llm_serving:predicted_time_to_first_token_seconds",
            "Expected for a short request of the class that came now; what to scale by.",
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
            "llm_serving:requests_refused_total", "Requests refused at the door.", labels=[*names, "reason"]
        )
        for (name, reason), count in self._refusals.items():
            refusals.add_metric([*values, name, reason], count)
        slo = CounterMetricFamily(
            "llm_serving:slo_requests_total",
            "Requests that kept what their class promises, or did not; `all` met is goodput.",
            labels=[*names, "target", "met"],
        )
        for (name, target, met), count in self._slo.items():
            slo.add_metric([*values, name, target, str(met).lower()], count)
        yield from (waiting, running, preemptions, first_tokens, refusals, slo, predicted)


def _promises(request_class: RequestClass, target: str) -> bool:
    ttft, tpot = request_class.ttft_slo_s is not None, request_class.tpot_slo_s is not None
    return {"ttft": ttft, "tpot": tpot, "all": ttft or tpot}[target]


def _is_met(promised_s: float | None, seconds: float | None, failed: bool) -> bool | None:
    """None where nothing was promised or nothing can be judged."""
    if promised_s is None:
        return None
    if failed:
        return False
    return None if seconds is None else seconds <= promised_s
