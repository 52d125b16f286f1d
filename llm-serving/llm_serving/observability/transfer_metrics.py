"""Metrics of swapped KV blocks, of migrated requests, and of HTTP requests by route and status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.observability.histogram import LENGTH_BUCKETS, Histogram
from llm_serving.scheduler.schedule import Preemption

LONGEST: Final = "vllm:request_max_num_generation_tokens"


class SwapLoad(NamedTuple):
    num_requests: int
    """That wait in the host pool."""
    num_used_blocks: int
    num_blocks: int


class SwapMetrics:
    """Counted by the engine loops; what waits is asked for when the numbers are read, and summed over replicas.

    Args:
        labels: Of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._lock = Lock()
        self._loads: dict[int, Callable[[], SwapLoad]] = {}
        self._num_requests_out = self._num_blocks_out = self._num_blocks_in = 0

    def watch(self, replica: int, load: Callable[[], SwapLoad]) -> None:
        """Lets every scrape ask what waits in the host pool of a replica."""
        self._loads[replica] = load

    def scheduled(self, moves: Sequence[BlockMove], preemptions: Sequence[Preemption]) -> None:
        """A step was formed that makes these moves, after these preemptions."""
        if not moves and not preemptions:
            return
        with self._lock:
            self._num_requests_out += sum(preemption.swapped for preemption in preemptions)
            self._num_blocks_out += sum(move.kind == BlockMoveKind.SWAP_OUT for move in moves)
            self._num_blocks_in += sum(move.kind == BlockMoveKind.SWAP_IN for move in moves)

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        loads = [load() for load in list(self._loads.values())]
        gauges = {
            "vllm:num_requests_swapped": ("Preempted requests that wait in host memory.", "num_requests"),
            "llm_serving:swap_blocks_used": ("Blocks of the host pools that hold something.", "num_used_blocks"),
            "llm_serving:swap_blocks": ("Blocks of the host pools.", "num_blocks"),
        }
        for name, (text, attribute) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, sum(getattr(load, attribute) for load in loads))
            yield gauge
        counters = {
            "llm_serving:swapped_out_requests_total": (
                "Preempted requests whose blocks were moved out.",
                self._num_requests_out,
            ),
            "llm_serving:swapped_out_blocks_total": ("Blocks moved out to host memory.", self._num_blocks_out),
            "llm_serving:swapped_in_blocks_total": ("Blocks moved back in from host memory.", self._num_blocks_in),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, count)
            yield counter


class MoveMetrics:
    """Counted by the engine loops of the replicas that requests move to.

    Args:
        labels: Of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._lock = Lock()
        self.block_bytes = 0
        """Of a block, all layers; 0: not known."""
        self._num_requests = self._num_blocks = 0
        self._seconds = 0.0

    def arrived(self, seconds: Sequence[float], moves: Sequence[BlockMove]) -> None:
        """A step is formed with requests that moved, for the first time.

        Args:
            seconds: Of each, since the last reply to a step that computed it where it came from.
            moves: Of the step; those that take its blocks over count.
        """
        with self._lock:
            self._num_requests += len(seconds)
            self._seconds += sum(seconds)
            self._num_blocks += sum(move.kind == BlockMoveKind.IMPORT for move in moves)

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        counters = {
            "llm_serving:moved_requests_total": (
                "Requests that went on at another replica than the one that computed their prompt.",
                self._num_requests,
            ),
            "llm_serving:moved_blocks_total": ("Blocks of keys and values that they took along.", self._num_blocks),
            "llm_serving:moved_bytes_total": ("Bytes of these blocks.", self._num_blocks * self.block_bytes),
            "llm_serving:move_seconds_total": (
                "From the reply to the last step at one replica to the first step formed at the other, summed up.",
                self._seconds,
            ),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, value)
            yield counter


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
