"""Counters, gauges and histograms of the engine, in the form Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llm_serving import __version__
from llm_serving.core.enums import Proposer
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import DEFAULT_CLASSES, RequestClass
from llm_serving.observability.class_metrics import ClassMetrics
from llm_serving.observability.histogram import LATENCY_BUCKETS, LENGTH_BUCKETS, TOKEN_BUCKETS, Histogram
from llm_serving.observability.transfer_metrics import HttpMetrics, MoveMetrics, SwapMetrics


class Totals(NamedTuple):
    """What has been counted since the start."""

    steps: int
    prompt_tokens: int
    """Tokens computed that no token was chosen for before: of prompts, and what was computed again."""
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class Load(NamedTuple):
    """Requests summed over replicas, usage averaged."""

    num_running: int
    num_waiting: int
    kv_usage: float


_OF_A_REPLICA: Final = (
    ("llm_serving:replica_requests_running", "Requests that are running, of each replica.", "num_running"),
    ("llm_serving:replica_requests_waiting", "Requests that wait to be scheduled, of each replica.", "num_waiting"),
    ("llm_serving:replica_kv_cache_usage", "Share of the KV cache in use, of each replica.", "kv_usage"),
)
"""Metric, its help and the field of `Load`."""


class ReplicaCounts(NamedTuple):
    num_replicas: int
    num_ready: int
    """Those that serve at this moment."""


class Metrics(Collector):
    """What the engine did. Names starting with `vllm:` are those that existing dashboards read.

    Several engine loops may count; a scrape reads numbers that may be a step apart. Seconds are on the engine's clock.

    Args:
        model_name: Value of the label `model_name` of every metric.
        classes: Of requests, in ascending order of rank.
    """

    def __init__(self, model_name: str = "model", classes: Sequence[RequestClass] = DEFAULT_CLASSES) -> None:
        self._labels = {"model_name": model_name}
        self.classes = ClassMetrics(self._labels, classes)
        self.swaps = SwapMetrics(self._labels)
        self.moves = MoveMetrics(self._labels)
        self.http = HttpMetrics(self._labels)
        self.replicas: Callable[[], ReplicaCounts] = lambda: ReplicaCounts(0, 0)
        """Asked when the numbers are read."""
        self._lock = Lock()
        self._loads: dict[int, Load] = {}
        self._compilations: dict[int, Callable[[], int]] = {}
        self._machines: dict[int, Callable[[], str]] = {}
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self.draft_tokens = {name: dict.fromkeys(map(str, Proposer), 0) for name in _DRAFT_TOKENS}
        """Metric -> count by proposer."""
        self._finished = dict.fromkeys(FinishReason, 0)
        self._reloads = dict.fromkeys(RELOADS, 0)
        self.num_shares_broken = dict.fromkeys(SHARES, 0)
        """How often a limit or a weight, which hold for all replicas together, did not."""
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._iteration_tokens = self._histograms["vllm:iteration_tokens_total"]
        self._inter_token = self._histograms["vllm:inter_token_latency_seconds"]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # What the master itself takes: process_cpu_seconds_total, process_resident_memory_bytes and the like.
        ProcessCollector(registry=self.registry)

    def step(self, num_running: int, num_waiting: int, kv_usage: float, num_tokens: int, *, replica: int = 0) -> None:
        """One step was scheduled.

        Args:
            num_running: Requests running.
            num_waiting: Requests waiting.
            kv_usage: Share of the KV cache in use, between 0.0 and 1.0.
            num_tokens: Tokens the step computes.
            replica: Whose numbers these are; requests are summed over replicas, usage is averaged.
        """
        with self._lock:
            self._loads[replica] = Load(num_running, num_waiting, kv_usage)
            self._counts["llm_serving:steps_total"] += 1
            self._iteration_tokens.observe(num_tokens)

    def load(self, num_running: int, num_waiting: int, kv_usage: float, *, replica: int = 0) -> None:
        """The load without a step, such as when the engine falls idle."""
        with self._lock:
            self._loads[replica] = Load(num_running, num_waiting, kv_usage)

    def watch_agent(
        self, replica: int, num_compilations: Callable[[], int], machine: Callable[[], str] = lambda: ""
    ) -> None:
        """Lets every scrape ask how many graphs the WorkAgent of a replica has compiled, and where it runs: the address
        of its machine, or nothing for the master's own."""
        self._compilations[replica] = num_compilations
        self._machines[replica] = machine

    def machine(self, replica: int) -> str:
        """Where the WorkAgent of a replica runs, as `watch_agent` was told."""
        return self._machines[replica]() if replica in self._machines else ""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        with self._lock:
            self._counts["vllm:generation_tokens_total"] += 1
            self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)

    def inter_tokens(self, seconds: Sequence[float]) -> None:
        """Requests got further tokens, each of them so many seconds after its one before."""
        observe = self._inter_token.observe
        with self._lock:
            self._counts["vllm:generation_tokens_total"] += len(seconds)
            for each in seconds:
                observe(each)

    def shared(self) -> None:
        """An answer was given that another request computes, or had computed."""
        with self._lock:
            self._counts["llm_serving:shared_answers_total"] += 1

    def finished(
        self,
        reason: str,
        e2e_s: float,
        ttft_s: float | None,
        num_prompt: int,
        num_output: int,
        queued_s: float,
        decode_s: float | None = None,
    ) -> None:
        """A request ended.

        Args:
            reason: A `FinishReason`.
            e2e_s: Seconds from its arrival to now.
            ttft_s: Seconds from its arrival to its first token; None when it got none.
            num_prompt: Tokens of its prompt.
            num_output: Tokens generated.
            queued_s: Seconds from its arrival to being scheduled for the first time.
            decode_s: Seconds from its first token to its newest; None when it got none.
        """
        histograms = self._histograms
        with self._lock:
            self._finished[FinishReason(reason)] += 1
            self._counts["vllm:prompt_tokens_total"] += num_prompt
            histograms["vllm:e2e_request_latency_seconds"].observe(e2e_s)
            histograms["vllm:request_queue_time_seconds"].observe(queued_s)
            histograms["vllm:request_prompt_tokens"].observe(num_prompt)
            histograms["vllm:request_generation_tokens"].observe(num_output)
            if ttft_s is not None and decode_s is not None:
                histograms["vllm:request_prefill_time_seconds"].observe(ttft_s - queued_s)
                histograms["vllm:request_decode_time_seconds"].observe(decode_s)
                histograms["vllm:request_inference_time_seconds"].observe(ttft_s - queued_s + decode_s)
            if ttft_s is not None and num_output > 1:
                per_token = (e2e_s - ttft_s) / (num_output - 1)
                histograms["vllm:request_time_per_output_token_seconds"].observe(per_token)

    def preempted(self, n: int = 1) -> None:
        self._add("vllm:num_preemptions_total", n)

    def prefix_cache(self, num_queried: int, num_hit: int) -> None:
        """Tokens looked up in the prefix cache, and how many of them were found."""
        self._add("vllm:prefix_cache_queries_total", num_queried)
        self._add("vllm:prefix_cache_hits_total", num_hit)

    def record_verified_drafts(self, verified: Iterable[tuple[str, int, int]]) -> None:
        """Count the draft tokens of a request that a step verified: (proposer, draft tokens, accepted) of each."""
        with self._lock:
            self._counts["vllm:spec_decode_num_drafts_total"] += 1
            for proposer, *counts in verified:
                for by_proposer, count in zip(self.draft_tokens.values(), counts, strict=True):
                    by_proposer[proposer] += count

    def bound_violated(self, n: int = 1) -> None:
        self._add("llm_serving:bound_violations_total", n)

    def shares_broken(self, num_of_tenants: int, num_of_classes: int) -> None:
        """Requests that run beyond the limit of their tenant; classes that were passed over against their weight."""
        if num_of_tenants or num_of_classes:
            with self._lock:
                for name, number in zip(SHARES, (num_of_tenants, num_of_classes), strict=True):
                    self.num_shares_broken[name] += number

    def audited(self, *, differs: bool) -> None:
        """An answer was computed again, alone."""
        self._add("llm_serving:audits_total", 1)
        self._add("llm_serving:audit_mismatch_total", int(differs))

    def reloaded(self, outcome: str) -> None:
        """The configuration was read again; one of `RELOADS`."""
        with self._lock:
            self._reloads[outcome] += 1

    def worker_restarted(self, n: int = 1) -> None:
        self._add("llm_serving:worker_restarts_total", n)

    def _add(self, counter: str, n: int) -> None:
        with self._lock:
            self._counts[counter] += n

    def load_now(self) -> Load:
        """The newest load of all replicas."""
        loads = list(self._loads.values())
        return Load(
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.kv_usage for load in loads) / max(len(loads), 1),
        )

    @property
    def num_bound_violations(self) -> int:
        return self._counts["llm_serving:bound_violations_total"]

    def totals(self) -> Totals:
        """What the line of throughput compares with what it was before."""
        with self._lock:
            counts = self._counts
            generated = counts["vllm:generation_tokens_total"]
            # Each token but a request's first was chosen in a step that computed the one before it.
            num_decoded = generated - self._histograms["vllm:time_to_first_token_seconds"].count
            return Totals(
                counts["llm_serving:steps_total"],
                int(self._iteration_tokens.sum) - num_decoded,
                generated,
                counts["vllm:num_preemptions_total"],
                counts["vllm:prefix_cache_queries_total"],
                counts["vllm:prefix_cache_hits_total"],
            )

    def render(self) -> tuple[bytes, str]:
        """The text of a scrape and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _of_each_replica(self, names: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
        loads = sorted(self._loads.items())
        for name, text, field in _OF_A_REPLICA:
            gauge = GaugeMetricFamily(name, text, labels=names)
            for replica, load in loads:
                gauge.add_metric([*values, str(replica), self.machine(replica)], getattr(load, field))
            yield gauge

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        """A counter with one more label, by whose values there are counts."""
        counter = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value, count in counts.items():
            counter.add_metric([*self._labels.values(), value], count)
        return counter

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        load, replicas = self.load_now(), self.replicas()
        gauges = {
            "vllm:num_requests_running": ("Requests that are running.", load.num_running),
            "vllm:num_requests_waiting": ("Requests that wait to be scheduled.", load.num_waiting),
            "vllm:kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it.", load.kv_usage),
            "llm_serving:replicas": ("WorkAgents that are configured, each a replica of the model.", replicas[0]),
            "llm_serving:replicas_ready": ("WorkAgents that serve.", replicas[1]),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        build = GaugeMetricFamily("llm_serving:build_info", "1; the labels tell what runs.", labels=[*names, "version"])
        build.add_metric([*values, __version__], 1)
        yield build
        compiled = GaugeMetricFamily(
            "llm_serving:graph_compilations",
            "Graphs a WorkAgent had compiled by its latest step; more than its warm-up's mean that steps waited.",
            labels=[*names, "replica"],
        )
        for replica, num_compilations in list(self._compilations.items()):
            compiled.add_metric([*values, str(replica)], num_compilations())
        yield compiled
        yield from self._of_each_replica([*names, "replica", "machine"], values)
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, self._counts[name])
            yield counter
        yield self._by_label(
            "vllm:request_success_total",
            "Requests that ended, by reason.",
            "finished_reason",
            {reason.value: count for reason, count in self._finished.items()},
        )
        yield self._by_label(
            "llm_serving:config_reloads_total",
            "Times the configuration was read again: applied, refused, or unchanged.",
            "outcome",
            self._reloads,
        )
        yield self._by_label(
            "llm_serving:share_violations_total",
            "Times a tenant's limit or a class's weight did not hold for all replicas together; stays 0.",
            "of",
            self.num_shares_broken,
        )
        for name, (text, deprecated_name) in _DRAFT_TOKENS.items():
            counts = self.draft_tokens[name]
            yield self._by_label(name, text, "proposer", counts)
            yield self._by_label(deprecated_name, f"Deprecated name of {name}.", "proposer", counts)
        for name, histogram in self._histograms.items():
            yield histogram.family(name, _HISTOGRAMS[name][0], self._labels)
        yield from self.classes.collect()
        yield from self.swaps.collect()
        yield from self.moves.collect()
        yield from self.http.collect()


RELOADS: Final = ("applied", "refused", "unchanged")
SHARES: Final = ("tenant_limit", "class_weight")
_COUNTERS: Final = {
    "vllm:num_preemptions_total": "Times a running request lost its blocks.",
    "vllm:prompt_tokens_total": "Prompt tokens of requests that ended.",
    "vllm:generation_tokens_total": "Tokens generated.",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache.",
    "llm_serving:steps_total": "Steps scheduled.",
    "vllm:spec_decode_num_drafts_total": "Drafts verified: once per request and step.",
    "llm_serving:bound_violations_total": "Times a bound on waiting was broken; stays 0.",
    "llm_serving:audits_total": "Answers computed again, alone, and compared.",
    "llm_serving:audit_mismatch_total": "Audited answers that differed; stays 0.",
    "llm_serving:shared_answers_total": "Answers that were not computed, as the same request had one or was in flight.",
    "llm_serving:worker_restarts_total": "WorkAgents started again after they ended.",
}
_DRAFT_TOKENS: Final = {
    "vllm:spec_decode_num_draft_tokens_total": (
        "Draft tokens verified, by proposer.",
        "llm_serving:guesses_checked_total",
    ),
    "vllm:spec_decode_num_accepted_tokens_total": (
        "Draft tokens accepted, by proposer.",
        "llm_serving:guesses_right_total",
    ),
}
"""Metric -> help text and deprecated name."""
_HISTOGRAMS: Final = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", TOKEN_BUCKETS),
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", LATENCY_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", LATENCY_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("Mean gap between the tokens of a request.", LATENCY_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end of a request.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("From arrival to being scheduled first.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("From being scheduled first to the first token.", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("From being scheduled first to the last token.", LATENCY_BUCKETS),
    "vllm:request_prompt_tokens": ("Tokens of the prompt.", LENGTH_BUCKETS),
    "vllm:request_generation_tokens": ("Tokens generated for a request.", LENGTH_BUCKETS),
}
