"""Responses, which each protocol builds from the outputs of a generation, as a stream or as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.generation.events import BLANK, DONE, EVENT_STREAM, STREAM_HEADERS
from llm_serving.server.generation.generation import (
    ClientGoneError,
    Generation,
    raise_unless_complete,
    run_until_client_leaves,
)
from llm_serving.server.generation.pipeline import StartedGeneration
from llm_serving.server.http.request import REQUEST_KEY, HttpRequest
from llm_serving.server.idempotency.request import BEGINNING, END, Position
from llm_serving.server.parsing.errors import internal_error
from llm_serving.server.parsing.offload import INLINE_BYTES, INLINE_TOKENS
from llm_serving.server.request_context import source_of

logger = get_logger(__name__)

KEY: Final = "serving_config.max_buffered_response_bytes"
OUTPUT_BYTES, LOGPROB_BYTES = 128, 256
"""Estimated bytes of an output without its text, and of a logprob with its token."""
RETRY_AFTER_S: Final = 1.0

T = TypeVar("T")


class ResponseBuilder(ABC):
    """Builds a response. If it is streamed, `encode_delta` returns its next bytes. Otherwise `fold` adds an output."""

    media_type = EVENT_STREAM

    def check(self, output: RequestOutput) -> None:
        """Raise LLMServingError if the protocol cannot express the finish reason of a choice's final output."""
        raise_unless_complete(output)

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        if output.finish_reason is not None:
            self.check(output)
        return self.encode_delta(index, output)

    @abstractmethod
    def encode_delta(self, index: int, output: RequestOutput) -> bytes: ...

    @abstractmethod
    def fold(self, index: int, output: RequestOutput) -> None: ...

    async def finish(self) -> bytes:
        return b""

    @abstractmethod
    def error_chunk(self, error: LLMServingError) -> bytes:
        """Return the last bytes of a stream that fails after its status was sent."""

    async def collect(self, generation: Generation) -> None:
        """Add all outputs to the whole response. Long outputs are added in a thread."""
        async for index, output in generation.outputs():
            if output.finish_reason is not None:
                self.check(output)
            if len(output.text) > INLINE_BYTES or len(output.logprobs) > INLINE_TOKENS:
                await asyncio.to_thread(self.fold, index, output)
            else:
                self.fold(index, output)

    @abstractmethod
    async def response(self, headers: dict[str, str]) -> Response: ...


class NumberedPieces:
    """Adds an id to each server-sent event. Omits the events up to `position`, which the client has already read."""

    def __init__(self, pieces: ResponseBuilder, stream_id: str, num_choices: int, position: Position) -> None:
        assert len(position.num_read) in (0, num_choices)
        self._pieces = pieces
        self._prefix = f"id: {stream_id}:"
        self._num_read = list(position.num_read or (0,) * num_choices)
        self._position = position
        self._num_made = [0] * num_choices
        self._num_sent = self._num_read.copy()

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        events = self._pieces.chunk(index, output)
        if not events:
            return events
        numbered = []
        for event in events.split(BLANK)[:-1]:
            self._num_made[index] += 1
            if self._num_made[index] > self._num_read[index]:
                self._num_sent[index] = self._num_made[index]
                numbered.append(self._with_id(event, ""))
        return b"".join(numbered)

    async def finish(self) -> bytes:
        """Return the closing events. Raise RequestError if the position is after the last event of the stream."""
        events = (await self._pieces.finish()).split(BLANK)[:-1]
        numbered = []
        for number, event in enumerate(events, start=1):
            if number > self._position.num_closing:
                is_last = event + BLANK == DONE
                numbered.append(self._with_id(event, f"+{END}" if is_last else f"+{number}"))
        if not numbered or any(made < read for made, read in zip(self._num_made, self._num_read, strict=True)):
            raise self._position.error("must not be after the last event of the stream")
        return b"".join(numbered)

    def _with_id(self, event: bytes, closing: str) -> bytes:
        counts = ".".join(map(str, self._num_sent))
        return f"{self._prefix}{counts}{closing}\n".encode() + event + BLANK


class StreamResponse(Response):
    """Sends each output as it arrives, and closes the generation at the end or when the client disconnects. If the
    generation fails after the status was sent, the builder's `error_chunk` formats the error as last chunk. The status
    of a resumed stream is sent with the first unread event, so a position after the last event is refused with 400.
    """

    def __init__(self, started: StartedGeneration, builder: ResponseBuilder) -> None:
        self._generation, idempotent = started.generation, started.idempotent
        self._builder = builder
        self._chunks: ResponseBuilder | NumberedPieces = builder
        self._is_resumed = idempotent is not None and idempotent.position != BEGINNING
        headers = STREAM_HEADERS | self._generation.headers | started.identity.headers
        if idempotent is not None:
            headers |= idempotent.headers
            if idempotent.stream_id:
                num_choices = len(self._generation.streams)
                self._chunks = NumberedPieces(builder, idempotent.stream_id, num_choices, idempotent.position)
        self.status_code, self.media_type, self.background = 200, builder.media_type, None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_request: HttpRequest | None = scope.get(REQUEST_KEY)
        if http_request is not None:
            self._generation.report_unread_bytes(http_request.add_unsent)
            self._generation.set_fast_path(http_request.chunk_writer(self._chunks.chunk, 0))
        try:
            with contextlib.suppress(ClientGoneError):
                await run_until_client_leaves(receive, self._send_all(send))
        finally:
            # Both refer to objects that refer to the generation: break the cycle.
            self._generation.report_unread_bytes(None)
            self._generation.set_fast_path(None)
            await self._generation.aclose()

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if is_started := not self._is_resumed:
            await send(start)
        to_bytes, last = self._chunks.chunk, b""
        num_left = len(self._generation.streams)
        try:
            async for index, output in self._generation.outputs():
                chunk = to_bytes(index, output)
                num_left -= output.finished
                if num_left == 0:
                    last = chunk  # each write wakes the client: send the last chunk together with the end
                elif chunk:
                    if not is_started:
                        await send(start)
                        is_started = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last += await self._chunks.finish()
        except LLMServingError as error:
            if not is_started:
                raise
            last += self._builder.error_chunk(error)
        except Exception:
            logger.exception(
                "The response stream failed; the client gets an internal error. request_id=%s",
                self._generation.streams[0].request_id,
            )
            last += self._builder.error_chunk(internal_error())
        if not is_started:
            await send(start)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def respond(
    http_request: Request, started: StartedGeneration, builder: ResponseBuilder, *, stream: bool
) -> Response:
    """Return a stream, or a whole response when it is complete. Raise ClientGoneError if the client disconnects."""
    if stream:
        return StreamResponse(started, builder)
    generation, idempotent = started.generation, started.idempotent
    await complete_whole(http_request, generation, builder.collect(generation))
    headers = started.identity.headers | generation.headers
    return await builder.response(headers if idempotent is None else headers | idempotent.headers)


@dataclass(eq=False, slots=True)
class BufferedResponse:
    source: str
    cancel: Callable[[], None]
    failure: LLMServingError | None = None
    num_bytes: int = 0


class ResponseBuffers:
    """The memory of unfinished responses that are not streamed, at most `max_bytes`. Only the event loop may use it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._responses: set[BufferedResponse] = set()
        self._bytes_by_source: Counter[str] = Counter()
        self.num_bytes = 0

    def open(self, source: str, cancel: Callable[[], None]) -> BufferedResponse:
        response = BufferedResponse(source, cancel)
        self._responses.add(response)
        return response

    def release(self, response: BufferedResponse) -> None:
        """Stop counting the memory of a response. A second call has no effect."""
        if response in self._responses:
            self._responses.remove(response)
            self.num_bytes -= response.num_bytes
            self._bytes_by_source[response.source] -= response.num_bytes
            if not self._bytes_by_source[response.source]:
                del self._bytes_by_source[response.source]

    def add(self, response: BufferedResponse, output: RequestOutput) -> None:
        """Count the memory of an output. Raise LLMServingError if the response has been evicted, now or earlier."""
        self.grow(response, buffered_bytes(output))
        if response.failure is not None:
            raise response.failure

    def grow(self, response: BufferedResponse, num_bytes: int) -> None:
        """Add to a response's memory. Above `max_bytes`, evict the largest response of the client that uses most."""
        if response not in self._responses:
            return
        response.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._bytes_by_source[response.source] += num_bytes
        while self.num_bytes > self.max_bytes:
            [(source, _)] = self._bytes_by_source.most_common(1)
            own = [each for each in self._responses if each.source == source]
            self._evict(max(own, key=lambda each: each.num_bytes))

    def _evict(self, largest: BufferedResponse) -> None:
        self.release(largest)
        if largest.num_bytes > self.max_bytes:
            rule = f"must ask for an answer that takes at most {self.max_bytes} bytes of memory ({KEY})"
            largest.failure = RequestError("body", f"{rule}, or for a stream")
        else:
            held = f"all answers that are not streamed take more than {self.max_bytes} bytes together ({KEY})"
            largest.failure = UnavailableError(held, RETRY_AFTER_S)
        largest.cancel()


def buffered_bytes(output: RequestOutput) -> int:
    size = OUTPUT_BYTES + len(output.text)
    if output.beams:
        size += sum(map(buffered_bytes, output.beams))
    if output.logprobs:
        size += LOGPROB_BYTES * sum(1 + len(token.top_token_ids) for token in output.logprobs)
    if (of_prompt := output.prompt_logprobs) is not None:
        size += LOGPROB_BYTES * (len(of_prompt) + of_prompt.top_token_ids.size)
    return size if output.vector is None else size + output.vector.nbytes


async def buffered(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which builds a response, and count the response's memory. Raise RequestError if this response alone
    exceeds the limit. Raise UnavailableError if it was evicted because all responses together exceed the limit.
    """
    buffers: ResponseBuffers = http_request.app.response_buffers
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if asyncio.current_task() is not task:
            task.cancel()

    response = buffers.open(source_of(http_request), cancel)
    generation.on_read = partial(buffers.add, response)
    try:
        result = await work
        if response.failure is not None:
            await asyncio.sleep(0)  # the eviction's cancellation takes effect here, if not before
        return result
    except asyncio.CancelledError:
        if response.failure is not None and task.uncancel() == 0:
            raise response.failure from None
        raise
    finally:
        response.failure = None  # break the cycle: the error's traceback refers to this frame
        generation.on_read = None
        buffers.release(response)


async def complete_whole(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """Run `buffered`, then close the generation. Raise ClientGoneError if the client disconnects first."""
    try:
        return await run_until_client_leaves(http_request.receive, buffered(http_request, generation, work))
    finally:
        await generation.aclose()
