"""Names and texts of the metrics, and histograms, counters and gauges in Prometheus format."""

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

REPLICA_GAUGES: Final = (
    ("llm_serving:replica_requests_running", "Running requests of each replica.", "num_running"),
    ("llm_serving:replica_requests_waiting", "Waiting requests of each replica.", "num_waiting"),
    ("llm_serving:replica_kv_cache_usage", "Share of the KV cache in use, of each replica.", "kv_usage"),
)
MEMORY_GAUGES: Final = (
    ("llm_serving:kv_cache_reserved_bytes", "Bytes of all blocks of the KV cache, of each replica.", "reserved"),
    ("llm_serving:kv_cache_committed_bytes", "Bytes of the blocks that were in use at least once.", "committed"),
    (
        "llm_serving:work_agent_resident_memory_bytes",
        "Resident memory of each replica's WorkAgent; 0 if it runs on another machine.",
        "resident",
    ),
)
STATE_GAUGES: Final = (
    ("llm_serving:state_slots", "Slots for recurrent states, of each replica.", "total"),
    ("llm_serving:state_slots_used", "Slots for recurrent states in use, of each replica.", "used"),
    (
        "llm_serving:state_checkpoints",
        "Recurrent states from which a prefix hit can continue, of each replica.",
        "checkpoints",
    ),
)
SWAP_GAUGES: Final = (
    ("vllm:num_requests_swapped", "Preempted requests that wait in host memory.", "num_requests"),
    ("llm_serving:swap_blocks_used", "Blocks of the host pools in use.", "num_used_blocks"),
    ("llm_serving:swap_blocks", "Blocks of the host pools.", "num_blocks"),
)
RELOADS: Final = ("applied", "refused", "unchanged")
SHARES: Final = ("tenant_limit", "class_weight")
COUNTERS: Final = {
    "vllm:num_preemptions_total": "Preemptions of running requests.",
    "vllm:prompt_tokens_total": "Prompt tokens of finished requests.",
    "vllm:generation_tokens_total": "Tokens generated.",
    "vllm:prefix_cache_queries_total": "Tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits_total": "Tokens found in the prefix cache.",
    "llm_serving:steps_total": "Steps scheduled.",
    "vllm:spec_decode_num_drafts_total": "Drafts verified, at most one per request and step.",
    "llm_serving:bound_violations_total": "Violations of a guaranteed maximum wait; 0 unless the scheduler has a bug.",
    "llm_serving:audits_total": "Answers that were recomputed with batch size 1 and compared.",
    "llm_serving:audit_mismatch_total": "Audited answers that differed when recomputed; 0 unless there is a bug.",
    "llm_serving:shared_answers_total": "Requests that got the answer of an identical request.",
    "llm_serving:worker_restarts_total": "Restarts of WorkAgents.",
    "llm_serving:swapped_out_requests_total": "Preempted requests whose blocks were swapped out.",
    "llm_serving:swapped_out_blocks_total": "Blocks swapped out to host memory.",
    "llm_serving:swapped_in_blocks_total": "Blocks swapped in from host memory.",
    "llm_serving:moved_requests_total": "Requests that migrated from the replica that computed their prompt to another "
    "replica.",
    "llm_serving:moved_blocks_total": "KV blocks of migrated requests.",
    "llm_serving:moved_bytes_total": "Bytes of the KV blocks of migrated requests.",
    "llm_serving:move_seconds_total": "Sum of the seconds from a migrated request's last step on one replica to its "
    "first step on the next.",
    "llm_serving:disk_cache_queried_blocks_total": "Disk cache: Prompt blocks looked up because they were not in "
    "memory.",
    "llm_serving:disk_cache_hit_blocks_total": "Disk cache: Prompt blocks that were read.",
    "llm_serving:disk_cache_read_bytes_total": "Disk cache: Bytes of the blocks that were read.",
    "llm_serving:disk_cache_written_blocks_total": "Disk cache: Blocks that were written.",
    "llm_serving:disk_cache_written_bytes_total": "Disk cache: Bytes of the blocks that were written.",
    "llm_serving:disk_cache_evicted_blocks_total": "Disk cache: Least recently used blocks that were deleted.",
    "llm_serving:disk_cache_damaged_blocks_total": "Disk cache: Files that were deleted because their checksum did not "
    "match.",
}
DRAFT_TOKENS: Final = {
    "vllm:spec_decode_num_draft_tokens_total": (
        "Draft tokens verified, by proposer.",
        "llm_serving:guesses_checked_total",
    ),
    "vllm:spec_decode_num_accepted_tokens_total": (
        "Draft tokens accepted, by proposer.",
        "llm_serving:guesses_right_total",
    ),
}
HISTOGRAMS: Final = {
    "vllm:iteration_tokens_total": ("Tokens computed in a step.", TOKEN_BUCKETS),
    "vllm:time_to_first_token_seconds": ("Time from arrival to the first token.", LATENCY_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Time between two tokens of a request.", LATENCY_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("Mean time between the tokens of a request.", LATENCY_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("Time from arrival to the end of a request.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("Time from arrival to the first scheduling.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("Time from the first scheduling to the first token.", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("Time from the first token to the last.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("Time from the first scheduling to the last token.", LATENCY_BUCKETS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", LENGTH_BUCKETS),
    "vllm:request_generation_tokens": ("Tokens generated for a request.", LENGTH_BUCKETS),
}

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
