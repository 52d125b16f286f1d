"""The master's end of the connection by which blocks of a WorkAgent on another machine come and go."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from llm_serving.errors import TransportError, WorkerDiedError, WorkerError
from llm_serving.executor.worker_process import AgentChannel
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.transport.messages import AgentMessage, Blocks, BlocksRefused, BlocksTaken, SendBlocks
from llm_serving.transport.shared_memory import FRAMES_UNDER_WAY, MAX_TOKENS, blocks_a_frame, max_frame_bytes

_REASON_CHARS = 500

Question = TypeVar("Question", SendBlocks, Blocks)


class BlockLink:
    """To the transfer pool of one start of a WorkAgent, for one thread at a time.

    A few questions are under way at once and are answered in their order. Each answer has a deadline. What did not come
    in time, or was not what had been asked for, ends the connection, so that no late answer is ever taken for another
    one; and the WorkAgent with it, in whose place another one is started.

    Args:
        channel: To it; the link owns it.
        block_bytes: Of a block, all layers.
        timeout_s: Seconds that an answer may take.
        steps: The connection of its steps, which ends with this one.
    """

    def __init__(
        self, channel: AgentChannel, block_bytes: int, timeout_s: float, steps: AgentChannel | None = None
    ) -> None:
        channel.max_frame_bytes = max_frame_bytes(block_bytes)
        channel.send_timeout_s = timeout_s
        self.blocks_a_frame = blocks_a_frame(block_bytes)
        self.block_bytes = block_bytes
        self.frames_under_way = FRAMES_UNDER_WAY
        self.timeout_s = timeout_s
        self.is_closed = False
        """What it held is nobody's any more."""
        self._channel = channel
        self._steps = steps
        self._holder = threading.Lock()

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Whoever reads or writes has it to himself.

        Raises:
            WorkerError: Others have it for so long.
        """
        if not self._holder.acquire(timeout=timeout_s):
            raise WorkerError("its turn does not come in time")
        try:
            yield
        finally:
            self._holder.release()
            if self.is_closed:
                self._release()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[Blocks, None, None]:
        """What blocks hold, a frame for each piece of `blocks_a_frame` at most. To be closed if it is not exhausted.

        Raises:
            WorkerError: It cannot be had.
        """
        questions = (SendBlocks([each for each, _ in piece], [epoch for _, epoch in piece]) for piece in pieces)
        with contextlib.closing(self._answered(questions)) as answers:
            for asked, reply in answers:
                yield self._checked(asked, reply)

    def write(self, frames: Iterable[Blocks]) -> None:
        """Has blocks taken by the pool.

        Raises:
            WorkerError: They are not there.
        """
        with contextlib.closing(self._answered(frames)) as answers:
            for given, reply in answers:
                names = given.block_ids, given.epochs
                if not isinstance(reply, BlocksTaken) or (reply.block_ids, reply.epochs) != names:
                    raise self._broken(reply)

    def close(self) -> None:
        """Twice changes nothing; whoever waits for an answer is told."""
        self.is_closed = True
        for channel in (self._channel, self._steps):
            with contextlib.suppress(OSError):
                if channel is not None:
                    channel.shutdown()
        self._release()

    def _answered(self, questions: Iterable[Question]) -> Generator[tuple[Question, AgentMessage], None, None]:
        """Each with its answer. However this ends, none is under way then."""
        under_way: deque[Question] = deque()
        try:
            for question in questions:
                answer = self._answer(under_way) if len(under_way) == self.frames_under_way else None
                self._ask(question)
                under_way.append(question)
                if answer is not None:
                    yield answer
            while under_way:
                yield self._answer(under_way)
        finally:
            with contextlib.suppress(WorkerDiedError):
                for _ in under_way:
                    self._receive()

    def _ask(self, question: SendBlocks | Blocks) -> None:
        if self.is_closed:
            raise WorkerDiedError("the WorkAgent is gone")
        try:
            self._channel.send(question)
        except TransportError as error:
            self.close()
            raise WorkerDiedError(str(error)) from error

    def _answer(self, under_way: deque[Question]) -> tuple[Question, AgentMessage]:
        question, reply = under_way.popleft(), self._receive()
        if isinstance(reply, BlocksRefused):
            raise WorkerError(reply.error[:_REASON_CHARS])
        return question, reply

    def _receive(self) -> AgentMessage:
        if self.is_closed:
            raise WorkerDiedError("the WorkAgent is gone")
        try:
            return self._channel.receive(self.timeout_s)
        except TransportError as error:
            self.close()
            raise WorkerDiedError(str(error)) from error

    def _checked(self, asked: SendBlocks, reply: AgentMessage) -> Blocks:
        if not isinstance(reply, Blocks) or (reply.block_ids, reply.epochs) != (asked.block_ids, asked.epochs):
            raise self._broken(reply)
        count = len(asked.block_ids)
        if (len(reply.num_written), len(reply.content)) != (count, count * self.block_bytes):
            raise self._broken(reply)
        if not all(0 < each <= MAX_TOKENS for each in reply.num_written):
            raise self._broken(reply)
        return reply

    def _broken(self, reply: AgentMessage) -> WorkerDiedError:
        self.close()
        return WorkerDiedError(f"a WorkAgent was asked for blocks and answered {str(reply)[:100]}")

    def _release(self) -> None:
        """Lets go of the connection, unless somebody holds it, who then does so."""
        if self._holder.acquire(blocking=False):
            self._channel.close()
            self._holder.release()
