"""The whole master over fake replicas whose steps a test releases, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition, Event
from typing import Any

import httpx
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.device import CacheConfig
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.step import StepInput, StepOutput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import LocalExecutor
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.server.app import build_site
from llm_serving.server.idempotency.store import AcceptedRequests
from support.fake_runner import FakeRunner
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER

NUM_BLOCKS = 64


class GatedRunner(FakeRunner):
    """A fake runner that computes steps while its gate is open."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, 16)
        self.gate = Event()
        self.gate.set()

    def execute(self, step: StepInput) -> StepOutput:
        self.gate.wait()
        return super().execute(step)


class GatedServer:
    """A server, which `running` starts; it yields a client."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        batch_waiting_time: float = 0.0,
        api_keys: tuple[ApiKey, ...] = (),
        serving: dict[str, Any] | None = None,
        accepted: AcceptedRequests | None = None,
        yaml: Path | None = None,
        lora: LoraConfig | None = None,
        clock: Clock = monotonic,
        **scheduler: Any,
    ) -> None:
        """Read the configuration from `yaml`, if given, in place of all other arguments."""
        self.runner = GatedRunner()
        config = ServingConfig(
            model=ModelConfig(
                model_name="demo",
                max_generate_length=512,
                decode_batch_size=max_num_seqs,
                batch_waiting_time=batch_waiting_time,
            ),
            serving=ServerConfig(audit_every=0, **(serving or {})),
            pa=CacheConfig(block_size=16),
            scheduler=SchedulerConfig(**scheduler),
            api_keys=api_keys,
            lora=lora or LoraConfig(),
        )
        if yaml is not None:
            config = load_config(yaml, ["model_config.max_generate_length=512"])
        spec = replace(ModelSpec.from_folder(DEMO_FOLDER), eos_token_ids=())
        self.metrics = Metrics("demo")
        self._clock = clock
        self.engine = AsyncEngine(config, spec, DEMO_TOKENIZER, self.metrics, self._open_replica, clock=clock)
        self.site = build_site(self.engine, accepted=accepted)

    @contextmanager
    def _open_replica(self, index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        executor = LocalExecutor(self.runner)
        yield build_engine(
            self.engine.config,
            NUM_BLOCKS,
            executor,
            DEMO_TOKENIZER,
            self.metrics,
            publish,
            index,
            clock=self._clock,
        )

    @property
    def num_computed(self) -> int:
        """Number of sampled tokens."""
        return sum(step.sampling.num_samples for step in self.runner.steps)

    @property
    def replica(self) -> Engine:
        return self.engine.replicas.engines[0]

    @asynccontextmanager
    async def running(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        self.engine.start()
        try:
            while not self.engine.health().ready:
                await asyncio.sleep(0)
            transport = httpx.ASGITransport(self.site.public)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
                yield client
        finally:
            self.runner.gate.set()
            await self.engine.stop()

    @property
    def num_readers(self) -> int:
        """Number of streams that read shared answers in progress."""
        return sum(len(each._readers) for each in self.engine.coalesced._in_flight.values())

    async def reach(self, holds: Callable[[], bool]) -> None:
        """Wait until the engine's thread has made a condition true."""
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0)


class AskedRunner(GatedRunner):
    """A fake runner that computes steps only while a question to its engine is unanswered."""

    def __init__(self) -> None:
        super().__init__()
        self._num_open = 0
        self._changed = Condition()

    def execute(self, step: StepInput) -> StepOutput:
        with self._changed:
            self._changed.wait_for(lambda: self._num_open)
        return super().execute(step)

    def add_questions(self, change: int = 1) -> None:
        """Add an unanswered question, or remove one with -1."""
        with self._changed:
            self._num_open += change
            self._changed.notify_all()


class AskedServer(GatedServer):
    """A server that runs steps only while its engine is asked, so that no request ends before the answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.runner = AskedRunner()

    @contextmanager
    def _open_replica(self, *arguments: Any) -> Iterator[Engine]:
        with super()._open_replica(*arguments) as engine:
            ask = engine.ask

            def ask_and_step(question: Any) -> Any:
                answer = ask(question)
                self.runner.add_questions()  # after `ask`: before it, the engine would run steps without a question
                answer.add_done_callback(lambda _: self.runner.add_questions(-1))
                return answer

            engine.ask = ask_and_step
            yield engine

    @asynccontextmanager
    async def running(self, **headers: str) -> Any:
        async with super().running(**headers) as client:
            try:
                yield client
            finally:
                self.runner.add_questions()  # no more questions follow
