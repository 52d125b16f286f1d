"""Histograms, counters and gauges in Prometheus format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(2.0**power for power in range(15))
LENGTH_BUCKETS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Upper bounds of buckets for the number of tokens of a request, up to half a million."""

Labels = Mapping[str, str]


class Histogram:
    """Counts of values in buckets. Adding a value costs one bisection and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        total, buckets = 0, []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self.sum

    def family(self, name: str, text: str, labels: Labels) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), *self.buckets())
        return family


Values = Mapping[Any, float]
"""Tuple with a value of each further label -> value of the metric."""


def counters(name: str, text: str, labels: Labels, names: Sequence[str], values: Values) -> CounterMetricFamily:
    """Return a counter. `values`: values of the labels `names` -> count. All samples also have the fixed `labels`."""
    family = CounterMetricFamily(name, text, labels=[*labels, *names])
    for further, value in values.items():
        family.add_metric([*labels.values(), *further], value)
    return family


def gauges(name: str, text: str, labels: Labels, names: Sequence[str], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[*labels, *names])
    for further, value in values.items():
        family.add_metric([*labels.values(), *further], value)
    return family


def counter(name: str, text: str, labels: Labels, value: float) -> CounterMetricFamily:
    return counters(name, text, labels, (), {(): value})


def gauge(name: str, text: str, labels: Labels, value: float) -> GaugeMetricFamily:
    return gauges(name, text, labels, (), {(): value})


def counter_by(name: str, text: str, labels: Labels, label: str, counts: Mapping[str, float]) -> CounterMetricFamily:
    return counters(name, text, labels, (label,), {(value,): count for value, count in counts.items()})
