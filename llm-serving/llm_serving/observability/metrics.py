"""Counters, gauges and histograms of the engine in Prometheus format, and a periodic log line of load and rates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from llm_serving import __version__
from llm_serving.core.enums import Proposer
from llm_serving.core.request import FinishReason
from llm_serving.core.request_class import DEFAULT_CLASSES, RequestClass
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.core.timings import Clock
from llm_serving.log import get_logger
from llm_serving.observability.component_metrics import ClassMetrics, HttpMetrics
from llm_serving.observability.metric_families import (
    COUNTERS,
    DRAFT_TOKENS,
    HISTOGRAMS,
    MEMORY_GAUGES,
    RELOADS,
    REPLICA_GAUGES,
    SHARES,
    STATE_GAUGES,
    SWAP_GAUGES,
    Histogram,
    counter,
    counter_by,
    gauge,
    gauges,
)
from llm_serving.scheduler.schedule import Preemption

logger = get_logger(__name__)


class Totals(NamedTuple):
    steps: int
    prompt_tokens: int
    """Number of prompt tokens computed, including tokens recomputed after a preemption."""
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class Load(NamedTuple):
    num_running: int
    num_waiting: int
    kv_usage: float


class ReplicaCounts(NamedTuple):
    num_replicas: int
    num_ready: int


class WorkAgentMemory(NamedTuple):
    reserved: int
    committed: int
    """Bytes of the blocks that were used at least once: the system provides memory at first use."""
    resident: int
    """Resident bytes of the WorkAgent's processes, or 0 if it runs on another machine."""


class SwapLoad(NamedTuple):
    num_requests: int
    num_used_blocks: int
    num_blocks: int


class StateSlotUsage(NamedTuple):
    total: int = 0
    used: int = 0
    checkpoints: int = 0
    """Number of slots, used or free, whose state a prefix hit can use."""


class Metrics(Collector):
    """The metrics of a server. Names that start with `vllm:` match dashboards for vLLM. Times are in seconds. Several
    engine threads record without a lock, so the numbers of one scrape may belong to adjacent steps.
    """

    def __init__(self, model_name: str = "model", classes: Sequence[RequestClass] = DEFAULT_CLASSES) -> None:
        self._labels = {"model_name": model_name}
        self.classes = ClassMetrics(self._labels, classes)
        self.http = HttpMetrics(self._labels)
        self.replicas: Callable[[], ReplicaCounts] = lambda: ReplicaCounts(0, 0)
        self._lock = Lock()
        self._loads: dict[int, Load] = {}
        self._compilations: dict[int, Callable[[], int]] = {}
        self._machines: dict[int, Callable[[], str]] = {}
        self.memory: dict[int, Callable[[], WorkAgentMemory]] = {}
        self.state_slots: dict[int, Callable[[], StateSlotUsage]] = {}
        self.swap_loads: dict[int, Callable[[], SwapLoad]] = {}
        self.block_bytes = 0
        """Size of a block of the KV cache, or 0 before a WorkAgent has loaded the model."""
        self._disk_bytes = -1
        self._counts: dict[str, Any] = dict.fromkeys(COUNTERS, 0)
        """Name of a counter -> int, or float if it counts seconds."""
        self.draft_tokens = {name: dict.fromkeys(map(str, Proposer), 0) for name in DRAFT_TOKENS}
        self._finished = dict.fromkeys(FinishReason, 0)
        self._reloads = dict.fromkeys(RELOADS, 0)
        self.num_shares_broken = dict.fromkeys(SHARES, 0)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._iteration_tokens = self._histograms["vllm:iteration_tokens_total"]
        self._inter_token = self._histograms["vllm:inter_token_latency_seconds"]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        # Metrics of the master process: process_cpu_seconds_total, process_resident_memory_bytes and others.
        ProcessCollector(registry=self.registry)

    # --- recording --------------------------------------------------------------------------------------------------

    def record_load(
        self,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_step_tokens: int | None = None,
        *,
        replica: int = 0,
    ) -> None:
        """Record the load of a replica. Unless `num_step_tokens` is None, also count a step with as many tokens."""
        with self._lock:
            self._loads[replica] = Load(num_running, num_waiting, kv_usage)
            if num_step_tokens is not None:
                self._counts["llm_serving:steps_total"] += 1
                self._iteration_tokens.observe(num_step_tokens)

    def watch_agent(
        self, replica: int, num_compilations: Callable[[], int], machine: Callable[[], str] = lambda: ""
    ) -> None:
        """Register functions that every scrape calls for a WorkAgent. `machine` returns its host, or "" if local."""
        self._compilations[replica] = num_compilations
        self._machines[replica] = machine

    def machine(self, replica: int) -> str:
        return self._machines[replica]() if replica in self._machines else ""

    def record_first_token(self, seconds: float, priority: int = 0) -> None:
        with self._lock:
            self._counts["vllm:generation_tokens_total"] += 1
            self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)
        self.classes.record_first_token(priority, seconds)

    def record_inter_tokens(self, seconds: Sequence[float]) -> None:
        observe = self._inter_token.observe
        with self._lock:
            self._counts["vllm:generation_tokens_total"] += len(seconds)
            for each, count in Counter(seconds).items():  # most tokens of a step have the same time
                observe(each, count)

    def record_finished(
        self,
        reason: FinishReason,
        *,
        e2e_s: float,
        ttft_s: float | None,
        num_prompt: int,
        num_output: int,
        queued_s: float,
        decode_s: float | None = None,
        num_cached: int = 0,
        priority: int = 0,
    ) -> None:
        """Record a finished request. `decode_s`: from the first to the last token. Other times count from arrival."""
        counts, histograms = self._counts, self._histograms
        tpot_s = None if ttft_s is None or num_output < 2 else (e2e_s - ttft_s) / (num_output - 1)
        with self._lock:
            self._finished[reason] += 1
            counts["vllm:prompt_tokens_total"] += num_prompt
            counts["vllm:prefix_cache_queries_total"] += num_prompt
            counts["vllm:prefix_cache_hits_total"] += num_cached
            histograms["vllm:e2e_request_latency_seconds"].observe(e2e_s)
            histograms["vllm:request_queue_time_seconds"].observe(queued_s)
            histograms["vllm:request_prompt_tokens"].observe(num_prompt)
            histograms["vllm:request_generation_tokens"].observe(num_output)
            if ttft_s is not None and decode_s is not None:
                histograms["vllm:request_prefill_time_seconds"].observe(ttft_s - queued_s)
                histograms["vllm:request_decode_time_seconds"].observe(decode_s)
                histograms["vllm:request_inference_time_seconds"].observe(ttft_s - queued_s + decode_s)
            if tpot_s is not None:
                histograms["vllm:request_time_per_output_token_seconds"].observe(tpot_s)
        self.classes.record_finished(priority, reason, ttft_s, tpot_s, e2e_s)

    def record_preempted(self, priorities: Sequence[int]) -> None:
        with self._lock:
            self._counts["vllm:num_preemptions_total"] += len(priorities)
        for priority in priorities:
            self.classes.record_preempted(priority)

    def record_verified_drafts(self, verified: Iterable[tuple[str, int, int]]) -> None:
        with self._lock:
            self._counts["vllm:spec_decode_num_drafts_total"] += 1
            for proposer, *counts in verified:
                for by_proposer, count in zip(self.draft_tokens.values(), counts, strict=True):
                    by_proposer[proposer] += count

    def record_bound_violations(self, count: int) -> None:
        self.add(bound_violations=count)

    def shares_broken(self, num_of_tenants: int, num_of_classes: int) -> None:
        """Count requests above their tenant's limit, and slots given to a class that was not entitled to them."""
        if num_of_tenants or num_of_classes:
            with self._lock:
                for name, number in zip(SHARES, (num_of_tenants, num_of_classes), strict=True):
                    self.num_shares_broken[name] += number

    def record_audit(self, *, differs: bool) -> None:
        self.add(audits=1, audit_mismatch=int(differs))

    def reloaded(self, outcome: str) -> None:
        with self._lock:
            self._reloads[outcome] += 1

    def record_swaps(self, moves: Sequence[BlockMove], preemptions: Sequence[Preemption]) -> None:
        kinds = Counter(move.kind for move in moves)
        self.add(
            swapped_out_requests=sum(preemption.swapped for preemption in preemptions),
            swapped_out_blocks=kinds[BlockMoveKind.SWAP_OUT],
            swapped_in_blocks=kinds[BlockMoveKind.SWAP_IN],
        )

    def record_migrated(self, seconds: Sequence[float], moves: Sequence[BlockMove]) -> None:
        """Count requests that migrated here, and the KV blocks that the `moves` import. `seconds`: for each request,
        the time from its last step on the old replica to its first step here.
        """
        num_blocks = sum(move.kind == BlockMoveKind.IMPORT for move in moves)
        self.add(
            moved_requests=len(seconds),
            moved_blocks=num_blocks,
            moved_bytes=num_blocks * self.block_bytes,
            move_seconds=sum(seconds),
        )

    def record_disk_read(self, num_looked_up: int, num_read: int, num_damaged: int, num_bytes: int) -> None:
        """Count a disk lookup of prompt blocks. `num_bytes`: size of all files, or -1 if the folder cannot be used."""
        self._disk_bytes = num_bytes
        self.add(
            disk_cache_queried_blocks=num_looked_up,
            disk_cache_hit_blocks=num_read,
            disk_cache_read_bytes=num_read * self.block_bytes,
            disk_cache_damaged_blocks=num_damaged,
        )

    def record_disk_stored(self, num_written: int, num_evicted: int, num_bytes: int) -> None:
        self._disk_bytes = num_bytes
        self.add(
            disk_cache_written_blocks=num_written,
            disk_cache_written_bytes=num_written * self.block_bytes,
            disk_cache_evicted_blocks=num_evicted,
        )

    def add(self, **counts: float) -> None:
        """Add each argument to the counter `llm_serving:NAME_total`, where NAME is the argument's name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[f"llm_serving:{name}_total"] += count

    # --- reading ----------------------------------------------------------------------------------------------------

    def load_now(self) -> Load:
        loads = list(self._loads.values())
        return Load(
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.kv_usage for load in loads) / max(len(loads), 1),
        )

    @property
    def num_bound_violations(self) -> int:
        return int(self._counts["llm_serving:bound_violations_total"])

    def totals(self) -> Totals:
        with self._lock:
            counts = self._counts
            generated = counts["vllm:generation_tokens_total"]
            # Each token except a request's first was sampled in a step that computed the token before it.
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
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        labels = self._labels
        load, replicas = self.load_now(), self.replicas()
        yield gauge("vllm:num_requests_running", "Requests that are running.", labels, load.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", labels, load.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", labels, load.kv_usage)
        text = "Configured replicas of the model, each with a WorkAgent."
        yield gauge("llm_serving:replicas", text, labels, replicas.num_replicas)
        yield gauge("llm_serving:replicas_ready", "WorkAgents that serve.", labels, replicas.num_ready)
        build = {**labels, "version": __version__}
        yield gauge("llm_serving:build_info", "Always 1; the label `version` is the version of the server.", build, 1)
        text = (
            "Graphs that a WorkAgent has compiled; more than at its warm-up means that steps waited for a compilation."
        )
        compiled = {(str(replica),): count() for replica, count in list(self._compilations.items())}
        yield gauges("llm_serving:graph_compilations", text, labels, ("replica",), compiled)
        yield from self._of_replicas(REPLICA_GAUGES, dict(self._loads))
        memory = {replica: read() for replica, read in list(self.memory.items())}
        yield from self._of_replicas(MEMORY_GAUGES, memory)
        states = {replica: read() for replica, read in list(self.state_slots.items())}
        yield from self._of_replicas(STATE_GAUGES, states)
        swaps = [load() for load in list(self.swap_loads.values())]
        for name, text, field in SWAP_GAUGES:
            yield gauge(name, text, labels, sum(getattr(load, field) for load in swaps))
        text = "Disk cache: size of all files, or -1 if the folder cannot be used."
        yield gauge("llm_serving:disk_cache_bytes", text, labels, self._disk_bytes)
        for name, text in COUNTERS.items():
            yield counter(name, text, labels, self._counts[name])
        finished = {reason.value: count for reason, count in self._finished.items()}
        text = "Finished requests, by reason."
        yield counter_by("vllm:request_success_total", text, labels, "finished_reason", finished)
        text = "Reloads of the configuration by outcome: applied, refused, or unchanged."
        yield counter_by("llm_serving:config_reloads_total", text, labels, "outcome", self._reloads)
        text = "Violations of tenant limits and class weights across all replicas; 0 unless there is a bug."
        yield counter_by("llm_serving:share_violations_total", text, labels, "of", self.num_shares_broken)
        for name, (text, deprecated_name) in DRAFT_TOKENS.items():
            counts = self.draft_tokens[name]
            yield counter_by(name, text, labels, "proposer", counts)
            yield counter_by(deprecated_name, f"Deprecated name of {name}.", labels, "proposer", counts)
        for name, histogram in self._histograms.items():
            yield histogram.family(name, HISTOGRAMS[name][0], labels)
        yield from self.classes.collect()
        yield from self.http.collect()

    def _of_replicas(self, table: Sequence[tuple[str, str, str]], found: Mapping[int, NamedTuple]) -> Iterator[Metric]:
        for name, text, field in table:
            values = {(str(each), self.machine(each)): getattr(usage, field) for each, usage in sorted(found.items())}
            yield gauges(name, text, self._labels, ("replica", "machine"), values)


class MergedMetrics:
    """The metrics of several models, which the label `model_name` distinguishes. Each metric family occurs once."""

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._first, *self._others = metrics

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._first.registry.collect()}
        for family in (each for metrics in self._others for each in metrics.collect()):
            if family.name in families:
                families[family.name].samples.extend(family.samples)
            else:
                families[family.name] = family
        yield from families.values()

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self), CONTENT_TYPE_LATEST


def throughput(before: Totals, now: Totals, seconds: float, load: Load) -> str | None:
    """Return a line with the load and the rates of the last `seconds`. None if no step ran in them."""
    done = Totals(*(new - old for new, old in zip(now, before, strict=True)))
    if done.steps == 0 or seconds <= 0:
        return None
    hits = f"{done.prefix_hits / done.prefix_queries:.0%}" if done.prefix_queries else "-"
    return (
        f"{load.num_running} running, {load.num_waiting} waiting; "
        f"prompt {done.prompt_tokens / seconds:.1f} tok/s, "
        f"generation {done.generation_tokens / seconds:.1f} tok/s; "
        f"KV cache {load.kv_usage:.1%}, prefix hits {hits}, {done.preemptions} preemptions"
    )


async def log_throughput(metrics: Metrics, clock: Clock, interval_s: float) -> None:
    """Log a line every `interval_s` seconds until the task is cancelled. Skip it if no step ran in the meantime."""
    began, before = clock(), metrics.totals()
    while True:
        await asyncio.sleep(interval_s)
        ended, now = clock(), metrics.totals()
        if (text := throughput(before, now, ended - began, metrics.load_now())) is not None:
            logger.info("%s", text)
        began, before = ended, now
