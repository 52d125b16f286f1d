"""Transfer of KV blocks between simulated machines."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from llm_serving.engine.fleet.migration import transfer_blocks
from llm_serving.errors import WorkerDiedError
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.transport.messages import BlockContents
from support.fake_runner import FakeTransferPool
from support.simulated_network import AgentLocation


class SimulatedBlockLink:
    """A `BlockLink` that ends if a frame finds the machine lost or unreachable, and sometimes at random."""

    def __init__(
        self, rng: random.Random, pool: FakeTransferPool, location: AgentLocation, end: Callable[[], None]
    ) -> None:
        """`end` ends the WorkAgent, which cannot work without its link."""
        self.blocks_per_frame, self.timeout_s = rng.choice((1, 3)), math.inf
        self.is_closed = False
        self._rng, self._pool, self._location, self._end = rng, pool, location, end
        self._rate = rng.choice((0.0, 0.0, 0.1))

    def locked(self, timeout_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        for blocks in pieces:
            self._cross()
            ids, epochs = [block_id for block_id, _ in blocks], [epoch for _, epoch in blocks]
            yield BlockContents(ids, epochs, *self._pool.read(ids, epochs))

    def write(self, frames: Iterable[BlockContents]) -> None:
        for blocks in frames:
            self._cross()
            self._pool.write(blocks.block_ids, blocks.epochs, blocks.num_written, blocks.content)

    def close(self) -> None:
        self.is_closed = True

    def _cross(self) -> None:
        if not self.is_closed and self._rng.random() < self._rate:
            self._location.network.counts["links of blocks that ended"] += 1
            self.is_closed = True
        if self.is_closed or self._location.is_lost or not self._location.is_reachable:
            self.is_closed = True
            self._end()
            raise WorkerDiedError("the peer is gone")


class SimulatedCarrier:
    """A `Carrier` that transfers the blocks of one request at each call of `bring`, `most` requests at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._asked: deque[Callable[[], None]] = deque()

    def start(
        self,
        replica: int,
        blocks: Sequence[TransferBlock],
        source: SimulatedBlockLink,
        target: SimulatedBlockLink,
        done: Callable[[bool], None],
    ) -> bool:
        if len(self._asked) == self._most:
            return False
        self._asked.append(lambda: done(transfer_blocks(blocks, source, target, math.inf)))
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def bring(self) -> None:
        if self._asked:
            self._asked.popleft()()
