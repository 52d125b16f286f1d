"""The engine threads of the replicas, and their health. If restarts of a WorkAgent fail too often, the replica gets no
requests while its thread tries to load the WorkAgent anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.migration import BlockTransferrer, MigratingRequest, TransferredBlocks, TransferThrottle
from llm_serving.engine.observers import EngineListener
from llm_serving.engine.replica import build_rules
from llm_serving.errors import LLMServingError, NoWorkAgentsError, RequestError, WorkerDiedError
from llm_serving.executor.supervisor import restart_delay_s
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.log import get_logger
from llm_serving.observability.metrics import ReplicaCounts

logger = get_logger(__name__)
T = TypeVar("T")
OpenReplica = Callable[[int, Publish, Callable[[str], None]], AbstractContextManager[Engine]]
"""(index, publish, on_progress) -> context manager of an engine. Its entry loads the WorkAgent, its exit stops it."""
ReplicaState = Literal["loading", "serving", "restarting", "draining", "left"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    detail: str
    """Text for an operator, such as "ready" or "WorkAgent 0: compiling the network"."""
    loading: bool = False


class CallsSoon(Protocol):
    def call_soon_threadsafe(self, callback: Callable[[T], None], argument: T, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Events:
    on_outputs: Callable[[list[RequestOutput]], None]
    on_started: Callable[[list[str]], None]
    on_migrating: Callable[[list[MigratingRequest]], None]
    on_failure: Callable[[LLMServingError], None]
    on_ended: Callable[[Engine], None] = lambda engine: None
    on_serving: Callable[[Engine], None] = lambda engine: None
    """Called when a replica that was drained while it loaded is ready. It must stop once it has no requests."""


class Replicas(EngineListener):
    def __init__(self, config: ServingConfig, open_replica: OpenReplica, events: Events) -> None:
        self.engines: dict[int, Engine] = {}
        """Index -> loaded engine. An engine that has ended stays here until its replica has loaded again."""
        self.accounting = FleetAccounting()
        self.cancel_starts: Callable[[], None] = lambda: None
        """Called by `stop`: cancel the start of every WorkAgent that is not ready."""
        self.drained: dict[int, threading.Event] = {}
        """Index of a drained replica -> event that the replica's thread waits for before it loads the replica again."""
        self._suspended: list[int] = []
        """Indices of the replicas that `unsuspend` will load again. Empty unless the replicas are suspended."""
        self._left: set[int] = set()
        self._transferrer = BlockTransferrer(TransferThrottle(self._has_steps).wait)
        self._reloaded: tuple[int, ServingConfig] | None = None
        self._opening = threading.Lock()
        self._changes = itertools.count(1)
        self._newest_change = 0
        self._open: tuple[int, Mapping[int, Engine]] = (-1, {})
        self._config = config.serving
        self._num_replicas = config.num_replicas
        self._num_transfer_blocks = config.num_transfer_blocks
        self._open_replica = open_replica
        self._events = events
        self._publish: Publish = partial(self._call_soon, events.on_outputs)
        self._failures: dict[int, str] = {}
        self._threads: list[threading.Thread] = []
        self._progress = "starting"
        self._loop: CallsSoon | None = None
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return self._num_replicas

    def start(self) -> None:
        """Start to load all replicas, and return. Call this on the event loop. `health` reports the progress."""
        self._loop = asyncio.get_running_loop()
        for index in range(len(self)):
            thread = threading.Thread(target=self._run, args=(index,), name=f"engine-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def drive(self, index: int, make: Callable[[Publish], Engine], loop: CallsSoon) -> Engine:
        """Add an engine whose steps the caller runs. `make(publish)` creates it; `publish` passes on its outputs."""
        self._loop = loop
        engine = self.engines[index] = make(self._publish)
        engine.add_listener(self)
        self._join(engine)
        self._changed()
        return engine

    async def stop(self) -> None:
        self._stopping.set()
        for joined in self.drained.values():
            joined.set()
        self.cancel_starts()
        for engine in self.living().values():
            engine.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._transferrer.close)

    def living(self) -> dict[int, Engine]:
        return {index: engine for index, engine in list(self.engines.items()) if engine.dead is None}

    def open(self) -> Mapping[int, Engine]:
        """Return the engines that accept requests, by index. Until these change, each call returns the same object."""
        with self._opening:
            change, found = self._open
            if change != self._newest_change:
                change = self._newest_change  # read first, because an engine may end at any time
                living = sorted(self.living().items())
                found = {index: each for index, each in living if index not in self.drained and not each.is_stopping}
                self._open = change, found
        return found

    def on_closing(self) -> None:
        self._changed()

    def on_blocks_released(self, blocks: list[TransferBlock]) -> None:
        self.reclaim_blocks(blocks)

    def _changed(self) -> None:
        self._newest_change = next(self._changes)

    def drain(self, index: int) -> None:
        """Route no further requests to a replica until `leave` stops it. Raise RequestError for the last open one."""
        self._check(index)
        if self._suspended:  # all replicas leave until `unsuspend`, which must not load this one
            if self._suspended == [index]:
                raise RequestError("replica", "must not be the only replica that serves", index)
            self._suspended = [each for each in self._suspended if each != index]
            return
        if index in self.drained:
            return
        others = [engine for each, engine in self.open().items() if each != index]
        if self.state(index) == "serving":
            others = [engine for engine in others if engine.restarting is None]
        if not others:
            raise RequestError("replica", "must not be the only replica that serves", index)
        self._drain(index)
        self._changed()

    def _drain(self, index: int) -> None:
        """Drain a replica. Its thread does not wait if `stop` has begun, because `stop` waits for the thread."""
        self.drained[index] = joined = threading.Event()
        if self._stopping.is_set():
            joined.set()

    def is_drained(self, index: int) -> bool:
        return index in self.drained

    def leave(self, index: int) -> None:
        engine = self.engines.get(index)
        if index in self.drained and engine is not None:
            engine.stop()

    def suspend(self) -> None:
        for index in range(len(self)):
            if index not in self.drained:
                self._drain(index)
                self._suspended.append(index)
            self.leave(index)
        self._changed()

    def unsuspend(self) -> None:
        self._failures.clear()
        suspended, self._suspended = self._suspended, []
        for index in suspended:
            self.join(index)

    @property
    def all_left(self) -> bool:
        return len(self._left) == len(self)

    @property
    def load_failures(self) -> list[str]:
        return list(self._failures.values())

    def reload(self, config: ServingConfig) -> dict[int, Future[None]]:
        """Pass a new configuration to all replicas. Return index -> future that completes once the replica uses it."""
        self._reloaded = reloaded = (1 if self._reloaded is None else self._reloaded[0] + 1), config
        asked = {}
        for index, engine in self.living().items():
            with contextlib.suppress(WorkerDiedError):
                asked[index] = engine.ask(partial(_reload, engine, *reloaded))
        return asked

    def reclaim_blocks(self, blocks: list[TransferBlock]) -> None:
        """Return transfer pool blocks to the replicas that wrote them, for reuse. Thread-safe."""
        blocks_of: dict[int, list[TransferBlock]] = {}
        for block in blocks:
            blocks_of.setdefault(block[0] // self._num_transfer_blocks, []).append(block)
        for index, given in blocks_of.items():
            self.engines[index].reclaim_blocks(given)

    def transfer(self, migrating: MigratingRequest, index: int) -> int | None:
        """Return the replica that continues a migrating request, preferably `index`, or None if a transfer of its
        blocks to `index` has begun. After the transfer, `on_migrating` gets the request again, without blocks if the
        transfer failed. If too many transfers wait, return the replica that computed the blocks.
        """
        blocks, transferred = migrating.blocks, migrating.transferred
        if not blocks or (transferred is not None and transferred.replica == index):
            return index
        exporter = blocks[0][0] // self._num_transfer_blocks
        source, target = self.engines[exporter].executor.block_link, self.engines[index].executor.block_link
        if exporter == index or source is None or target is None or self._stopping.is_set():
            return index

        def done(succeeded: bool) -> None:
            if not succeeded:
                self.reclaim_blocks(migrating.drop_blocks())
            where = TransferredBlocks(index, target) if succeeded else None
            self.on_migrating([migrating._replace(transferred=where)])

        if self._transferrer.start(exporter, blocks, source, target, done):
            return None
        if self.engines[exporter].dead is None:
            return exporter
        self.reclaim_blocks(migrating.drop_blocks())
        return index

    def join(self, index: int) -> None:
        """Route requests to a drained replica again, and load it if it has stopped. While the replicas are suspended,
        let `unsuspend` load it. Raise RequestError for a bad index.
        """
        self._check(index)
        if self._suspended:
            self._suspended += [] if index in self._suspended else [index]
            return
        joined = self.drained.pop(index, None)
        if joined is not None:
            self._changed()
            joined.set()

    def state(self, index: int) -> ReplicaState:
        engine = self.engines.get(index)
        if engine is None or engine.dead is not None:
            return "left" if index in self.drained else "loading"
        if index in self.drained:
            return "draining"
        if engine.is_stopping:  # it was drained and joined again
            return "loading"
        return "serving" if engine.restarting is None else "restarting"

    def _has_steps(self) -> bool:
        return any(engine.has_steps for engine in self.living().values())

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise RequestError("replica", f"must be an integer from 0 to {len(self) - 1}", index)

    def index_of(self, engine: Engine) -> int | None:
        return engine.index if self.engines.get(engine.index) is engine else None

    def health(self) -> EngineHealth:
        engines = {index: engine for index, engine in list(self.engines.items()) if index not in self.drained}
        failed = {index: failure for index, failure in list(self._failures.items()) if index not in self.drained}
        failed |= {index: engine.dead for index, engine in engines.items() if engine.dead is not None}
        restarting = {
            index: engine.executor.restart_status or f"is being restarted: {engine.restarting}"
            for index, engine in engines.items()
            if engine.restarting is not None and engine.dead is None
        }
        exhausted = any(engines[index].executor.restarts_exhausted for index in restarting)
        ready = any(engine.dead is None and engine.restarting is None for engine in engines.values())
        loading = bool(restarting) or len(engines.keys() | failed.keys()) < len(self) - len(self.drained)
        notices = {index: engine.notice for index, engine in engines.items() if engine.notice}
        max_restarts = self._config.max_worker_restarts
        lasting = f"was restarted more than {max_restarts} times in a row without completing a step"
        notices |= {index: lasting for index, engine in engines.items() if engine.executor.restarts_exhausted}
        remarks = "; ".join(f"WorkAgent {index}: {remark}" for index, remark in sorted((notices | failed).items()))
        if not ready and not loading:
            return EngineHealth(False, f"no WorkAgent serves: {remarks}")
        if restarting and (ready or exhausted):
            remarks = "; ".join(f"WorkAgent {index} {why}" for index, why in restarting.items())
            return EngineHealth(ready, remarks, loading)
        if loading:
            return EngineHealth(ready, self._progress, loading)
        return EngineHealth(ready, f"ready; {remarks}" if remarks else "ready")

    def counts(self) -> ReplicaCounts:
        ready = [engine for engine in self.living().values() if engine.restarting is None]
        return ReplicaCounts(len(self), len(ready))

    # --- in an engine's thread --------------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        for attempt in itertools.count(1):
            try:
                self._serve(index)
            except Exception as error:  # noqa: BLE001 - the other replicas continue, and `health` shows the error
                if self._stopping.is_set() and isinstance(error, WorkerDiedError):  # `stop` has cancelled the start
                    return
                self._failures[index] = str(error)
                logger.error("WorkAgent %d cannot serve: %s", index, error)
                if not self.engines and len(self._failures) == len(self):
                    failure = error if isinstance(error, LLMServingError) else WorkerDiedError(str(error))
                    self._call_soon(self._events.on_failure, failure)
                    return
            if (drained := self.drained.get(index)) is not None:
                logger.info("WorkAgent %d has exited after its replica was drained", index)
                self._left.add(index)
                drained.wait()
                self._left.discard(index)
            elif self._stopping.wait(restart_delay_s(attempt)):
                return
            if self._stopping.is_set():
                return

    def _serve(self, index: int) -> None:
        with self._open_replica(index, self._publish, self._set_progress) as engine:
            self._begins(index, engine)
            try:
                engine.run()  # even if it must stop, because it may have got requests
            finally:
                self._ends(index, engine)

    def _begins(self, index: int, engine: Engine) -> None:
        engine.add_listener(self)
        if (reloaded := self._reloaded) is not None:
            _reload(engine, *reloaded)
        self._join(engine)
        with self._opening:  # `engines` and `open` change together
            self.engines[index] = engine
            self._changed()
        if (newest := self._reloaded) is not None and newest is not reloaded:  # a reload came meanwhile
            _reload(engine, *newest)
        self._failures.pop(index, None)
        if self._stopping.is_set():
            engine.stop()
        elif index in self.drained:
            self._call_soon(self._events.on_serving, engine)
        else:
            logger.info("WorkAgent %d is ready", index)

    def _ends(self, index: int, engine: Engine) -> None:
        self.accounting.leave(index)
        self._call_soon(self._events.on_ended, engine)

    def _join(self, engine: Engine) -> None:
        if engine.fleet is not None:
            engine.fleet.join(self.accounting, engine.wake)

    def _set_progress(self, text: str) -> None:
        self._progress = text
        logger.info("%s", text)

    def on_started(self, request_ids: list[str]) -> None:
        self._call_soon(self._events.on_started, request_ids)

    def on_migrating(self, requests: list[MigratingRequest]) -> None:
        for each in requests:
            self.accounting.tenant_slots.start_migration(each.request.request_id, each.request.tenant)
        self._call_soon(self._events.on_migrating, requests)

    def on_restart_attempt(self) -> None:
        self._call_soon(self._check_restarts, None)

    def _call_soon(self, callback: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no client is connected
            self._loop.call_soon_threadsafe(callback, argument)

    # --- on the event loop ------------------------------------------------------------------------------------------

    def _check_restarts(self, _: None) -> None:
        exhausted = any(engine.executor.restarts_exhausted for engine in self.living().values())
        if self._config.exit_without_work_agents and exhausted and all(map(self._is_abandoned, range(len(self)))):
            self._events.on_failure(NoWorkAgentsError(self.health().detail))

    def _is_abandoned(self, index: int) -> bool:
        engine = self.engines.get(index)
        return (
            index in self.drained
            or index in self._failures
            or (engine is not None and engine.executor.restarts_exhausted)
        )


def _reload(engine: Engine, number: int, config: ServingConfig) -> None:
    scheduler = engine.scheduler
    whole_prompts = scheduler.limits.whole_prompts
    engine.reload(build_rules(config, scheduler.blocks.max_request_tokens, whole_prompts=whole_prompts), number)
