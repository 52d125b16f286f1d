"""Migration of requests: a decode replica gets the KV blocks of a prefill replica's request, and continues it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason, Request, Transfer
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.audit import Answer, Auditor
from llm_serving.engine.observers import EngineListener
from llm_serving.engine.output_processor import OutputProcessor, ProducedOutput
from llm_serving.engine.sinks import SequenceSink, SinkContext
from llm_serving.errors import WorkerError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.step_observer import StepObserver
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.schedule import Blocked

logger = get_logger(__name__)
MAX_REQUESTS: Final = 64
"""Maximum number of requests of one replica that wait for the transfer of their blocks."""
MAX_BYTES: Final = 2**30
"""Maximum bytes of a replica's blocks that wait for transfer: 1 s at 10 Gbit/s. One request alone may have more."""
CPU_SHARE: Final = 0.5
"""Maximum fraction of one core that all transfer threads together use while a step is in flight."""


@dataclass(frozen=True, slots=True)
class TransferredBlocks:
    """A copy of a migrating request's blocks in the memory of `replica`. The copy is lost if `link` closes."""

    replica: int
    link: BlockLink


class MigratingRequest(NamedTuple):
    """A request on its way between engines. `request` is a new object, which the next engine adds to its scheduler."""

    request: Request
    produced: ProducedOutput
    audited: Answer | None
    exported_at: float
    """Time, on the engine's clock, of the reply to the step that exported the blocks."""
    transferred: TransferredBlocks | None = None

    @property
    def blocks(self) -> list[TransferBlock]:
        """KV blocks that the next replica fetches from the transfer pool. Without any, it recomputes the KV cache."""
        return [] if self.request.transfer is None else self.request.transfer.blocks

    def drop_blocks(self) -> list[TransferBlock]:
        """Remove and return the blocks; the caller must free them. The next engine then recomputes the KV cache."""
        blocks = self.blocks
        if self.request.transfer is not None:
            self.request.transfer = self.request.transfer.without_blocks()
        return blocks


def failure_output(request: Request, reason: FinishReason, error: str) -> RequestOutput:
    if request.http_timings is not None:
        request.http_timings.unfinished_request_ids.discard(request.request_id)
    counts = request.num_prompt_tokens, request.num_cached_tokens, len(request.output_token_ids)
    return RequestOutput(request.request_id, "", (), (), *counts, reason, error=error)


def continuation_of(request: Request, transfer: Transfer) -> Request:
    return Request.derived(
        request,
        priority=request.priority,
        needs_known_output=request.needs_known_output,
        transfer=transfer,
        deadline=request.deadline,
        http_timings=request.http_timings,
        output_token_ids=list(request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        first_scheduled_time=request.first_scheduled_time,
    )


@dataclass(eq=False)
class RequestMigration(StepObserver):
    """Sends requests of one engine to other engines, and accepts theirs. Only the engine's thread may call it.

    A step copies the request's KV blocks to the transfer pool, which other replicas read. After the reply to that step,
    the engine publishes all output of the request, then hands the request over. The accepting engine copies the blocks
    into its KV cache in its first step of the request. After that step, the pool's blocks are freed.
    """

    _scheduler: Scheduler
    _processor: OutputProcessor
    _auditor: Auditor
    _sink_context: SinkContext
    _event_log: EventLog
    _metrics: Metrics
    _listeners: Sequence[EngineListener]
    _imported: deque[list[TransferBlock]] = field(default_factory=deque, init=False)
    """For each step in flight: transfer pool blocks that can be freed after the step."""
    _exported: list[tuple[Request, Transfer, float]] = field(default_factory=list, init=False)
    """Requests that left the scheduler: (request, its exported blocks, time on the engine's clock)."""
    accepted: dict[Request, float] = field(default_factory=dict, init=False)
    """Migrated requests without a submitted step on this engine, and the times of their exports."""

    def accept(self, migrating: MigratingRequest) -> None:
        request = migrating.request
        if migrating.transferred is not None and migrating.transferred.link.is_closed:
            self._reclaim(migrating.drop_blocks())
        self._auditor.resume(request, migrating.audited)
        self._processor.resume(request, migrating.produced)
        self._event_log.arrived(request, class_of(request.priority, self._scheduler.classes), migrating.exported_at)
        sink = request.sink = SequenceSink(request, self._sink_context)
        sink.resume()
        self.accepted[request] = migrating.exported_at

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if schedule is not None:
            self._imported.append([])
        if blocks := self._scheduler.blocks.pop_released_imports():
            self._reclaim_after_steps(blocks)

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        if not self.accepted:
            return
        seconds = [now - self.accepted.pop(row.request) for row in schedule.rows if row.request in self.accepted]
        if seconds:
            self._metrics.record_migrated(seconds, schedule.block_moves)
        self.accepted = {request: time for request, time in self.accepted.items() if not request.is_finished}

    def complete_step(self, schedule: Schedule, now: float) -> None:
        """Free the transfer pool's blocks that the step copied into the KV cache. Remove requests from the scheduler
        whose KV blocks the step copied to the transfer pool.
        """
        if blocks := self._imported.popleft():
            self._reclaim(blocks)
        for row in schedule.migrating:
            if row.request.is_migrating and not row.request.is_finished:
                self._exported.append((row.request, self._scheduler.migrate_out(row.request), now))

    def hand_over(self) -> None:
        """Pass the requests that `complete_step` removed to the listeners. Their output must be published before."""
        if not self._exported:
            return
        migrating = []
        for request, transfer, exported_at in self._exported:
            if not self._processor.knows(request):  # it has ended since
                self._scheduler.reclaim_exported_blocks(transfer.blocks)
                continue
            produced, audited = self._processor.leave(request), self._auditor.watched.pop(request.request_id, None)
            request.sink = None
            self._event_log.departed(request, exported_at)
            migrating.append(MigratingRequest(continuation_of(request, transfer), produced, audited, exported_at))
        self._exported = []
        if migrating:
            for listener in self._listeners:
                listener.on_migrating(migrating)

    def release_imports(self) -> None:
        while self._imported:
            self._reclaim(self._imported.popleft())

    def close(self) -> None:
        """Reclaim all blocks that migrations hold, because no step will follow."""
        self._reclaim_after_steps(self._scheduler.blocks.pop_released_imports())
        self.release_imports()

    def _reclaim_after_steps(self, blocks: list[TransferBlock]) -> None:
        if self._imported:
            self._imported[-1] += blocks
        else:
            self._reclaim(blocks)

    def _reclaim(self, blocks: list[TransferBlock]) -> None:
        for listener in self._listeners:
            listener.on_blocks_released(blocks)


class BlockTransferrer:
    """Transfers blocks between WorkAgents through the master.

    Each source replica has a thread, which transfers one request after the other, in frames, on connections that carry
    no steps. Its queue is limited in requests and bytes. A request's blocks must arrive within `BlockLink.timeout_s`.
    """

    def __init__(self, throttle: Callable[[], None] = lambda: None, clock: Clock = monotonic) -> None:
        self._throttle = throttle
        self._clock = clock
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._num_requests: Counter[int] = Counter()
        self._num_bytes: Counter[int] = Counter()

    def start(
        self,
        replica: int,
        blocks: Sequence[TransferBlock],
        source: BlockLink,
        target: BlockLink,
        done: Callable[[bool], None],
    ) -> bool:
        """Start to transfer blocks, then call `done(all_arrived)`. Return False if too many transfers wait."""
        num_bytes = len(blocks) * source.block_bytes
        with self._lock:
            count = self._num_requests[replica]
            if count >= MAX_REQUESTS or (count and self._num_bytes[replica] + num_bytes > MAX_BYTES):
                return False
            self._num_requests[replica] += 1
            self._num_bytes[replica] += num_bytes
        deadline = self._clock() + source.timeout_s

        def run() -> None:
            succeeded = transfer_blocks(blocks, source, target, deadline, self._clock, self._throttle)
            self._remove(replica, num_bytes)
            done(succeeded)
            self._throttle()

        thread = self._threads.get(replica) or ThreadPoolExecutor(1, f"carrier-{replica}")
        try:
            thread.submit(run)
        except RuntimeError:  # the system has no further thread, or the executor is shut down
            self._remove(replica, num_bytes)
            return False
        self._threads[replica] = thread
        return True

    def close(self) -> None:
        """Wait for the transfers in progress. Stop the WorkAgents first, so that these transfers fail."""
        for thread in self._threads.values():
            thread.shutdown()

    def _remove(self, replica: int, num_bytes: int) -> None:
        with self._lock:
            self._num_requests[replica] -= 1
            self._num_bytes[replica] -= num_bytes


def transfer_blocks(
    blocks: Sequence[TransferBlock],
    source: BlockLink,
    target: BlockLink,
    deadline: float,
    clock: Clock = monotonic,
    throttle: Callable[[], None] = lambda: None,
) -> bool:
    """Transfer blocks in pieces, each after a call of `throttle`. Return whether all arrived before the deadline. No
    frame is in flight on return.
    """
    num_at_once = min(source.blocks_per_frame, target.blocks_per_frame)

    def pieces() -> Iterator[Sequence[TransferBlock]]:
        for start in range(0, len(blocks), num_at_once):
            throttle()
            if clock() > deadline:
                raise WorkerError("the transfer of KV blocks took longer than serving_config.step_timeout_s")
            yield blocks[start : start + num_at_once]

    try:
        with contextlib.ExitStack() as both:
            for link in sorted((source, target), key=id):  # one order for all threads, so no two block each other
                both.enter_context(link.locked(max(0.0, deadline - clock())))
            with contextlib.closing(source.read(pieces())) as frames:
                target.write(frames)
    except WorkerError as error:
        logger.warning("KV blocks of a request were not transferred and are recomputed: %s", error)
        return False
    except Exception:  # the caller gets a result in any case
        logger.exception("KV blocks of a request were not transferred and are recomputed")
        return False
    return True


class _CpuTime(threading.local):
    seconds = 0.0


@dataclass(eq=False, slots=True)
class TransferThrottle:
    """Limits all transfer threads together to `CPU_SHARE` of one core while any engine has a step in flight."""

    _has_steps: Callable[[], bool]
    _clock: Clock = monotonic
    _cpu_time: Clock = time.thread_time
    _sleep: Callable[[float], object] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _last: _CpuTime = field(default_factory=_CpuTime, init=False)
    _balanced_at: float = field(default=0.0, init=False)
    """Time until which transfer threads sleep, so that their CPU time is `CPU_SHARE` of the elapsed time."""

    def wait(self) -> None:
        """Sleep until the transfer threads have used at most `CPU_SHARE` of a core. Call this after each piece."""
        cpu_time = self._cpu_time()
        used_s, self._last.seconds = cpu_time - self._last.seconds, cpu_time
        if not self._has_steps():
            return
        with self._lock:
            now = self._clock()
            self._balanced_at = max(self._balanced_at, now - used_s) + used_s / CPU_SHARE
            wait_s = self._balanced_at - now
        self._sleep(wait_s)
