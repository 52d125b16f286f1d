"""What preemption by swap moves between the cache and the host pool, and what waits there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llm_serving.core.step import BlockMove, Move
from llm_serving.scheduler.wait_reason import Preemption


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

    def scheduled(self, moves: Sequence[Move], preemptions: Sequence[Preemption]) -> None:
        """A step was formed that makes these moves, after these preemptions."""
        if not moves and not preemptions:
            return
        with self._lock:
            self._num_requests_out += sum(preemption.swapped for preemption in preemptions)
            self._num_blocks_out += sum(move.kind == BlockMove.SWAP_OUT for move in moves)
            self._num_blocks_in += sum(move.kind == BlockMove.SWAP_IN for move in moves)

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
