"""Counters, gauges and histograms of the engine, in the form Prometheus scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving.core.request import FinishReason

LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = tuple(2.0**power for power in range(15))


class Histogram:
    """Counts per bucket; observing costs a bisection and three additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics(Collector):
    """What the engine did. Names starting with `vllm:` are those that existing dashboards read.

    Only the engine loop calls the methods that count, so they take no lock; a scrape reads numbers that may be one step
    apart. Seconds are on the engine's clock.

    Args:
        model_name: Value of the label `model_name` of every metric.
    """

    def __init__(self, model_name: str = "model") -> None:
        self._labels = {"model_name": model_name}
        self._num_running = 0
        self._num_waiting = 0
        self._kv_usage = 0.0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._iteration_tokens = self._histograms["vllm:iteration_tokens_total"]
        self._inter_token = self._histograms["vllm:inter_token_latency_seconds"]
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def step(self, num_running: int, num_waiting: int, kv_usage: float, num_tokens: int) -> None:
        """One step was scheduled.

        Args:
            num_running: Requests running.
            num_waiting: Requests waiting.
            kv_usage: Share of the KV cache in use, between 0.0 and 1.0.
            num_tokens: Tokens the step computes.
        """
        self.load(num_running, num_waiting, kv_usage)
        self._counts["llm_serving:steps_total"] += 1
        self._iteration_tokens.observe(num_tokens)

    def load(self, num_running: int, num_waiting: int, kv_usage: float) -> None:
        """The load without a step, such as when the engine falls idle."""
        self._num_running = num_running
        self._num_waiting = num_waiting
        self._kv_usage = kv_usage

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        self._counts["vllm:generation_tokens_total"] += 1
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` further tokens came `seconds` after the one before (of the same or of different requests)."""
        self._counts["vllm:generation_tokens_total"] += count
        self._inter_token.observe(seconds, count)

    def inter_tokens(self, seconds: Iterable[float]) -> None:
        """As `inter_token`, once for each gap."""
        for gap in seconds:
            self.inter_token(gap)

    def finished(
        self,
        reason: FinishReason,
        e2e_s: float,
        ttft_s: float | None,
        num_prompt: int,
        num_output: int,
        queued_s: float,
    ) -> None:
        """A request ended.

        Args:
            reason: Why.
            e2e_s: Seconds from its arrival to now.
            ttft_s: Seconds from its arrival to its first token; None when it got none.
            num_prompt: Tokens of its prompt.
            num_output: Tokens generated.
            queued_s: Seconds from its arrival to being scheduled for the first time.
        """
        self._finished[reason] += 1
        self._counts["vllm:prompt_tokens_total"] += num_prompt
        self._histograms["vllm:e2e_request_latency_seconds"].observe(e2e_s)
        self._histograms["vllm:request_queue_time_seconds"].observe(queued_s)
        if ttft_s is not None and num_output > 1:
            per_token = (e2e_s - ttft_s) / (num_output - 1)
            self._histograms["vllm:request_time_per_output_token_seconds"].observe(per_token)

    def preempted(self, n: int = 1) -> None:
        self._counts["vllm:num_preemptions_total"] += n

    def prefix_cache(self, num_queried: int, num_hit: int) -> None:
        """Tokens looked up in the prefix cache, and how many of them were found."""
        self._counts["vllm:prefix_cache_queries_total"] += num_queried
        self._counts["vllm:prefix_cache_hits_total"] += num_hit

    def bound_violated(self, n: int = 1) -> None:
        self._counts["llm_serving:bound_violations_total"] += n

    def audit_mismatch(self, n: int = 1) -> None:
        self._counts["llm_serving:audit_mismatch_total"] += n

    def worker_restarted(self, n: int = 1) -> None:
        self._counts["llm_serving:worker_restarts_total"] += n

    def render(self) -> tuple[bytes, str]:
        """The text of a scrape and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        gauges = {
            "vllm:num_requests_running": ("Requests that are running.", self._num_running),
            "vllm:num_requests_waiting": ("Requests that wait to be scheduled.", self._num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it.", self._kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, self._counts[name])
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success_total", "Requests that ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self._finished.items():
            ends.add_metric([*values, reason.value], count)
        yield ends
        for name, histogram in self._histograms.items():
            yield histogram.family(name, _HISTOGRAMS[name][0], self._labels)


_COUNTERS: Final = {
    "vllm:num_preemptions_total": "Times a running request lost its blocks.",
    "vllm:prompt_tokens_total": "Prompt tokens of requests that ended.",
    "vllm:generation_tokens_total": "Tokens generated.",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache.",
    "llm_serving:steps_total": "Steps scheduled.",
    "llm_serving:bound_violations_total": "Times a bound on waiting was broken; stays 0.",
    "llm_serving:audit_mismatch_total": "Audited answers that differed; stays 0.",
    "llm_serving:worker_restarts_total": "WorkAgents started again after they ended.",
}
_HISTOGRAMS: Final = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", TOKEN_BUCKETS),
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", LATENCY_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", LATENCY_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("Mean gap between the tokens of a request.", LATENCY_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end of a request.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("From arrival to being scheduled first.", LATENCY_BUCKETS),
}
