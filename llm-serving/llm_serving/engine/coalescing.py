"""Answers that several clients get: computed once, since the same request has the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock, HttpTimings
from llm_serving.engine.request_stream import RequestStream

PIECE_BYTES: Final = 320
"""What a piece takes beside its text and log-probabilities."""
TOKEN_BYTES: Final = 160
"""What the log-probabilities of a token take beside those of likely tokens, of which each takes half."""

PutOff = Callable[[str, float | None], None]


class Sharing(NamedTuple):
    """That an answer may be given to others who ask for the same."""

    key: bytes
    """The same for what has the same answer and may be shared: of one tenant, one class, one salt."""
    keeps: bool = False
    """Whether it is kept when it has been computed."""
    grace_s: float = 0.0
    """Seconds for which it is computed on when its last reader has left."""


@dataclass(eq=False, slots=True)
class _Reader:
    stream: RequestStream
    client_id: str
    http_timings: HttpTimings | None
    began: float
    """Since when its own deadline is counted."""
    deadline: float | None
    """When the answer is of no more use to it; None: never."""
    timer: asyncio.TimerHandle | None = None
    """Ends it then, where the computation may go on for others."""

    def gone(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class CoalescedResponse:
    """The pieces of one answer so far, for all who read it now or later.

    It is computed until the latest deadline of those who have asked for it, and each of them waits until its own.
    """

    def __init__(
        self,
        sharing: Sharing,
        request_id: str,
        abort: Callable[[str], None],
        put_off: PutOff,
        grew: Callable[[CoalescedResponse, int], None],
        clock: Clock,
    ) -> None:
        """
        Args:
            sharing: Its key, and what becomes of it.
            request_id: Of the engine's request that computes it.
            abort: Ends that.
            put_off: Gives that time until a later deadline, or for ever.
            grew: Told the bytes of each piece that came.
            clock: Of the engine.
        """
        self.key = sharing.key
        self.keeps = sharing.keeps
        self.request_id = request_id
        self.num_bytes = 0
        """Of the pieces."""
        self.last: RequestOutput | None = None
        """The newest piece."""
        self.ended_time = 0.0
        self._abort = abort
        self._put_off = put_off
        self._deadline: float | None = None
        """Of the computation: the engine ends it then."""
        self._grew = grew
        self._clock = clock
        self._grace_s = sharing.grace_s
        self._pieces: list[RequestOutput] | None = []
        self._readers: dict[int, _Reader] = {}
        self._num_read = 0
        self._grace: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finished

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def is_overdue(self) -> bool:
        """Whether the time of all who have asked is up: whoever asks now may come too late to give it more."""
        return self._deadline is not None and self._clock() >= self._deadline

    @property
    def is_answer(self) -> bool:
        """Whether it is, or may become, what another one who asks would get too."""
        return self.last is None or not (self.last.failed or self.last.finish_reason is FinishReason.ABORT)

    def read(
        self,
        client_id: str,
        http_timings: HttpTimings | None,
        predicted_s: float | None = None,
        deadline: float | None = None,
    ) -> RequestStream:
        """A stream of all pieces, from the first on; closing it ends the computation if nobody else reads.

        Args:
            client_id: By which its client may cancel it.
            http_timings: Gets the time of its first token.
            predicted_s: Seconds to that, as the door predicted.
            deadline: On the clock of the engine. The first reader's is that of the engine's request too.
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
            self._give(reader, piece)
        if self.finished:
            self._readers.clear()
        elif number == 1:
            self._deadline = deadline
        else:
            self._part_deadlines()
        return stream

    def put(self, piece: RequestOutput) -> None:
        """The next piece has come."""
        self.last = piece
        if piece.finished:
            self.ended_time = self._clock()
            if self._grace is not None:
                self._grace.cancel()
        for reader in self._readers.values():
            self._give(reader, piece)
        if piece.finished:
            for reader in self._readers.values():
                reader.gone()
            self._readers.clear()  # each of them leads back to here: a cycle would wait for a search
        if self._pieces is not None:
            self._pieces.append(piece)
            size = _bytes_of(piece)
            self.num_bytes += size
            self._grew(self, size)

    def cancel(self, client_ids: Sequence[str]) -> bool:
        """Ends it for whoever asked by one of these ids.

        Returns:
            Whether others read on; otherwise nothing is done, and ending the computation ends all.
        """
        mine = [number for number, reader in self._readers.items() if reader.client_id in client_ids]
        if len(mine) == len(self._readers):
            return False
        for number in mine:
            self._cut_off(self._readers.pop(number), FinishReason.ABORT)
        return True

    def drop(self) -> None:
        """Keeps no pieces any more; who reads already reads on."""
        self._pieces = None

    def _give(self, reader: _Reader, piece: RequestOutput) -> None:
        http_timings = reader.http_timings
        if http_timings is not None and http_timings.first_token_time is None and piece.token_ids:
            http_timings.first_token_time = self._clock()
        reader.stream.put(piece)

    def _part_deadlines(self) -> None:
        """Several have asked for it: the engine heeds the latest deadline, and the time of each is up by its own."""
        for number, reader in self._readers.items():
            if reader.deadline is not None and reader.timer is None:
                left_s = max(0.0, reader.deadline - self._clock())
                reader.timer = asyncio.get_running_loop().call_later(left_s, self._end_overdue, number)
        if self._deadline is not None:
            wanted = [reader.deadline for reader in self._readers.values()]
            latest = None if None in wanted else max(each for each in wanted if each is not None)
            if latest is None or latest > self._deadline:
                self._deadline = latest
                self._put_off(self.request_id, latest)

    def _end_overdue(self, number: int) -> None:
        reader = self._readers[number]
        assert reader.deadline is not None
        error = f"the request was not done within its {reader.deadline - reader.began:g} s"
        self._cut_off(reader, FinishReason.TIMEOUT, error)
        self._leave(number)

    def _leave(self, number: int) -> None:
        reader = self._readers.pop(number, None)
        if reader is None:
            return
        reader.gone()
        if self._readers or self.finished:
            return
        if self._grace_s > 0.0 and self._pieces is not None:
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._abort, self.request_id)
        else:
            self._abort(self.request_id)

    def _cut_off(self, reader: _Reader, reason: FinishReason, error: str | None = None) -> None:
        """Ends the answer for one reader; the others read on."""
        last = self.last
        reader.gone()
        reader.stream.put(
            RequestOutput(
                request_id=self.request_id,
                text="",
                token_ids=(),
                logprobs=(),
                num_prompt_tokens=0 if last is None else last.num_prompt_tokens,
                num_cached_tokens=0 if last is None else last.num_cached_tokens,
                num_output_tokens=0 if last is None else last.num_output_tokens,
                finish_reason=reason,
                error=error,
            )
        )


class CoalescedResponses:
    """Those in flight and those that are kept, by their keys, up to a number of bytes. It belongs to the event loop.

    Beyond it those are forgotten that ended longest ago, then the longest of those in flight: whoever reads them reads
    on, and whoever asks for the same later has it computed again.
    """

    def __init__(self, max_bytes: int, kept_s: float, clock: Clock) -> None:
        """
        Args:
            max_bytes: Of the pieces of all; 0: nothing is shared.
            kept_s: Seconds for which an answer is kept after its end.
            clock: Of the engine.
        """
        self._max_bytes = max_bytes
        self._kept_s = kept_s
        self._clock = clock
        self._num_bytes = 0
        self._in_flight: dict[bytes, CoalescedResponse] = {}
        self._kept: dict[bytes, CoalescedResponse] = {}
        """In the order of their ends."""

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._kept)

    @property
    def shares(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_readers(self) -> int:
        """Of those in flight."""
        return sum(answer.num_readers for answer in self._in_flight.values())

    def find(self, key: bytes) -> CoalescedResponse | None:
        """The answer that whoever asks by this key gets; None: it must be computed."""
        self._expire()
        found = self._in_flight.get(key)
        if found is not None and found.is_overdue:
            self.forget(found)
            found = None
        return found or self._kept.get(key)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Whether there is something, and all of it."""
        return bool(keys) and all(self.find(key) is not None for key in keys)

    def open(
        self, sharing: Sharing, request_id: str, abort: Callable[[str], None], put_off: PutOff
    ) -> CoalescedResponse:
        """An answer that is computed from now on by this request of the engine; see `CoalescedResponse`."""
        answer = CoalescedResponse(sharing, request_id, abort, put_off, self._grew, self._clock)
        if (before := self.find(sharing.key)) is not None:
            self.forget(before)
        self._in_flight[sharing.key] = answer
        return answer

    def forget(self, answer: CoalescedResponse) -> None:
        """Gives it to nobody any more."""
        for table in (self._in_flight, self._kept):
            if table.get(answer.key) is answer:
                del table[answer.key]
                self._num_bytes -= answer.num_bytes
        answer.drop()

    def _grew(self, answer: CoalescedResponse, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if answer.finished:
            if answer.keeps and answer.is_answer:
                del self._in_flight[answer.key]
                self._kept[answer.key] = answer
            else:
                self.forget(answer)
        while self._num_bytes > self._max_bytes:
            oldest = next(iter(self._kept.values()), None)
            self.forget(oldest or max(self._in_flight.values(), key=lambda each: each.num_bytes))

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := next(iter(self._kept.values()), None)) and now - oldest.ended_time > self._kept_s:
            self.forget(oldest)


def _bytes_of(piece: RequestOutput) -> int:
    likely = sum(2 + len(token.top_token_ids) for token in piece.logprobs)
    of_prompt = piece.prompt_logprobs
    num_bytes = PIECE_BYTES + 4 * len(piece.text) + TOKEN_BYTES // 2 * likely + sum(map(_bytes_of, piece.beams))
    if of_prompt is not None:
        num_bytes += of_prompt.top_token_ids.nbytes + of_prompt.top_logprobs.nbytes + 12 * len(of_prompt)
    return num_bytes + (0 if piece.vector is None else piece.vector.nbytes)
