"""How blocks of a WorkAgent's transfer pool come and go, where it shares no memory with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from llm_serving.core.clock import Clock
from llm_serving.errors import ProtocolError, WorkerError
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import Blocks, BlocksRefused, BlocksTaken, MasterMessage, SendBlocks


class Pool(Protocol):
    """As `TransferMemory`."""

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]: ...

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None: ...


def exchange_blocks(
    channel: Channel[MasterMessage],
    pool: Pool,
    rest: Callable[[float], None] = lambda took_s: None,
    clock: Clock = time.thread_time,
) -> None:
    """Does what the master asks for, beside the steps: in a thread of its own, until the connection ends.

    Args:
        channel: To the master.
        pool: With the blocks.
        rest: Gives way to the steps; is told how much of a core's time a frame took.
        clock: Of this thread's own time.

    Raises:
        TransportError: It has ended, or the master says something else.
    """
    began = clock()
    while True:
        channel.send(_answer(channel.receive(), pool))
        ended = clock()
        rest(ended - began)
        began = ended


def _answer(message: MasterMessage, pool: Pool) -> Blocks | BlocksTaken | BlocksRefused:
    try:
        if isinstance(message, SendBlocks):
            return Blocks(message.block_ids, message.epochs, *pool.read(message.block_ids, message.epochs))
        if isinstance(message, Blocks):
            pool.write(message.block_ids, message.epochs, message.num_written, message.content)
            return BlocksTaken(message.block_ids, message.epochs)
    except WorkerError as error:
        return BlocksRefused(str(error))
    raise ProtocolError(f"expected blocks, got {str(message)[:100]}")
