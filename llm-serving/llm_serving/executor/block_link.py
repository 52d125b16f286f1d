"""The master's end of the connection by which blocks of a WorkAgent on another machine come and go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from llm_serving.errors import TransportError, WorkerDiedError, WorkerError
from llm_serving.executor.agent_process import AgentChannel
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.transport.block_frames import blocks_a_frame, max_frame_bytes
from llm_serving.transport.messages import AgentMessage, Blocks, BlocksRefused, BlocksTaken, MasterMessage, SendBlocks


class BlockLink:
    """To the transfer pool of one start of a WorkAgent: one question at a time, from any thread.

    Each has a deadline. What did not come in time, or was not what had been asked for, ends the connection, so that
    no late answer is ever taken for another one; the WorkAgent then ends, and is started again.

    Args:
        channel: To it; the link owns it.
        block_bytes: Of a block, all layers.
        timeout_s: Seconds that a question may take.
    """

    def __init__(self, channel: AgentChannel, block_bytes: int, timeout_s: float) -> None:
        channel.max_frame_bytes = max_frame_bytes(block_bytes)
        channel.send_timeout_s = timeout_s
        self.blocks_a_frame = blocks_a_frame(block_bytes)
        self.is_closed = False
        """What it held is nobody's any more."""
        self._channel = channel
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def read(self, blocks: Sequence[TransferBlock]) -> Blocks:
        """What blocks hold, `blocks_a_frame` at most.

        Raises:
            WorkerError: It cannot be had.
        """
        ids, epochs = [block_id for block_id, _ in blocks], [epoch for _, epoch in blocks]
        reply = self._ask(SendBlocks(ids, epochs))
        if not isinstance(reply, Blocks) or (reply.block_ids, reply.epochs) != (ids, epochs):
            raise self._broken(reply)
        if (len(reply.num_written), len(reply.content)) != (len(ids), len(ids) * self._block_bytes):
            raise self._broken(reply)
        return reply

    def write(self, blocks: Blocks) -> None:
        """Has blocks taken by the pool.

        Raises:
            WorkerError: They are not there.
        """
        reply = self._ask(blocks)
        if not isinstance(reply, BlocksTaken) or (reply.block_ids, reply.epochs) != (blocks.block_ids, blocks.epochs):
            raise self._broken(reply)

    def close(self) -> None:
        """Twice changes nothing; whoever waits for an answer is told."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._channel.shutdown()
        with self._lock:
            self._channel.close()

    def _ask(self, message: MasterMessage) -> AgentMessage:
        with self._lock:
            try:
                if self.is_closed:
                    raise WorkerDiedError("the WorkAgent is gone")
                self._channel.send(message)
                reply = self._channel.receive(self._timeout_s)
            except TransportError as error:
                failure = error
            else:
                if isinstance(reply, BlocksRefused):
                    raise WorkerError(reply.error)
                return reply
        self.close()
        raise WorkerDiedError(str(failure)) from failure

    def _broken(self, reply: AgentMessage) -> WorkerDiedError:
        self.close()
        return WorkerDiedError(f"a WorkAgent was asked for blocks and answered {str(reply)[:100]}")
