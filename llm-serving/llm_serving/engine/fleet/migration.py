"""Migration of requests from the replica that computed their prompts to one that continues them.

`RequestMigration` is the engine's part: it lets requests go and takes them over. `BlockTransferrer` copies KV blocks
from one machine to another in threads of its own, and `TransferThrottle` limits the time of these threads while steps
are in flight.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from llm_serving.core.kv_transfer import Transfer
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.audit import Answer, Auditor
from llm_serving.engine.listener import EngineListener
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
from llm_serving.transport.messages import BlockContents

logger = get_logger(__name__)
MAX_REQUESTS: Final = 64
"""Requests whose blocks may wait for their transfer from one replica."""
MAX_BYTES: Final = 2**30
"""Bytes of their blocks, unless it is one request: what a link of 10 Gbit/s transfers in about a second."""
SHARE: Final = 0.5
"""Share of one core's time that all transfer threads together may use while a step is in flight."""


@dataclass(frozen=True, slots=True)
class TransferredBlocks:
    """That what a request takes along has been brought to another machine."""

    replica: int
    link: BlockLink
    """To the WorkAgent that has it, as long as this is not closed."""


class MigratingRequest(NamedTuple):
    """What an engine lets go of and another one takes, or nobody, if it is not wanted any more."""

    request: Request
    """As it goes on; what the engine knew it by has ended."""
    produced: ProducedOutput
    """Its text so far."""
    audited: Answer | None
    """What its client was told, where that is to be compared."""
    time: float
    """When its last step at that engine was replied to."""
    brought: TransferredBlocks | None = None
    """None: what it takes along is where it was handed over."""

    @property
    def blocks(self) -> list[TransferBlock]:
        """What it takes along."""
        return [] if self.request.transfer is None else self.request.transfer.blocks

    def leave_blocks(self) -> list[TransferBlock]:
        """Has everything computed again; nobody needs these any more."""
        blocks = self.blocks
        if self.request.transfer is not None:
            self.request.transfer = self.request.transfer.without_blocks()
        return blocks


def last_piece(request: Request, reason: FinishReason, error: str) -> RequestOutput:
    """What a client is told where nobody goes on with it."""
    if request.http_timings is not None:
        request.http_timings.unfinished_request_ids.discard(request.request_id)
    return RequestOutput(
        request_id=request.request_id,
        text="",
        token_ids=(),
        logprobs=(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=len(request.output_token_ids),
        finish_reason=reason,
        error=error,
    )


def as_it_goes_on(request: Request, transfer: Transfer) -> Request:
    """Another record of the same request, that no engine has yet."""
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        needs_known_output=request.needs_known_output,
        transfer=transfer,
        constraint=request.constraint,
        arrival_time=request.arrival_time,
        deadline=request.deadline,
        http_timings=request.http_timings,
        output_token_ids=list(request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        first_scheduled_time=request.first_scheduled_time,
    )


class RequestMigration(StepObserver):
    """What one engine has to do with other replicas' requests and blocks; belongs to the engine's thread.

    A request departs when the step that hands its blocks over is replied to, and after all that its client was told
    here. Where it goes on, its blocks are brought in with its first step, and given back when that step is done.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        processor: OutputProcessor,
        auditor: Auditor,
        desk: SinkContext,
        journal: EventLog,
        metrics: Metrics,
        listeners: Sequence[EngineListener],
    ) -> None:
        self._listeners = listeners
        self._scheduler = scheduler
        self._processor = processor
        self._auditor = auditor
        self._desk = desk
        self._journal = journal
        self._metrics = metrics
        self._spent: deque[list[TransferBlock]] = deque()
        """For each step in flight, what nobody needs any more when it is done."""
        self._departing: list[tuple[Request, Transfer, float]] = []
        """Requests that the scheduler has released for migration, with their blocks and the time."""
        self._arrived: dict[Request, float] = {}
        """Requests of other replicas that no step has been formed with, and when these let go of them."""

    def accept(self, departure: MigratingRequest) -> None:
        """Goes on with a request that another replica has begun."""
        request = departure.request
        if departure.brought is not None and departure.brought.link.is_closed:
            self._release(departure.leave_blocks())
        self._auditor.resume(request, departure.audited)
        self._processor.resume(request, departure.produced)
        self._journal.arrived(request, class_of(request.priority, self._scheduler.classes), departure.time)
        sink = request.sink = SequenceSink(request, self._desk)
        sink.resume()
        self._arrived[request] = departure.time

    def on_scheduled(self, schedule: Schedule | None, in_flight: Sequence[Schedule], now: float) -> None:
        if schedule is not None:
            self._spent.append([])
        if spent := self._scheduler.blocks.pop_released_imports():
            self._spend(spent)

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        if not self._arrived:
            return
        seconds = [now - self._arrived.pop(row.request) for row in schedule.rows if row.request in self._arrived]
        if seconds:
            self._metrics.moves.arrived(seconds, schedule.block_moves)
        self._arrived = {request: time for request, time in self._arrived.items() if not request.is_finished}

    def complete_step(self, schedule: Schedule, now: float) -> None:
        """Release the blocks that the oldest step in flight has imported, and the requests whose blocks it exported.

        Call it once the results are applied, and before they are counted.
        """
        if spent := self._spent.popleft():
            self._release(spent)
        for row in schedule.migrating:
            if row.request.is_migrating and not row.request.is_finished:
                self._departing.append((row.request, self._scheduler.migrate_out(row.request), now))

    def hand_over(self) -> None:
        """Give released requests to other replicas; call it when their clients have all output of this replica."""
        if not self._departing:
            return
        departures = []
        for request, transfer, departed_at in self._departing:
            if not self._processor.knows(request):  # it has ended since
                self._scheduler.reclaim_exported_blocks(transfer.blocks)
                continue
            produced, audited = self._processor.leave(request), self._auditor.leave(request.request_id)
            request.sink = None
            self._journal.departed(request, departed_at)
            departures.append(MigratingRequest(as_it_goes_on(request, transfer), produced, audited, departed_at))
        self._departing = []
        if departures:
            for listener in self._listeners:
                listener.on_departures(departures)

    def release_imports(self) -> None:
        """Release all imported blocks, because no step is in flight any more."""
        while self._spent:
            self._release(self._spent.popleft())

    def close(self) -> None:
        """Release all imported blocks, because no further step is scheduled."""
        self._spend(self._scheduler.blocks.pop_released_imports())
        self.release_imports()

    def _spend(self, blocks: list[TransferBlock]) -> None:
        """Nobody needs these blocks any more when the steps in flight are done."""
        if self._spent:
            self._spent[-1] += blocks
        else:
            self._release(blocks)

    def _release(self, blocks: list[TransferBlock]) -> None:
        for listener in self._listeners:
            listener.on_blocks_released(blocks)


class Link(Protocol):
    """As `BlockLink`."""

    blocks_per_frame: int
    block_bytes: int
    timeout_s: float

    def locked(self, timeout_s: float) -> AbstractContextManager[None]: ...

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]: ...

    def write(self, frames: Iterable[BlockContents]) -> None: ...


class BlockTransferrer:
    """Through the master, frame by frame: read from one WorkAgent, written to the other.

    There is a thread for each replica that blocks are read from, which brings one request's after another's. So frames
    on their way are a few for each such replica (`MAX_FRAMES_IN_FLIGHT`), however much is to be moved; and they have
    connections of their own, so none is before a step's. What a thread has before it is bounded too, in requests and
    bytes; and in time, since each request is given up `Link.timeout_s` after it came.

    Args:
        rest: Is called by these threads before each frame, and after each request: gives way to who forms steps.
        clock: For the time that requests may take.
    """

    def __init__(self, rest: Callable[[], None] = lambda: None, clock: Clock = monotonic) -> None:
        self._rest = rest
        self._clock = clock
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._num_requests: Counter[int] = Counter()
        """By replica: whose blocks have not been brought."""
        self._num_bytes: Counter[int] = Counter()
        """Of these blocks."""

    def carry(
        self,
        replica: int,
        blocks: Sequence[TransferBlock],
        source: Link,
        target: Link,
        done: Callable[[bool], None],
    ) -> bool:
        """Begins to bring blocks of a replica to the pool behind `target`, unless there is too much before them, or no
        thread to be had.

        `done` is called in another thread: whether all of them are there.
        """
        num_bytes = len(blocks) * source.block_bytes
        with self._lock:
            count = self._num_requests[replica]
            if count >= MAX_REQUESTS or (count and self._num_bytes[replica] + num_bytes > MAX_BYTES):
                return False
            self._num_requests[replica] += 1
            self._num_bytes[replica] += num_bytes
        deadline = self._clock() + source.timeout_s

        def bring() -> None:
            there = carried(blocks, source, target, deadline, self._clock, self._rest)
            self._done(replica, num_bytes)
            done(there)
            self._rest()

        thread = self._threads.get(replica) or ThreadPoolExecutor(1, f"carrier-{replica}")
        try:
            thread.submit(bring)
        except RuntimeError:  # none can be had now, or it is closed
            self._done(replica, num_bytes)
            return False
        self._threads[replica] = thread
        return True

    def close(self) -> None:
        """Waits for what is under way, which ends when its WorkAgents do."""
        for thread in self._threads.values():
            thread.shutdown()

    def _done(self, replica: int, num_bytes: int) -> None:
        with self._lock:
            self._num_requests[replica] -= 1
            self._num_bytes[replica] -= num_bytes


def carried(
    blocks: Sequence[TransferBlock],
    source: Link,
    target: Link,
    deadline: float,
    clock: Clock = monotonic,
    rest: Callable[[], None] = lambda: None,
) -> bool:
    """Whether all of them are where they shall be. Returns when nothing is under way any more.

    No frame is begun after the deadline; the answer to one that was has its own. Before each it may `rest`.
    """
    try:
        with contextlib.ExitStack() as both:
            for link in sorted((source, target), key=id):  # in one order, so that no two wait for each other
                both.enter_context(link.locked(max(0.0, deadline - clock())))
            pieces = _pieces(blocks, min(source.blocks_per_frame, target.blocks_per_frame))
            with contextlib.closing(source.read(_until(clock, deadline, pieces, rest))) as frames:
                target.write(frames)
    except WorkerError as error:
        logger.warning("what a request takes along is lost on its way, and is computed again: %s", error)
        return False
    except Exception:  # whoever waits for them is told all the same
        logger.exception("blocks were not brought; what they hold is computed again")
        return False
    return True


def _pieces(blocks: Sequence[TransferBlock], count: int) -> Iterator[Sequence[TransferBlock]]:
    for start in range(0, len(blocks), count):
        yield blocks[start : start + count]


def _until(
    clock: Clock, deadline: float, pieces: Iterable[Sequence[TransferBlock]], rest: Callable[[], None]
) -> Iterator[Sequence[TransferBlock]]:
    """Whoever answers each question late, and none too late, does not keep a request waiting for ever."""
    for piece in pieces:
        rest()
        if clock() > deadline:
            raise WorkerError("it takes longer than a step may (serving_config.step_timeout_s)")
        yield piece


class _Computed(threading.local):
    """By a thread, when it rested last."""

    seconds = 0.0


class TransferThrottle:
    """Of threads that bring blocks in pieces: after each they wait as long as all of them together computed, so that
    blocks never take more than `SHARE` of one core from who forms steps. While no step is under way nobody waits.

    Args:
        has_steps: Whether a step is under way anywhere.
        clock: Of the time that goes by.
        own_time: What the calling thread has computed.
        pause: Waits so many seconds.
    """

    def __init__(
        self,
        has_steps: Callable[[], bool],
        clock: Clock = monotonic,
        own_time: Clock = time.thread_time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._has_steps, self._clock, self._own_time, self._pause = has_steps, clock, own_time, pause
        self._lock = threading.Lock()
        self._computed = _Computed()
        self._even_at = 0.0
        """When what was computed so far is `SHARE` of the time since."""

    def rest(self) -> None:
        """To be called between two pieces: waits until what was computed is `SHARE` of the time gone by."""
        computed = self._own_time()
        took_s, self._computed.seconds = computed - self._computed.seconds, computed
        if not self._has_steps():
            return
        with self._lock:
            now = self._clock()
            self._even_at = max(self._even_at, now - took_s) + took_s / SHARE
            wait_s = self._even_at - now
        self._pause(wait_s)
