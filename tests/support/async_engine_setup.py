"""An AsyncEngine over fake replicas."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.enums import RoutingName
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.replica import create_transfer_pool
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import TransportError, WorkerDiedError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.executor import LocalExecutor
from llm_serving.observability.metrics import Metrics
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import AgentMessage, MasterMessage
from llm_serving.worker.kv_transfer import serve_blocks
from support.factories import create_scheduler
from support.fake_runner import VOCAB_SIZE, FakeRunner, FakeTransferPool
from support.word_tokenizer import WordTokenizer

TRANSFER_BLOCKS = 32
"""Transfer blocks of each replica."""


class GatedRunner(FakeRunner):
    """A fake runner that computes only while its gate is open."""

    def __init__(self, num_blocks: int, block_size: int, transfer: FakeTransferPool | None = None) -> None:
        super().__init__(num_blocks, block_size, transfer=transfer)
        self.gate = Event()
        self.gate.set()
        self.dead = False

    def execute(self, step: StepInput) -> StepOutput:
        self.gate.wait()
        if self.dead:
            raise WorkerDiedError("killed")
        return super().execute(step)


@contextmanager
def linked(pool: FakeTransferPool, block_bytes: int) -> Iterator[BlockLink]:
    """Yield the link to a WorkAgent that has a transfer pool of its own; each block is sent in a frame of its own."""
    ours, theirs = socket.socketpair()
    channel: Any = Channel(ours, AgentMessage)  # type: ignore[arg-type]
    agent: Channel[Any] = Channel(theirs, MasterMessage)  # type: ignore[arg-type]

    def serve() -> None:
        with suppress(TransportError):
            serve_blocks(agent, pool)
        agent.close()

    thread = Thread(target=serve)
    thread.start()
    link = BlockLink(channel, block_bytes, 60.0)
    link.blocks_per_frame = 1
    yield link
    link.close()
    thread.join()


class SettableExecutor(LocalExecutor):
    """A local executor whose state a test sets."""

    restarts_exhausted = False
    block_link: BlockLink | None = None


class Setup:
    """An AsyncEngine over fake replicas, whose loading a test can delay or let fail."""

    def __init__(
        self,
        num_replicas: int = 1,
        max_waiting_queue: int = 100,
        max_num_seqs: int = 8,
        api_keys: tuple[ApiKey, ...] = (),
        exit_without_work_agents: bool = False,
        clock: Clock = monotonic,
        routing: str = RoutingName.PREDICTED_TTFT,
        roles: tuple[str, ...] | None = None,
        share_memory: bool = True,
        **scheduler: Any,
    ) -> None:
        self.runners: dict[int, GatedRunner] = {}
        self.failures: dict[int, str] = {}
        self.may_load = Event()
        self.may_load.set()
        self.slow: dict[int, Event] = {}
        """Events that replicas wait for before they load, by index."""
        self.max_num_seqs = max_num_seqs
        shared = FakeTransferPool(num_replicas * TRANSFER_BLOCKS)
        self.pools = [
            shared if share_memory else FakeTransferPool(num_replicas * TRANSFER_BLOCKS) for _ in range(num_replicas)
        ]
        self.links: dict[int, BlockLink] = {}
        """Block links of replicas without shared memory, by index."""
        self._share_memory = share_memory
        config = ServingConfig(
            model=ModelConfig(max_generate_length=64, decode_batch_size=max_num_seqs),
            serving=ServerConfig(
                agent_ports=tuple(range(16002, 16002 + num_replicas)),
                exit_without_work_agents=exit_without_work_agents,
                routing=routing,
            ),
            scheduler=SchedulerConfig(max_waiting_queue=max_waiting_queue, **scheduler),
            api_keys=api_keys,
            cluster=ClusterConfig(roles=roles, num_transfer_blocks=None if roles is None else TRANSFER_BLOCKS),
        )
        spec: Any = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=())
        tokenizer: Any = WordTokenizer()
        self.metrics = Metrics()
        self.engine = AsyncEngine(config, spec, tokenizer, self.metrics, self._open_replica, clock=clock)

    @contextmanager
    def _open_replica(self, index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        on_progress(f"WorkAgent {index}: reading weights")
        self.may_load.wait()
        if (event := self.slow.get(index)) is not None:
            event.wait()
        if index in self.failures:
            raise WorkerDiedError(self.failures[index])
        exports = create_transfer_pool(TRANSFER_BLOCKS, index * TRANSFER_BLOCKS)
        scheduler = create_scheduler(
            max_num_seqs=self.max_num_seqs,
            prefix_caching=True,
            exports=exports,
            num_schedulers=self.engine.config.num_replicas,
        )
        blocks = scheduler.blocks
        runner = self.runners[index] = GatedRunner(blocks.pool.num_blocks, blocks.block_size, self.pools[index])
        tokenizer: Any = WordTokenizer()
        executor = SettableExecutor(runner)
        engine = Engine(scheduler, executor, tokenizer, self.metrics, publish, index=index)
        if self._share_memory:
            yield engine
        else:
            with linked(self.pools[index], 4 * blocks.block_size) as link:
                self.links[index] = link
                executor.block_link = link
                yield engine
        scheduler.check_integrity()
        assert scheduler.blocks.pool.num_used_blocks == 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncEngine]:
        self.engine.start()
        try:
            while self.engine.health().loading:
                await asyncio.sleep(0)
            yield self.engine
        finally:
            for runner in self.runners.values():
                runner.gate.set()
            await self.engine.stop()


async def token_ids(stream: RequestStream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]
