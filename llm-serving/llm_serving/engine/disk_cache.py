"""The engine's part of the disk cache: reads the prefixes of arriving requests, and stores computed prompts.

A request whose prompt fills a block waits here while the WorkAgent reads the prompt's blocks that only the disk has.
Blocks that it has not read within `WAIT_S` are computed. If the WorkAgent does not reply for `LATE_S`, all waiting
requests enter the scheduler without blocks from disk. Recordings contain the blocks read, as `Request.disk_prefix`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from llm_serving.core.request import FINISHED, DiskPrefix, FinishReason, Request
from llm_serving.core.timings import monotonic
from llm_serving.engine.output_processor import SinkContext
from llm_serving.engine.sinks import SequenceSink, attach_sink
from llm_serving.errors import LLMServingError, WorkerDiedError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.executor import Executor
from llm_serving.kvcache.block_table import BlockTable
from llm_serving.kvcache.transfer_pool import StoredBlocks, TransferBlock, TransferPool
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.step_observer import CompletedStep, StepObserver
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.schedule import Blocked
from llm_serving.transport.messages import AgentMessage, BlocksLoaded, BlocksStored, LoadBlocks, StoreBlocks

logger = get_logger(__name__)

WAIT_S: Final = 10.0
LATE_S: Final = 5.0
READ_BYTES: Final = 2**24
"""Maximum bytes of blocks that the WorkAgent reads for one message, if a block is not larger."""
STORED_BYTES: Final = 2**20
"""Maximum bytes of blocks that one message stores. It is low, because a read may have to wait for a store."""
READ, STORE, END = range(3)
"""Kinds of messages to the WorkAgent. Messages with a lower number are sent first."""


@dataclass(eq=False, slots=True)
class _Lookup:
    request: Request
    add: Callable[[], None]
    hashes: list[bytes]
    table: BlockTable
    """Transfer pool blocks that receive the data. The first is for the first prompt block not in the KV cache."""
    key: str
    link: BlockLink
    deadline: float
    is_waiting: bool = True
    followers: list[_Lookup] = field(default_factory=list)
    """Requests that wait for this one because it reads a prefix of theirs."""


class DiskPrefixSink(SequenceSink):
    def __init__(self, request: Request, context: SinkContext, disk_cache: DiskCache) -> None:
        super().__init__(request, context)
        self.active_requests = ()
        self._disk_cache = disk_cache

    def start(self) -> None:
        self._context.processor.start(self.request)
        self._disk_cache.find(self.request, self._add)

    def set_priority(self, priority: int) -> bool:
        if self.active_requests:
            return super().set_priority(priority)
        self.request.priority = priority
        return True

    def _add(self) -> None:
        self.active_requests = (self.request,)
        self._context.scheduler.add(self.request)
        self._disk_cache.on_added(self.request)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        if self.active_requests:
            super()._finish(reason, stop_reason)
            return
        self.request.status, self.request.finish_reason = FINISHED, reason
        self._disk_cache.cancel(self.request)


@dataclass(eq=False)
class DiskCache(StepObserver):
    """Reads and stores blocks through the WorkAgent, the only process that opens the files. Only the engine's thread
    may call it. If the WorkAgent restarts, waiting requests get no blocks from disk.
    """

    _scheduler: Scheduler
    _executor: Executor
    _reads: TransferPool
    """Blocks that receive data from disk."""
    _metrics: Metrics
    _post: Callable[[Callable[[], None]], None]
    """Makes the engine's thread call a function."""
    on_added: Callable[[Request], None]

    def __post_init__(self) -> None:
        assert self._scheduler.blocks.disk is not None
        self._blocks, self._disk = self._scheduler.blocks, self._scheduler.blocks.disk
        self._lookups: dict[str, _Lookup] = {}
        self._reading: dict[bytes, _Lookup] = {}
        self._storing: set[bytes] = set()
        self._released: deque[list[TransferBlock]] = deque()
        """For each step in flight: blocks of the transfer pool that are free after it."""
        self._is_late = False
        self._numbers = itertools.count()
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        threading.Thread(target=self._run, name="disk-cache", daemon=True).start()

    def attach_sink(self, request: Request, context: SinkContext) -> None:
        """Give a request its output sink. The request enters the scheduler after `find` has read its blocks from disk.

        A beam search enters the scheduler at once. So does a request with an adapter. Its blocks are never on disk,
        because an adapter's 31-bit number is too short to stay unique while the files exist.
        """
        if request.beam_search is not None or request.adapter:
            attach_sink(request, context)
            return
        request.sink = DiskPrefixSink(request, context, self)
        request.sink.start()

    @property
    def num_waiting(self) -> int:
        return len(self._lookups)

    def find(self, request: Request, add: Callable[[], None]) -> None:
        """Read the blocks of the request's prompt that are on disk, then call `add`. A fork is added after its parent.
        If another request already reads the first of these blocks, this request waits until that request is added.
        """
        hashes, link = self._blocks.prompt_hashes(request), self._executor.block_link
        leader = self._lookups.get(request.fork_of or "")
        is_fork = request.fork_of is not None and leader is None
        if is_fork or not hashes or link is None or link.is_closed or self._is_late:
            add()
            return
        start = self._blocks.num_prefix_hit_tokens(request) // self._blocks.block_size
        num_wanted = request.max_prefix_hit_tokens // self._blocks.block_size - start
        if leader is None and num_wanted > 0:
            leader = self._reading.get(hashes[start])
        if leader is not None and leader.is_waiting:
            num_wanted = 0
        stop = start + min(max(0, num_wanted), self._reads.pool.num_free_blocks)
        key = str(next(self._numbers))
        table = self._reads.allocate(key, start, stop, stop * self._blocks.block_size)
        assert table is not None, "the free blocks were counted"
        lookup = _Lookup(request, add, hashes, table, key, link, monotonic() + WAIT_S)
        self._lookups[request.request_id] = lookup
        if leader is not None and leader.is_waiting:
            self._reads.cancel(key)
            pairs = zip(hashes, leader.hashes, strict=False)
            num_common = sum(ours == theirs for ours, theirs in pairs)  # a hash covers all blocks before
            request.disk_prefix = DiskPrefix(num_common)  # the leader reads or stores these blocks
            leader.followers.append(lookup)
            return
        self._reading.update(dict.fromkeys(hashes[start:stop], lookup))
        self._start(READ, partial(self._read, lookup))

    def cancel(self, request: Request) -> None:
        lookup = self._lookups.pop(request.request_id, None)
        if lookup is not None:
            lookup.is_waiting = False
            self._blocks.free(request.request_id)
            self._release(lookup)

    def close(self) -> None:
        self._start(END, None)

    # --- steps ------------------------------------------------------------------------------------------------------

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if schedule is not None:
            self._released.append([])
        if blocks := self._disk.pop_released():
            if self._released:
                self._released[-1] += blocks
            else:
                self._reads.reclaim(blocks)

    def on_completed(self, step: CompletedStep) -> None:
        self._reads.reclaim(self._released.popleft())
        if not step.schedule.stores:
            return
        link = self._executor.block_link
        count = max(1, STORED_BYTES // max(1, 0 if link is None else link.block_bytes))
        for store in step.schedule.stores:
            self._storing.update(store.hashes)
            for start in range(0, len(store.blocks), count):
                part = slice(start, start + count)
                piece = StoredBlocks(store.key, store.hashes[part], store.blocks[part])
                self._start(STORE, partial(self._store, link, piece))

    def on_failed(self, now: float) -> None:
        while self._released:
            self._reads.reclaim(self._released.popleft())

    # --- in the disk cache's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()

    def _read(self, lookup: _Lookup) -> None:
        table, reply = lookup.table, None
        ids, epochs = table.ids[table.start :].tolist(), table.epochs[table.start :].tolist()
        count, num_read, num_damaged = max(1, READ_BYTES // max(1, lookup.link.block_bytes)), 0, 0
        while lookup.is_waiting and monotonic() < lookup.deadline:
            part = slice(num_read, num_read + count)
            request = LoadBlocks(lookup.hashes, table.start + num_read, ids[part], epochs[part])
            answer = self._ask(lookup.link, request)
            if not isinstance(answer, BlocksLoaded):
                reply = None
                break
            num_read += answer.num_read
            num_damaged += answer.num_damaged
            reply = BlocksLoaded(answer.num_stored, num_read, num_damaged, answer.num_bytes)
            if answer.num_read < count or num_read == len(ids):
                break
        self._reply(partial(self._found, lookup, reply))

    def _store(self, link: BlockLink | None, piece: StoredBlocks) -> None:
        reply = None
        if link is not None:
            ids, epochs = [block_id for block_id, _ in piece.blocks], [epoch for _, epoch in piece.blocks]
            reply = self._ask(link, StoreBlocks(piece.hashes, ids, epochs))
        if isinstance(reply, BlocksStored):
            self._metrics.record_disk_stored(reply.num_written, reply.num_evicted, reply.num_bytes)
        self._reply(partial(self._written, piece))

    def _ask(self, link: BlockLink, request: LoadBlocks | StoreBlocks) -> AgentMessage | None:
        try:
            with link.locked(LATE_S):
                return link.use_disk(request, LATE_S, partial(self._reply, self._on_late))
        except WorkerDiedError:  # the engine handles it
            pass
        except LLMServingError as error:
            logger.warning("disk cache: a read or write failed: %s", error)
        except Exception:
            logger.exception("disk cache: a read or write failed")
        return None

    def _reply(self, message: Callable[[], None]) -> None:
        with contextlib.suppress(WorkerDiedError):  # the engine has ended
            self._post(message)

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def _start(self, order: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((order, next(self._numbers), job))

    def _found(self, lookup: _Lookup, reply: BlocksLoaded | None) -> None:
        request, self._is_late = lookup.request, False
        for each in [block_hash for block_hash, reader in self._reading.items() if reader is lookup]:
            del self._reading[each]
        blocks = self._reads.hand_over(lookup.key).blocks
        num_read = 0
        if lookup.link is not self._executor.block_link:  # a former WorkAgent read it, perhaps with other weights
            reply = None
        if reply is not None and lookup.is_waiting and reply.num_read <= len(blocks):
            num_read = reply.num_read
            num_stored, hashes = reply.num_stored, lookup.hashes
            while num_stored < len(hashes) and hashes[num_stored] in self._storing:
                num_stored += 1
            request.disk_prefix = DiskPrefix(min(num_stored, len(hashes)), lookup.table.start, tuple(blocks[:num_read]))
            self._metrics.record_disk_read(len(blocks), num_read, reply.num_damaged, reply.num_bytes)
        self._reads.reclaim(blocks[num_read:])
        self._add(lookup)

    def _written(self, piece: StoredBlocks) -> None:
        self._is_late = False
        self._storing.difference_update(piece.hashes)
        self._scheduler.reclaim_exported_blocks(piece.blocks)

    def _add(self, lookup: _Lookup) -> None:
        if lookup.is_waiting:
            lookup.is_waiting = False
            del self._lookups[lookup.request.request_id]
            lookup.add()
        self._release(lookup)

    def _release(self, lookup: _Lookup) -> None:
        followers, lookup.followers = lookup.followers, []
        for follower in followers:
            self._add(follower)

    def _on_late(self) -> None:
        """Add all waiting requests, without blocks from disk. No further ones wait until the WorkAgent replies."""
        if not self._is_late:
            self._is_late = True
            logger.warning(
                "disk cache: the WorkAgent did not reply within %g s; until it does, prompts are computed and not "
                "read from the disk",
                LATE_S,
            )
        for lookup in list(self._lookups.values()):
            self._add(lookup)
