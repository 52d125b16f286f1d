"""Runs batches: each line is one request to the server's own routes, in the lowest class, when there is room."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

import msgspec

from llm_serving.errors import RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.batches.schemas import Batch, Failure, FileObject, Line, LineError, LineErrors
from llm_serving.server.batches.store import BatchStore, PendingLine
from llm_serving.server.parsing.body import check_json_limits, malformed, repeated_name
from llm_serving.server.parsing.offload import INLINE_BYTES, off_loop
from llm_serving.server.tenant_quota import TenantQuota

logger = get_logger(__name__)

T = TypeVar("T")

WINDOW_S: Final = 24 * 3600
"""Seconds that a batch has; lines without an answer then get none."""
KEPT_S: Final = 30 * 24 * 3600
"""Seconds that files and batches are kept."""
MAX_AT_ONCE: Final = 8
"""Batches of a tenant that are looked at and computed, the oldest ones; others wait in the store, where a batch takes
no memory."""
MAX_LINES: Final = 50_000
MAX_LINE_BYTES: Final = 2**24
MAX_ERRORS: Final = 100
"""Most faults of an input that are told."""
SPARE_DEPTH: Final = 64
"""Lines are read again where there may be so many more calls on the stack, which leave less room for lists in lists."""
TIDY_EVERY_S: Final = 3600.0
LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 60.0
"""Seconds before a line that was refused for lack of room is tried again."""
LEAST_STORE_PAUSE_S: Final = 1.0
"""Before a batch goes on whose store could not be written, on a full disk for example; then twice as long each time."""
BUSY: Final = frozenset((429, 503))
"""Statuses of an answer that may be another one later: for a line with a `timeout_s`, within that."""
_NULL: Final = msgspec.Raw(b"null")
_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_EXPIRED: Final = Failure("batch_expired", "the batch was not done within its completion window")
_CANCELLED: Final = Failure("batch_cancelled", "the batch was cancelled before")


@dataclass(frozen=True)
class Answered:
    """What a route answered."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    ignored: str | None = None
    """Names of fields that were ignored."""


class Ask(Protocol):
    """Asks a route of the server on behalf of a tenant."""

    def __call__(self, url: str, body: bytes, tenant: str) -> Awaitable[Answered]: ...


class Batches:
    """Files and batches, and the lines under way. It belongs to the event loop; the store has a thread of its own.

    Args:
        store: Opens it, in its thread.
        ask: Asks a route.
        concurrency: Lines that are asked for at once, of all batches; and lines of each that are under way, those that
            were refused and will be tried again among them.
        priority_class: Of lines that name none.
        shares: Of files that are on their way.
        bounds_answers: Whether lines wait to be asked for until there is room for answers.
        now: Seconds since 1970, as files and batches tell them.
    """

    def __init__(
        self,
        store: Callable[[], BatchStore],
        ask: Ask,
        *,
        concurrency: int,
        priority_class: str,
        shares: TenantQuota,
        bounds_answers: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._thread = ThreadPoolExecutor(1, "batches")
        self._store = self._thread.submit(store).result()
        self._ask = ask
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._priority_class = priority_class
        self.shares = shares
        self._bounds_answers = bounds_answers
        self._tenants_without_room: set[str] = set()
        self.now = now
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._num_at_once: Counter[str] = Counter()
        """Batches of each tenant that are computed."""
        self._still: set[str] = set()
        """Batches that stand still."""
        self._beginning: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self.num_incoming_bytes: Counter[str] = Counter()
        """Of each tenant's files that are on their way."""
        self.trouble: UnavailableError | None = None
        """Why batches wait or stand still, where they do."""
        self._tidier: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Goes on with the batches that had not ended."""
        self._tidier = asyncio.create_task(self._tidy())
        for tenant in await self.stored(BatchStore.tenants):
            await self._begin_next(tenant)

    async def stop(self) -> None:
        """Leaves lines under way as if they had not begun."""
        self._is_stopped = True
        tasks = [*self._tasks.values(), *self._beginning, *filter(None, [self._tidier])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stored(BatchStore.close)
        self._thread.shutdown()

    async def stored(self, work: Callable[..., T], *arguments: Any) -> T:
        """What a method of the store gives.

        Raises:
            UnavailableError: The database cannot be read or written now; nothing of the call has been kept.
        """
        loop, call = asyncio.get_running_loop(), partial(work, self._store, *arguments)
        try:
            return await loop.run_in_executor(self._thread, call)
        except sqlite3.Error as error:
            await loop.run_in_executor(self._thread, self._store.give_back)
            raise UnavailableError(f"files and batches cannot be kept now: {error}") from None

    async def create(self, batch: Batch, tenant: str) -> None:
        """Takes a new batch; it is looked at and computed as soon as there are not too many of its tenant before it."""
        await self.stored(BatchStore.add_batch, batch, tenant, self.now())
        await self._begin_next(tenant)

    async def cancel(self, batch_id: str) -> Batch:
        """Ends a batch: what is under way is broken off. One that has ended is left alone."""
        tenant = await self.stored(BatchStore.tenant_of, batch_id)
        batch = await self.stored(BatchStore.cancel, batch_id, self.now())
        if batch_id in self._cancelled:
            self._cancelled[batch_id].set()
        elif not batch.has_ended:  # it waits or stands still: goes on to end
            self._run(batch_id, tenant)
        return batch

    def task(self, batch_id: str) -> asyncio.Future[None]:
        """Done when nothing is done for a batch any more."""
        if (task := self._tasks.get(batch_id)) is not None:
            return task
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended.set_result(None)
        return ended

    async def _begin_next(self, tenant: str) -> None:
        """Computes the oldest batches of a tenant, as many as may be at once; waits while they cannot be read."""
        while True:
            try:
                oldest = await self.stored(BatchStore.unfinished, tenant, MAX_AT_ONCE + len(self._still))
                break
            except UnavailableError as error:
                self.trouble = error
                await asyncio.sleep(LEAST_STORE_PAUSE_S)
        for batch_id in oldest:
            if self._num_at_once[tenant] < MAX_AT_ONCE and not (batch_id in self._tasks or batch_id in self._still):
                self._run(batch_id, tenant)

    def _run(self, batch_id: str, tenant: str) -> None:
        self._still.discard(batch_id)
        self._num_at_once[tenant] += 1
        self._cancelled[batch_id] = asyncio.Event()
        self._tasks[batch_id] = asyncio.create_task(self._guarded(batch_id, tenant))

    async def _guarded(self, batch_id: str, tenant: str) -> None:
        try:
            await self._persist(batch_id, tenant)
        except Exception as error:
            self.trouble = UnavailableError(f"batch {batch_id} stands still: {error}")
            self._still.add(batch_id)
            logger.exception("batch %s stands still until it is cancelled or the next start", batch_id)
        finally:  # before anybody else can find it done and under way
            del self._tasks[batch_id], self._cancelled[batch_id]
            self._num_at_once[tenant] -= 1
            if not self._is_stopped:
                next_one = asyncio.create_task(self._begin_next(tenant))
                self._beginning.add(next_one)
                next_one.add_done_callback(self._beginning.discard)

    async def _persist(self, batch_id: str, tenant: str) -> None:
        """Computes a batch, with pauses while it cannot be kept."""
        pause_s = LEAST_STORE_PAUSE_S
        while True:
            try:
                return await self._compute(batch_id, tenant)
            except UnavailableError as error:  # what has been kept stays; the rest is answered again
                self.trouble = error
                logger.warning("batch %s goes on in %.0f s: %s", batch_id, pause_s, error)
            await self._pause(self._cancelled[batch_id], pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    @staticmethod
    async def _pause(cancelled: asyncio.Event, pause_s: float) -> None:
        """Ends early when the batch is cancelled meanwhile; one that was cancelled before waits like any other."""
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
        await self.stored(BatchStore.finish, batch, tenant, unanswered, now, int(now) + KEPT_S)

    async def _answer_all(self, batch: Batch, tenant: str) -> tuple[str, Failure | None]:
        """Answers what is left; returns how the batch ends, and what is said of lines without an answer."""
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
        last, under_way = -1, set[asyncio.Task[None]]()
        open_lines = asyncio.Semaphore(self._concurrency)  # of this batch, those that wait to be tried again included
        try:
            while lines := await self.stored(BatchStore.pending, batch_id, last, self._concurrency):
                for line in lines:
                    await open_lines.acquire()
                    task = asyncio.create_task(self._answer(batch_id, line, tenant))
                    under_way.add(task)
                    task.add_done_callback(lambda _: open_lines.release())
                    last = line.number
                failed = [task for task in under_way if task.done() and task.exception() is not None]
                if failed:
                    await failed[0]
                under_way = {task for task in under_way if not task.done()}
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _answer(self, batch_id: str, line: PendingLine, tenant: str) -> None:
        pause_s, clock = LEAST_PAUSE_S, asyncio.get_running_loop().time
        until: float | None = None
        while True:
            answered, own_time_s = await self._asked(batch_id, line, tenant)
            if answered is not None and answered.status not in BUSY:
                break
            wanted = None if answered is None else answered.retry_after_s
            wait_s = min(max(wanted or 0.0, pause_s), MOST_PAUSE_S)
            if answered is not None:
                until = clock() + own_time_s if until is None else until
                if clock() + wait_s > until:
                    break
            await asyncio.sleep(wait_s)
            pause_s *= 2
        told = answered.status, answered.body, answered.ignored
        await self.stored(BatchStore.answer, batch_id, line.number, *told)
        self.trouble = None

    async def _asked(self, batch_id: str, line: PendingLine, tenant: str) -> tuple[Answered | None, float]:
        """The answer, None where none could be kept, and for how many seconds the line wants to be asked for again.

        Whoever has to come again waits elsewhere: a key without tokens holds no place that others could use.
        """
        async with self._room:
            if not await self._has_room(tenant):
                return None, math.inf
            given = await self.stored(BatchStore.body, batch_id, line.number)
            body, own_time_s = await off_loop(len(given) > INLINE_BYTES, lambda: self._prepared(given))
            return await self._ask(line.url, body, tenant), own_time_s

    async def _has_room(self, tenant: str) -> bool:
        """Whether an answer can be kept; what is being answered already is kept in any case."""
        if not self._bounds_answers or await self.stored(BatchStore.has_room, tenant):
            self._tenants_without_room.discard(tenant)
            return True
        if tenant not in self._tenants_without_room:
            self._tenants_without_room.add(tenant)
            logger.warning("batches of %r wait: files and batches %s", tenant, self.shares.rule)
        return False

    def _prepared(self, body: bytes) -> tuple[bytes, float]:
        """A body with its class, and the time that it gives itself. The rest stays as it is, to the last digit and
        however deep."""
        content = _decode_fields(body)
        own_time_s = _own_time_s(content.get("timeout_s", _NULL))
        if all(content.get(name, _NULL) == _NULL for name in ("priority", "priority_class")):
            content["priority_class"] = msgspec.Raw(msgspec.json.encode(self._priority_class))
        return msgspec.json.encode(content), own_time_s

    async def _tidy(self) -> None:
        while True:
            try:
                await self.stored(BatchStore.expire, self.now(), KEPT_S)
            except UnavailableError as error:
                logger.warning("old files and batches stay for now: %s", error)
            await asyncio.sleep(TIDY_EVERY_S)


def check_lines(pieces: Iterable[bytes], endpoint: str) -> list[LineError]:
    """What is wrong with the input of a batch.

    Args:
        pieces: Of the file.
        endpoint: Which all lines have to name.
    """
    errors: list[LineError] = []
    ids: dict[str, int] = {}
    num_lines = 0
    for number, text in _lines_of(pieces):
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


def first_url(pieces: Iterable[bytes]) -> str:
    """The route that the first line names; "" where it names none."""
    try:
        return next((msgspec.json.decode(text, type=Line).url for _, text in _lines_of(pieces)), "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _start_batch(store: BatchStore, batch_id: str, now: float) -> Batch:
    """The batch; of a new one the input is looked at, and its lines are kept or what is wrong with them."""
    batch = store.batch(batch_id, None)
    if batch.status != "validating":
        return batch
    errors = check_lines(store.chunks(batch.input_file_id), batch.endpoint)
    if errors:
        batch.status, batch.errors, batch.failed_at = "failed", LineErrors(errors), int(now)
        store.save(batch)
        return batch
    batch.status, batch.in_progress_at = "in_progress", int(now)
    lines = _lines_of(store.chunks(batch.input_file_id))
    store.add_lines(batch, (msgspec.json.decode(text, type=Line) for _, text in lines))
    return batch


def _fault_of(text: bytes, endpoint: str, ids: dict[str, int], number: int) -> str | None:
    """What is wrong with a line; its id is added to those that were seen, with its number."""
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
        return "`body` must ask neither for a stream nor for an answer in the background"
    if not line.custom_id:
        return "`custom_id` must not be empty"
    if (earlier := ids.setdefault(line.custom_id, number)) != number:
        return f"`custom_id` must be a text of its own, which line {earlier} has as well"
    return None


def _lines_of(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1 on, text) of the lines that have one; the rest of one that is too long comes as it is."""
    rest, number = b"", 0
    for piece in chain(pieces, [b"\n"]):
        *whole, rest = (rest + piece).split(b"\n")
        for text in whole if len(rest) <= MAX_LINE_BYTES else [*whole, rest]:
            number += 1
            if text.strip():
                yield number, text


def _own_time_s(given: msgspec.Raw) -> float:
    """The seconds of a `timeout_s`; without end where there is none, or a wrong one."""
    try:
        seconds = msgspec.json.decode(given, type=float | None)
    except msgspec.DecodeError:
        return math.inf
    return math.inf if seconds is None or seconds <= 0 else seconds


def new_file(file_id: str, filename: str, purpose: str, now: float) -> FileObject:
    """What is told of a file that has just come."""
    created = int(now)
    return FileObject(
        id=file_id, bytes=0, created_at=created, expires_at=created + KEPT_S, filename=filename, purpose=purpose
    )
