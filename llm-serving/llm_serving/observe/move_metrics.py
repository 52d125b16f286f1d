"""Requests that went from the replica that computed their prompts to another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

from prometheus_client.core import CounterMetricFamily, Metric

from llm_serving.core.step import BlockMove, Move


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

    def arrived(self, seconds: Sequence[float], moves: Sequence[Move]) -> None:
        """A step is formed with requests that moved, for the first time.

        Args:
            seconds: Of each, since the last reply to a step that computed it where it came from.
            moves: Of the step; those that take its blocks over count.
        """
        with self._lock:
            self._num_requests += len(seconds)
            self._seconds += sum(seconds)
            self._num_blocks += sum(move.kind == BlockMove.IMPORT for move in moves)

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
