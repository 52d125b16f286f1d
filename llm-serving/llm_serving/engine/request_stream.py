"""The streams of an answer's outputs to clients. Identical requests may share one answer (request coalescing)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock, HttpTimings

MAX_READ_AT_ONCE: Final = 16
"""Maximum number of outputs that a reader gets in a row before the event loop runs other tasks."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class RequestStream:
    """The outputs of one answer, in order, for at most one reader. If it is closed early, the request is aborted."""

    request_id: str
    _abort: Callable[[str], None]
    predicted_s: float | None = None
    take: Callable[[RequestOutput], bool] | None = field(default=None, init=False)
    """Called with each output but the last while the reader waits. If it returns False, the reader gets it."""
    latest: RequestOutput | None = field(default=None, init=False)
    """The latest output that the response got: from `take`, or from its generator, which sets this attribute."""
    _pieces: deque[RequestOutput] = field(default_factory=deque, init=False)
    _reader: asyncio.Future[None] | None = field(default=None, init=False)
    _on_waiting: Callable[[int], None] | None = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)
    _num_at_once: int = field(default=0, init=False)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        self._num_at_once += 1
        if self._num_at_once > MAX_READ_AT_ONCE:
            self._num_at_once = 1
            await asyncio.sleep(0)
        while not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._num_at_once = 0
        piece = self._pieces.popleft()
        if self._on_waiting is not None:
            self._on_waiting(-piece.num_bytes)
        self._finished = piece.finish_reason is not None
        return piece

    def report_waiting(self, on_waiting: Callable[[int], None] | None) -> None:
        """Call `on_waiting` with each change of the number of unread bytes. None ends the calls."""
        self._on_waiting = on_waiting
        if on_waiting is not None and self._pieces:
            on_waiting(sum(piece.num_bytes for piece in self._pieces))

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._abort(self.request_id)

    def put(self, piece: RequestOutput) -> None:
        reader = self._reader
        if reader is not None and reader.done():
            reader = None
        if reader is not None and self.take is not None and piece.finish_reason is None:
            try:
                if self.take(piece):
                    self.latest = piece
                    return
            except Exception as error:  # noqa: BLE001  raised to the reader
                reader.set_exception(error)
                return
        self._pieces.append(piece)
        if self._on_waiting is not None:
            self._on_waiting(piece.num_bytes)
        if reader is not None:
            reader.set_result(None)


ExtendDeadline = Callable[[str, float | None], None]


class Sharing(NamedTuple):
    key: bytes
    """Key of the answer: equal for identical requests of the same tenant, class and cache salt."""
    keeps: bool = False
    grace_s: float = 0.0
    """Seconds for which the computation continues after the last stream of the answer was closed."""


@dataclass(eq=False, slots=True)
class _Reader:
    stream: RequestStream
    client_id: str
    http_timings: HttpTimings | None
    began: float
    deadline: float | None
    timer: asyncio.TimerHandle | None = None

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class CoalescedResponse:
    """The outputs of one answer so far, which current and later clients with identical requests read.

    Each reader's stream ends at that reader's deadline. The computation ends at the latest of these deadlines, which
    `_extend_deadline` sets in the engine. `_abort` ends it earlier.
    """

    sharing: Sharing
    request_id: str
    _abort: Callable[[str], None]
    _extend_deadline: ExtendDeadline
    _grew: Callable[[CoalescedResponse, int], None]
    """Called with the size in bytes of each new output."""
    _clock: Clock
    num_bytes: int = field(default=0, init=False)
    last: RequestOutput | None = field(default=None, init=False)
    ended_time: float = field(default=0.0, init=False)
    _deadline: float | None = field(default=None, init=False)
    _pieces: list[RequestOutput] | None = field(default_factory=list, init=False)
    _readers: dict[int, _Reader] = field(default_factory=dict, init=False)
    _num_read: int = field(default=0, init=False)
    _grace: asyncio.TimerHandle | None = field(default=None, init=False)

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finished

    @property
    def is_expired(self) -> bool:
        return self._deadline is not None and self._clock() >= self._deadline

    @property
    def is_answer(self) -> bool:
        """Whether other requests may get this answer: it has not failed and was not aborted."""
        return self.last is None or not (self.last.failed or self.last.finish_reason is FinishReason.ABORT)

    def read(
        self,
        client_id: str,
        http_timings: HttpTimings | None,
        predicted_s: float | None = None,
        deadline: float | None = None,
    ) -> RequestStream:
        """Return a stream of all outputs from the first on.

        `client_id`: id by which the client may cancel. `http_timings`: record that gets the time of the first token.
        `predicted_s`: seconds to the first token, as predicted. `deadline`: end of the stream on the engine's clock.
        """
        assert self._pieces is not None
        number = self._num_read = self._num_read + 1
        stream = RequestStream(self.request_id, lambda _: self._leave(number), predicted_s)
        began = self._clock() if http_timings is None else http_timings.received_time
        reader = self._readers[number] = _Reader(stream, client_id, http_timings, began, deadline)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for piece in self._pieces:
            self._send(reader, piece)
        if self.finished:
            self._readers.clear()
        elif number == 1:
            self._deadline = deadline
        else:
            self._apply_deadlines()
        return stream

    def put(self, piece: RequestOutput) -> None:
        self.last = piece
        if piece.finished:
            self.ended_time = self._clock()
            if self._grace is not None:
                self._grace.cancel()
        for reader in self._readers.values():
            self._send(reader, piece)
        if piece.finished:
            for reader in self._readers.values():
                reader.cancel_timer()
            self._readers.clear()  # breaks reference cycles, which would stay in memory until a garbage collection
        if self._pieces is not None:
            self._pieces.append(piece)
            self.num_bytes += piece.num_bytes
            self._grew(self, piece.num_bytes)

    def cancel(self, client_ids: Sequence[str]) -> bool:
        """End the streams with these ids. If no other stream reads the response, end none and return False. The caller
        must then abort the request.
        """
        mine = [number for number, reader in self._readers.items() if reader.client_id in client_ids]
        if len(mine) == len(self._readers):
            return False
        for number in mine:
            self._end_stream(self._readers.pop(number), FinishReason.ABORT)
        return True

    def drop(self) -> None:
        """Discard the recorded outputs and accept no further readers. Current readers still get the whole answer."""
        self._pieces = None

    def _send(self, reader: _Reader, piece: RequestOutput) -> None:
        http_timings = reader.http_timings
        if http_timings is not None and http_timings.first_token_time is None and piece.token_ids:
            http_timings.first_token_time = self._clock()
        reader.stream.put(piece)

    def _apply_deadlines(self) -> None:
        for number, reader in self._readers.items():
            if reader.deadline is not None and reader.timer is None:
                left_s = max(0.0, reader.deadline - self._clock())
                reader.timer = asyncio.get_running_loop().call_later(left_s, self._end_expired, number)
        if self._deadline is not None:
            deadlines = [reader.deadline for reader in self._readers.values()]
            latest = None if None in deadlines else max(each for each in deadlines if each is not None)
            if latest is None or latest > self._deadline:
                self._deadline = latest
                self._extend_deadline(self.request_id, latest)

    def _end_expired(self, number: int) -> None:
        reader = self._readers[number]
        assert reader.deadline is not None
        error = f"the request did not finish within its time limit of {reader.deadline - reader.began:g} s"
        self._end_stream(reader, FinishReason.TIMEOUT, error)
        self._leave(number)

    def _leave(self, number: int) -> None:
        reader = self._readers.pop(number, None)
        if reader is None:
            return
        reader.cancel_timer()
        if self._readers or self.finished:
            return
        if self.sharing.grace_s > 0.0 and self._pieces is not None:
            self._grace = asyncio.get_running_loop().call_later(self.sharing.grace_s, self._abort, self.request_id)
        else:
            self._abort(self.request_id)

    def _end_stream(self, reader: _Reader, reason: FinishReason, error: str | None = None) -> None:
        reader.cancel_timer()
        counts = 0, 0, 0
        if (last := self.last) is not None:
            counts = last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens
        reader.stream.put(RequestOutput(self.request_id, "", (), (), *counts, reason, error=error))


class CoalescedResponses:
    """The answers of a server that identical requests share. Only the event loop may use it.

    An answer is shared while it is computed and, if its requests allow this, for `kept_s` seconds after that. If all
    answers together exceed `max_bytes` (0: share nothing), the oldest finished ones are removed, then the largest
    unfinished ones. Current readers of a removed answer still get the rest of it.
    """

    def __init__(self, max_bytes: int, kept_s: float, clock: Clock) -> None:
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._clock = clock
        self.num_bytes = 0
        self._in_flight: dict[bytes, CoalescedResponse] = {}
        self._kept: dict[bytes, CoalescedResponse] = {}

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._kept)

    def find(self, key: bytes) -> CoalescedResponse | None:
        self._expire()
        found = self._in_flight.get(key)
        if found is not None and found.is_expired:
            self.forget(found)
            found = None
        return found or self._kept.get(key)

    def has(self, keys: Sequence[bytes]) -> bool:
        return bool(keys) and all(self.find(key) is not None for key in keys)

    def open(
        self, sharing: Sharing, request_id: str, abort: Callable[[str], None], extend_deadline: ExtendDeadline
    ) -> CoalescedResponse:
        answer = CoalescedResponse(sharing, request_id, abort, extend_deadline, self._grew, self._clock)
        if (before := self.find(sharing.key)) is not None:
            self.forget(before)
        self._in_flight[sharing.key] = answer
        return answer

    def forget(self, answer: CoalescedResponse) -> None:
        for table in (self._in_flight, self._kept):
            if table.get(answer.sharing.key) is answer:
                del table[answer.sharing.key]
                self.num_bytes -= answer.num_bytes
        answer.drop()

    def clear(self) -> None:
        for answer in [*self._in_flight.values(), *self._kept.values()]:
            self.forget(answer)

    def _grew(self, answer: CoalescedResponse, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if answer.finished:
            if answer.sharing.keeps and answer.is_answer:
                del self._in_flight[answer.sharing.key]
                self._kept[answer.sharing.key] = answer
            else:
                self.forget(answer)
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._kept.values()), None)
            self.forget(oldest or max(self._in_flight.values(), key=lambda each: each.num_bytes))

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := next(iter(self._kept.values()), None)) and now - oldest.ended_time > self._kept_s:
            self.forget(oldest)
