"""Runs work outside the event loop: `off_loop` in any thread, `FairThreads` in threads that clients share fairly. A
call into a C library, such as msgspec, keeps the GIL until it returns, which stops the event loop too. Therefore the
work in threads consists of short calls, or its amount is limited before it starts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from starlette.responses import Response

INLINE_BYTES: Final = 2**15
"""Maximum size of a body that is decoded on the event loop, which takes at most 4 ms. A thread would cost 0.1 ms."""
INLINE_ITEMS: Final = 2**11
INLINE_TOKENS: Final = 64
"""Maximum number of tokens with logprobs processed on the event loop. Each may have twenty top logprobs."""
ITEMS_AT_ONCE: Final = 2**8

T = TypeVar("T")
_encode: Final = msgspec.json.Encoder().encode


async def off_loop(is_long: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if is_long else work()


class Long(msgspec.Struct):
    """Base of structs with lists that may be long, which `encode_in_parts` encodes in short calls."""


def encode_in_parts(content: Any) -> bytes:
    """Return the same JSON as `msgspec.json.encode`, in many short calls, between which the event loop can run."""
    return b"".join(_parts(content))


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, media_type="application/json")


async def large_json_response(
    content: Long | dict[str, Any] | list[Any], headers: dict[str, str] | None = None
) -> Response:
    body = await asyncio.to_thread(encode_in_parts, content)
    return Response(body, headers=headers, media_type="application/json")


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, Long):
        fields = {name: getattr(content, name) for name in content.__struct_encode_fields__}
        content = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
    if isinstance(content, dict) and any(isinstance(value, dict | list | Long) for value in content.values()):
        opening = b"{"
        for name, value in content.items():
            yield opening + _encode(name) + b":"
            yield from _parts(value)
            opening = b","
        yield b"}"
    elif isinstance(content, list) and content:
        yield from _list_parts(content)
    else:
        yield _encode(content)


def _list_parts(items: list[Any]) -> Iterator[bytes]:
    opening = b"["
    step = 1 if isinstance(items[0], Long) or len(items) == 1 else ITEMS_AT_ONCE
    for start in range(0, len(items), step):
        yield opening
        if step == 1:
            yield from _parts(items[start])
        else:
            yield _encode(items[start : start + step])[1:-1]
        opening = b","
    yield b"]"


_Work = tuple["Future[Any]", Callable[[], Any]]


class FairThreads:
    """Threads that clients share fairly: a free thread takes work of the client with the least thread time. This is
    start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996, section 2), but the cost
    of work is known only after it has run. After a pause, a client counts as having used at least as much as the client
    served last, so a new client waits for the running work and at most one piece of work of each other client.
    """

    def __init__(self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Work]] = {}
        self._used_s: dict[str, float] = {}
        """Client -> thread time used, in seconds, if more than `_served_s`."""
        self._served_s = 0.0
        """Virtual time in seconds. When work starts, it becomes the thread time that the work's client has used before.
        A client that has used less than the virtual time counts as having used that much.
        """

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Queue work of a client. Return the future of its result. Cancelling it removes work that has not started."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            client = min(self._waiting, key=self._used)
            (future, work), queue = self._waiting[client].popleft(), self._waiting[client]
            if not queue:
                del self._waiting[client]
            if not future.set_running_or_notify_cancel():
                return
            self._used_s[client] = self._served_s = self._used(client)
        started = self._clock()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  handed to the waiter
            self._charge(client, self._clock() - started)
            future.set_exception(error)
        else:
            self._charge(client, self._clock() - started)
            future.set_result(result)
        finally:
            del future, work  # the traceback of an error refers to this frame: break the cycle

    def _used(self, client: str) -> float:
        return max(self._used_s.get(client, 0.0), self._served_s)

    def _charge(self, client: str, seconds: float) -> None:
        with self._lock:
            self._used_s[client] = self._used(client) + seconds
            self._used_s = {each: used for each, used in self._used_s.items() if used > self._served_s}
