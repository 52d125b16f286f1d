"""Runs batches. Each line becomes a request of the lowest class to the server's own routes, when there is capacity."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

import msgspec

from llm_serving.errors import RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.batches.schemas import Batch, Failure, Line, LineError, LineErrors
from llm_serving.server.batches.store import BatchStore, PendingLine
from llm_serving.server.parsing.body import check_json_limits, malformed, repeated_name
from llm_serving.server.parsing.offload import INLINE_BYTES, off_loop
from llm_serving.server.tenant_quota import TenantQuota

logger = get_logger(__name__)

T = TypeVar("T")

WINDOW_S: Final = 24 * 3600
"""Seconds until a batch expires. Lines without an answer then fail."""
MAX_AT_ONCE: Final = 8
"""Maximum number of a tenant's batches in progress, the oldest first."""
MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 2**24
MAX_ERRORS: Final = 100
SPARE_DEPTH: Final = 64
"""Extra nesting with which a line is checked, so that it can be decoded later where less of the stack is free."""
EXPIRE_EVERY_S: Final = 3600.0
LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 60.0
LEAST_STORE_PAUSE_S: Final = 1.0
"""Seconds before a batch first retries a failed write. Each further pause is twice as long."""
BUSY: Final = frozenset((429, 503))
"""Statuses after which a line is retried until its `timeout_s` has passed."""
_NULL: Final = msgspec.Raw(b"null")
_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_EXPIRED: Final = Failure("batch_expired", "the batch did not complete within its completion window")
_CANCELLED: Final = Failure("batch_cancelled", "the batch was cancelled before this line was answered")


@dataclass(frozen=True)
class Answered:
    status: int
    body: bytes
    retry_after_s: float | None = None
    ignored: str | None = None


Ask = Callable[[str, bytes, str], Awaitable[Answered]]
"""Sends a POST to the server's own routes: (path, body, tenant) -> the response."""


@dataclass(eq=False)
class Batches:
    """Stores files and batches, and sends the lines of batches as requests. Only the event loop may use it."""

    open_store: InitVar[Callable[[], BatchStore]]
    ask: Ask
    concurrency: int
    """Maximum number of requests at a time, and of a batch's lines in progress, including those that wait to retry."""
    priority_class: str
    """Request class of lines that name no class."""
    shares: TenantQuota
    bounds_answers: bool = True
    """Whether lines wait until the store has room for their answers."""
    now: Callable[[], float] = time.time

    def __post_init__(self, open_store: Callable[[], BatchStore]) -> None:
        self._thread = ThreadPoolExecutor(1, "batches")
        self._store = self._thread.submit(open_store).result()
        self._room = asyncio.Semaphore(self.concurrency)
        self._tenants_over_quota: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._num_running: Counter[str] = Counter()
        self._failed: set[str] = set()
        """Batches that stopped after an unexpected error, until they are cancelled or the server restarts."""
        self._starting: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self.num_incoming_bytes: Counter[str] = Counter()
        """Tenant -> bytes received so far of the files that it is uploading."""
        self.trouble: UnavailableError | None = None
        """Why batches wait or have stopped. None if they run."""
        self._expiry_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._expiry_task = asyncio.create_task(self._expire_old())
        for tenant in await self.stored(BatchStore.tenants):
            await self._start_next(tenant)

    async def stop(self) -> None:
        """Abort the lines in progress. They are answered after a restart."""
        self._is_stopped = True
        tasks = [*self._tasks.values(), *self._starting, *filter(None, [self._expiry_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stored(BatchStore.close)
        self._thread.shutdown()

    async def stored(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a method of the store in the store's thread. Raise UnavailableError if the database fails."""
        loop, call = asyncio.get_running_loop(), partial(work, self._store, *arguments)
        try:
            return await loop.run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            await loop.run_in_executor(self._thread, self._store.release_disk_space)
            raise UnavailableError(f"files and batches cannot be stored now: {error}") from None

    async def create(self, batch: Batch, tenant: str) -> None:
        """Add a batch. It starts when the tenant has fewer than `MAX_AT_ONCE` batches in progress."""
        await self.stored(BatchStore.add_batch, batch, tenant, self.now())
        await self._start_next(tenant)

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch and abort its lines in progress. Do nothing if it has ended."""
        tenant = await self.stored(BatchStore.tenant_of, batch_id)
        batch = await self.stored(BatchStore.cancel, batch_id, self.now())
        if batch_id in self._cancelled:
            self._cancelled[batch_id].set()
        elif not batch.has_ended:  # a batch that waits or has stopped is run again, which ends it
            self._run(batch_id, tenant)
        return batch

    def task(self, batch_id: str) -> asyncio.Future[None]:
        if (task := self._tasks.get(batch_id)) is not None:
            return task
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        return ended

    async def _start_next(self, tenant: str) -> None:
        while True:
            try:
                oldest = await self.stored(BatchStore.unfinished, tenant, MAX_AT_ONCE + len(self._failed))
                break
            except UnavailableError as error:
                self.trouble = error
                await asyncio.sleep(LEAST_STORE_PAUSE_S)
        for batch_id in oldest:
            if self._num_running[tenant] < MAX_AT_ONCE and not (batch_id in self._tasks or batch_id in self._failed):
                self._run(batch_id, tenant)

    def _run(self, batch_id: str, tenant: str) -> None:
        self._failed.discard(batch_id)
        self._num_running[tenant] += 1
        self._cancelled[batch_id] = asyncio.Event()
        self._tasks[batch_id] = asyncio.create_task(self._guarded(batch_id, tenant))

    async def _guarded(self, batch_id: str, tenant: str) -> None:
        try:
            await self._compute_with_retries(batch_id, tenant)
        except Exception as error:
            self.trouble = UnavailableError(f"batch {batch_id} has stopped: {error}")
            self._failed.add(batch_id)
            logger.exception("Batch %s stopped; cancel it, or restart the server to continue it", batch_id)
        finally:  # now, so that no other task finds an ended batch in these tables
            del self._tasks[batch_id], self._cancelled[batch_id]
            self._num_running[tenant] -= 1
            if not self._is_stopped:
                next_one = asyncio.create_task(self._start_next(tenant))
                self._starting.add(next_one)
                next_one.add_done_callback(self._starting.discard)

    async def _compute_with_retries(self, batch_id: str, tenant: str) -> None:
        pause_s = LEAST_STORE_PAUSE_S
        while True:
            try:
                return await self._compute(batch_id, tenant)
            except UnavailableError as error:  # stored answers stay; the other lines are computed again
                self.trouble = error
                logger.warning("Batch %s waits for the database: retry_s=%.0f error=%s", batch_id, pause_s, error)
            await self._pause(self._cancelled[batch_id], pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    @staticmethod
    async def _pause(cancelled: asyncio.Event, pause_s: float) -> None:
        if cancelled.is_set():
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(cancelled.wait(), pause_s)

    async def _compute(self, batch_id: str, tenant: str) -> None:
        batch = await self.stored(_start_batch, batch_id, self.now())
        if batch.status == "cancelling":
            self._cancelled[batch_id].set()
        if batch.has_ended:
            return
        batch.status, unanswered = await self._answer_all(batch, tenant)
        now = self.now()
        batch.finalizing_at = int(now)
        setattr(batch, f"{batch.status}_at", int(now))
        if batch.status == "cancelled":
            batch.cancelling_at = batch.cancelling_at or int(now)
        await self.stored(BatchStore.finish, batch, tenant, unanswered, now)

    async def _answer_all(self, batch: Batch, tenant: str) -> tuple[str, Failure | None]:
        """Answer lines until the batch ends. Return its final status, and the error of unanswered lines or None."""
        work = asyncio.create_task(self._answer_lines(batch.id, tenant))
        cancelled = asyncio.create_task(self._cancelled[batch.id].wait())
        try:
            timeout = max(0.0, batch.expires_at - self.now())
            await asyncio.wait([work, cancelled], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "completed", None
            return ("cancelled", _CANCELLED) if cancelled.done() else ("expired", _EXPIRED)
        finally:
            work.cancel()
            cancelled.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _answer_lines(self, batch_id: str, tenant: str) -> None:
        last = -1
        # lines of this batch in progress, including those waiting for a retry
        open_lines = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                while lines := await self.stored(BatchStore.pending, batch_id, last, self.concurrency):
                    for line in lines:
                        await open_lines.acquire()
                        task = group.create_task(self._answer(batch_id, line, tenant))
                        task.add_done_callback(lambda _: open_lines.release())
                        last = line.number
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, batch_id: str, line: PendingLine, tenant: str) -> None:
        pause_s, clock = LEAST_PAUSE_S, asyncio.get_running_loop().time
        until: float | None = None
        while True:
            answered, timeout_s = await self._request(batch_id, line, tenant)
            if answered is not None and answered.status not in BUSY:
                break
            retry_after_s = None if answered is None else answered.retry_after_s
            wait_s = min(max(retry_after_s or 0.0, pause_s), MOST_PAUSE_S)
            if answered is not None:
                until = clock() + timeout_s if until is None else until
                if clock() + wait_s > until:
                    break
            await asyncio.sleep(wait_s)
            pause_s *= 2
        answer = answered.status, answered.body, answered.ignored
        await self.stored(BatchStore.answer, batch_id, line.number, *answer)
        self.trouble = None

    async def _request(self, batch_id: str, line: PendingLine, tenant: str) -> tuple[Answered | None, float]:
        """Send a line. Return the response and the line's `timeout_s`, or (None, inf) if the store is full."""
        async with self._room:
            if not await self._has_room(tenant):
                return None, math.inf
            given = await self.stored(BatchStore.body, batch_id, line.number)
            body, timeout_s = await off_loop(len(given) > INLINE_BYTES, lambda: self._prepared(given))
            return await self.ask(line.url, body, tenant), timeout_s

    async def _has_room(self, tenant: str) -> bool:
        if not self.bounds_answers or await self.stored(BatchStore.has_room, tenant):
            self._tenants_over_quota.discard(tenant)
            return True
        if tenant not in self._tenants_over_quota:
            self._tenants_over_quota.add(tenant)
            logger.warning(
                "Batches of tenant %r wait, because the store has no room: files and batches %s",
                tenant,
                self.shares.rule,
            )
        return False

    def _prepared(self, body: bytes) -> tuple[bytes, float]:
        """Return the body with the request class added, and the value of `timeout_s`. Other values stay raw JSON."""
        content = _decode_fields(body)
        timeout_s = _timeout_s(content.get("timeout_s", _NULL))
        if all(content.get(name, _NULL) == _NULL for name in ("priority", "priority_class")):
            content["priority_class"] = msgspec.Raw(msgspec.json.encode(self.priority_class))
        return msgspec.json.encode(content), timeout_s

    async def _expire_old(self) -> None:
        while True:
            try:
                await self.stored(BatchStore.expire, self.now())
            except UnavailableError as error:
                logger.warning("Failed to delete old files and batches; retrying in an hour: %s", error)
            await asyncio.sleep(EXPIRE_EVERY_S)


def check_lines(pieces: Iterable[bytes], endpoint: str) -> list[LineError]:
    errors: list[LineError] = []
    ids: dict[str, int] = {}
    num_lines = 0
    for number, text in lines_of(pieces):
        num_lines += 1
        if len(text) > MAX_LINE_BYTES or num_lines > MAX_LINES:
            rule = f"a batch has at most {MAX_LINES} lines of {MAX_LINE_BYTES} bytes"
            return [*errors, LineError("too_long", rule, number)]
        fault = _fault_of(text, endpoint, ids, number)
        if fault is not None:
            errors.append(LineError("invalid_line", fault, number))
            if len(errors) == MAX_ERRORS:
                break
    return errors if num_lines else [LineError("empty_file", "the file has no lines", None)]


def _start_batch(store: BatchStore, batch_id: str, now: float) -> Batch:
    """Return the batch. If it is new, check its input. Store its lines if they are valid, else their errors."""
    batch = store.batch(batch_id, None)
    if batch.status != "validating":
        return batch
    errors = check_lines(store.chunks(batch.input_file_id), batch.endpoint)
    if errors:
        batch.status, batch.errors, batch.failed_at = "failed", LineErrors(errors), int(now)
        store.save(batch)
        return batch
    batch.status, batch.in_progress_at = "in_progress", int(now)
    lines = lines_of(store.chunks(batch.input_file_id))
    store.add_lines(batch, (msgspec.json.decode(text, type=Line) for _, text in lines))
    return batch


def _fault_of(text: bytes, endpoint: str, ids: dict[str, int], number: int) -> str | None:
    try:
        check_json_limits(text)
    except RequestError as error:
        return str(error).replace("`body`", "the line")
    try:
        line = msgspec.json.decode(text, type=Line)
        body = msgspec.json.decode(b"[" * SPARE_DEPTH + bytes(line.body) + b"]" * SPARE_DEPTH)
        for _ in range(SPARE_DEPTH):
            [body] = body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"is not a request: {malformed(text, error)}"
    for what in (text, bytes(line.body)) if isinstance(body, dict) else (text,):
        if (repeated := repeated_name(what, _decode_fields(what))) is not None:
            return f"`{repeated}` must be given once"
    if line.url != endpoint:
        return f"`url` must be {endpoint}, the endpoint of the batch"
    if not isinstance(body, dict):
        return "`body` must be an object"
    if body.get("stream") or body.get("background"):
        return "`body` must not set `stream` or `background`"
    if not line.custom_id:
        return "`custom_id` must not be empty"
    if (earlier := ids.setdefault(line.custom_id, number)) != number:
        return f"`custom_id` must be unique, but line {earlier} has the same"
    return None


def lines_of(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, text) of nonblank lines. A line over `MAX_LINE_BYTES` may be yielded incomplete."""
    rest, number = b"", 0
    for piece in chain(pieces, [b"\n"]):
        *whole, rest = (rest + piece).split(b"\n")
        for text in whole if len(rest) <= MAX_LINE_BYTES else [*whole, rest]:
            number += 1
            if text.strip():
                yield number, text


def _timeout_s(given: msgspec.Raw) -> float:
    try:
        seconds = msgspec.json.decode(given, type=float | None)
    except msgspec.DecodeError:
        return math.inf
    return math.inf if seconds is None or seconds <= 0 else seconds
