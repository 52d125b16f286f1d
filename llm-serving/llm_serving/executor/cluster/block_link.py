"""The master's end of the connection that transfers KV blocks to and from a WorkAgent on another machine."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from llm_serving.errors import DeadlineExceededError, TransportError, WorkerDiedError, WorkerError
from llm_serving.executor.worker_process import AgentChannel
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.transport.messages import (
    AgentMessage,
    BlockContents,
    BlocksRefused,
    BlocksWritten,
    LoadBlocks,
    ReadBlocks,
    StoreBlocks,
)
from llm_serving.transport.shared_memory import (
    MAX_FRAMES_IN_FLIGHT,
    MAX_TOKENS_PER_BLOCK,
    blocks_per_frame,
    max_frame_bytes,
)

_REASON_CHARS = 500

Request = TypeVar("Request", ReadBlocks, BlockContents)


class BlockLink:
    """Reads and writes one WorkAgent's transfer pool: memory for KV blocks on their way to other replicas or the disk
    cache. Only one thread may use a link at a time (`locked`).

    Replies arrive in the order of the requests, each within `timeout_s`. If a reply is late or wrong, the link closes
    itself and the connection for the WorkAgent's steps (`steps`), so that the WorkAgent is restarted.
    """

    def __init__(
        self, channel: AgentChannel, block_bytes: int, timeout_s: float, steps: AgentChannel | None = None
    ) -> None:
        channel.max_frame_bytes = max_frame_bytes(block_bytes)
        channel.send_timeout_s = timeout_s
        self.blocks_per_frame = blocks_per_frame(block_bytes)
        self.block_bytes = block_bytes
        self.max_frames_in_flight = MAX_FRAMES_IN_FLIGHT
        self.timeout_s = timeout_s
        self.is_closed = False
        self._channel = channel
        self._steps = steps
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Return a context that reserves the link for this thread. Raise WorkerError after `timeout_s` seconds."""
        if not self._lock.acquire(timeout=timeout_s):
            raise WorkerError("the WorkAgent's connection for KV blocks is in use by other transfers")
        try:
            yield
        finally:
            self._lock.release()
            if self.is_closed:
                self._release()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        """Yield the contents of the blocks in each list of `pieces`, list by list. Raise WorkerError if that fails."""
        requests = (ReadBlocks([each for each, _ in piece], [epoch for _, epoch in piece]) for piece in pieces)
        with contextlib.closing(self._replies(requests)) as replies:
            for request, reply in replies:
                yield self._checked(request, reply)

    def write(self, frames: Iterable[BlockContents]) -> None:
        with contextlib.closing(self._replies(frames)) as replies:
            for frame, reply in replies:
                names = frame.block_ids, frame.epochs
                if not isinstance(reply, BlocksWritten) or (reply.block_ids, reply.epochs) != names:
                    raise self._invalid_reply(reply)

    def use_disk(
        self, request: LoadBlocks | StoreBlocks, late_after_s: float, on_late: Callable[[], None]
    ) -> AgentMessage:
        """Let the WorkAgent load KV blocks from disk or store them. Return its reply. Raise WorkerError if that fails.

        The wait has no time limit, because the blocks are in use until the WorkAgent replies. `on_late` is called once,
        after `late_after_s` seconds without a reply.
        """
        self._send(request)
        with self._closed_by_errors():
            try:
                reply = self._channel.receive(late_after_s)
            except DeadlineExceededError:
                on_late()
                reply = self._channel.receive()
        if isinstance(reply, BlocksRefused):
            raise WorkerError(reply.error[:_REASON_CHARS])
        return reply

    def close(self) -> None:
        self.is_closed = True
        for channel in (self._channel, self._steps):
            with contextlib.suppress(OSError):
                if channel is not None:
                    channel.shutdown()
        self._release()

    def _replies(self, requests: Iterable[Request]) -> Generator[tuple[Request, AgentMessage], None, None]:
        """Send requests, and yield each with its reply. When the generator ends, no request is in flight."""
        in_flight: deque[Request] = deque()
        try:
            for request in requests:
                reply_to_oldest = self._next_reply(in_flight) if len(in_flight) == self.max_frames_in_flight else None
                self._send(request)
                in_flight.append(request)
                if reply_to_oldest is not None:
                    yield reply_to_oldest
            while in_flight:
                yield self._next_reply(in_flight)
        finally:
            with contextlib.suppress(WorkerDiedError):
                for _ in in_flight:
                    self._receive()

    def _send(self, request: ReadBlocks | BlockContents | LoadBlocks | StoreBlocks) -> None:
        with self._closed_by_errors():
            self._channel.send(request)

    def _next_reply(self, in_flight: deque[Request]) -> tuple[Request, AgentMessage]:
        request, reply = in_flight.popleft(), self._receive()
        if isinstance(reply, BlocksRefused):
            raise WorkerError(reply.error[:_REASON_CHARS])
        return request, reply

    def _receive(self) -> AgentMessage:
        with self._closed_by_errors():
            return self._channel.receive(self.timeout_s)

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        if self.is_closed:
            raise WorkerDiedError("the WorkAgent has exited")
        try:
            yield
        except TransportError as error:
            self.close()
            raise WorkerDiedError(str(error)) from error

    def _checked(self, request: ReadBlocks, reply: AgentMessage) -> BlockContents:
        expected = request.block_ids, request.epochs
        if not isinstance(reply, BlockContents) or (reply.block_ids, reply.epochs) != expected:
            raise self._invalid_reply(reply)
        count = len(request.block_ids)
        if (len(reply.num_written), len(reply.content)) != (count, count * self.block_bytes):
            raise self._invalid_reply(reply)
        if not all(0 < each <= MAX_TOKENS_PER_BLOCK for each in reply.num_written):
            raise self._invalid_reply(reply)
        return reply

    def _invalid_reply(self, reply: AgentMessage) -> WorkerDiedError:
        self.close()
        return WorkerDiedError(f"the WorkAgent sent an invalid reply about blocks: {str(reply)[:100]}")

    def _release(self) -> None:
        if self._lock.acquire(blocking=False):
            self._channel.close()
            self._lock.release()
