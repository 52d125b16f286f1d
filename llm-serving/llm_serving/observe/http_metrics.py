"""HTTP requests by route and status, and how long their answers were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from llm_serving.observe.histogram import LENGTH_BUCKETS, Histogram

LONGEST: Final = "vllm:request_max_num_generation_tokens"


class HttpMetrics:
    """Counted on the event loop.

    Args:
        labels: Of every metric; `method`, `route` and `status` are added.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._longest = Histogram(LENGTH_BUCKETS)

    def answered(self, method: str, route: str, status: int, longest: Sequence[int] = ()) -> None:
        """A request was answered; `longest`: for each of its prompts the tokens of the longest answer to it.

        Method and route are out of small sets: a client must not invent series.
        """
        self._counts[method, route, status] += 1
        for num_tokens in longest:
            self._longest.observe(num_tokens)

    def refused(self, reason: str) -> None:
        """A request was refused before any route saw it. Reasons are out of a small set."""
        self._refusals[reason] += 1

    def collect(self) -> Iterator[Metric]:
        counter = CounterMetricFamily(
            "llm_serving:http_requests_total",
            "HTTP requests that were answered, or whose client left before (status 499).",
            labels=[*self._labels, "method", "route", "status"],
        )
        for (method, route, status), count in self._counts.copy().items():
            counter.add_metric([*self._labels.values(), method, route, str(status)], count)
        yield counter
        refusals = CounterMetricFamily(
            "llm_serving:http_refusals_total",
            "HTTP requests refused before any route saw them: no known API key, a foreign page.",
            labels=[*self._labels, "reason"],
        )
        for reason, count in self._refusals.copy().items():
            refusals.add_metric([*self._labels.values(), reason], count)
        yield refusals
        yield self._longest.family(LONGEST, "Tokens of the longest of the answers to a prompt.", self._labels)
