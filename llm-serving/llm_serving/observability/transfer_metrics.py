"""Metrics of swapped KV blocks, and of requests that migrate between replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from prometheus_client.core import Metric

from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.observability.metric_families import Labels, counter, gauge
from llm_serving.scheduler.schedule import Preemption


class SwapLoad(NamedTuple):
    num_requests: int
    """Number of preempted requests whose blocks are in the host pool."""
    num_used_blocks: int
    num_blocks: int


class SwapMetrics:
    """Metrics of swapped requests and blocks, summed over replicas. Engine threads count; scrapes read the load."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self._loads: dict[int, Callable[[], SwapLoad]] = {}
        self._num_requests_out = self._num_blocks_out = self._num_blocks_in = 0

    def watch(self, replica: int, load: Callable[[], SwapLoad]) -> None:
        self._loads[replica] = load

    def record(self, moves: Sequence[BlockMove], preemptions: Sequence[Preemption]) -> None:
        with self._lock:
            self._num_requests_out += sum(preemption.swapped for preemption in preemptions)
            self._num_blocks_out += sum(move.kind == BlockMoveKind.SWAP_OUT for move in moves)
            self._num_blocks_in += sum(move.kind == BlockMoveKind.SWAP_IN for move in moves)

    def collect(self) -> Iterator[Metric]:
        labels, loads = self._labels, [load() for load in list(self._loads.values())]
        for name, text, value in (
            ("vllm:num_requests_swapped", "Preempted requests that wait in host memory.", "num_requests"),
            ("llm_serving:swap_blocks_used", "Blocks of the host pools in use.", "num_used_blocks"),
            ("llm_serving:swap_blocks", "Blocks of the host pools.", "num_blocks"),
        ):
            yield gauge(name, text, labels, sum(getattr(load, value) for load in loads))
        text = "Preempted requests whose blocks were swapped out."
        yield counter("llm_serving:swapped_out_requests_total", text, labels, self._num_requests_out)
        text = "Blocks swapped out to host memory."
        yield counter("llm_serving:swapped_out_blocks_total", text, labels, self._num_blocks_out)
        text = "Blocks swapped in from host memory."
        yield counter("llm_serving:swapped_in_blocks_total", text, labels, self._num_blocks_in)


class MoveMetrics:
    """Metrics of migrated requests and blocks. The engine that receives a request counts it."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self.block_bytes = 0
        """Bytes of a block over all layers; 0: unknown."""
        self._num_requests = self._num_blocks = 0
        self._seconds = 0.0

    def arrived(self, seconds: Sequence[float], moves: Sequence[BlockMove]) -> None:
        """Count migrated requests in the first step that computes them here.

        Args:
            seconds: For each request, the time since the reply to its last step on the other replica.
            moves: Block moves of the step, of which imports are counted.
        """
        with self._lock:
            self._num_requests += len(seconds)
            self._seconds += sum(seconds)
            self._num_blocks += sum(move.kind == BlockMoveKind.IMPORT for move in moves)

    def collect(self) -> Iterator[Metric]:
        labels = self._labels
        text = "Requests that migrated to another replica than the one that computed their prompt."
        yield counter("llm_serving:moved_requests_total", text, labels, self._num_requests)
        text = "KV blocks of migrated requests."
        yield counter("llm_serving:moved_blocks_total", text, labels, self._num_blocks)
        text = "Bytes of the KV blocks of migrated requests."
        yield counter("llm_serving:moved_bytes_total", text, labels, self._num_blocks * self.block_bytes)
        text = "Sum of the seconds from a request's last step at one replica to its first step at the other."
        yield counter("llm_serving:move_seconds_total", text, labels, self._seconds)


class DiskMetrics:
    """Metrics of blocks read from and written to the disk cache, summed over replicas."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._lock = Lock()
        self.block_bytes = 0
        """Bytes of a block over all layers; 0: unknown."""
        self._num_looked_up = self._num_read = self._num_damaged = self._num_written = self._num_evicted = 0
        self._num_bytes = -1

    def record_read(self, num_looked_up: int, num_read: int, num_damaged: int, num_bytes: int) -> None:
        """Count a lookup in the disk cache.

        Args:
            num_looked_up: Number of full blocks of the prompt that were not in the KV cache.
            num_bytes: Bytes of all files; -1: the folder cannot be used.
        """
        with self._lock:
            self._num_looked_up += num_looked_up
            self._num_read += num_read
            self._num_damaged += num_damaged
            self._num_bytes = num_bytes

    def record_stored(self, num_written: int, num_evicted: int, num_bytes: int) -> None:
        """Count blocks that were written. `num_bytes`: see `record_read`."""
        with self._lock:
            self._num_written += num_written
            self._num_evicted += num_evicted
            self._num_bytes = num_bytes

    def collect(self) -> Iterator[Metric]:
        labels, size = self._labels, self.block_bytes
        for name, text, value in (
            ("queried_blocks", "Blocks of prompts that were not in memory and were looked up", self._num_looked_up),
            ("hit_blocks", "Blocks of prompts that were read", self._num_read),
            ("read_bytes", "Bytes of the blocks that were read", self._num_read * size),
            ("written_blocks", "Blocks that were written", self._num_written),
            ("written_bytes", "Bytes of the blocks that were written", self._num_written * size),
            ("evicted_blocks", "Least recently used blocks that were deleted", self._num_evicted),
            ("damaged_blocks", "Files that were deleted because their checksum did not match", self._num_damaged),
        ):
            yield counter(f"llm_serving:disk_cache_{name}_total", f"Disk cache: {text}.", labels, value)
        text = "Disk cache: size of all files, or -1 if the folder cannot be used."
        yield gauge("llm_serving:disk_cache_bytes", text, labels, self._num_bytes)
