"""The engine threads, one for each WorkAgent: load, serve, load again after a failure; and the health of them all."""

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
from llm_serving.engine.engine import Engine, Publish
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.migration import BlockTransferrer, MigratingRequest, TransferredBlocks, TransferThrottle
from llm_serving.engine.listener import EngineListener
from llm_serving.engine.replica import build_rules
from llm_serving.errors import LLMServingError, NoWorkAgentsError, RequestError, WorkerDiedError
from llm_serving.executor.supervisor import restart_delay_s
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.log import get_logger
from llm_serving.observability.metrics import ReplicaCounts

logger = get_logger(__name__)
T = TypeVar("T")
OpenReplica = Callable[[int, Publish, Callable[[str], None]], AbstractContextManager[Engine]]
"""(index, publish, on_progress) -> the replica's engine. Entering may take minutes; leaving ends its WorkAgent."""
ReplicaState = Literal["loading", "serving", "restarting", "draining", "left"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    """Whether at least one WorkAgent serves."""
    detail: str
    """For people: "ready", "WorkAgent 0: compiling the network", "no WorkAgent lives: ..."."""
    loading: bool = False
    """Whether a WorkAgent is still on its way, beside those that serve."""


def health_of(
    engines: Mapping[int, Engine], failures: Mapping[int, str], num_replicas: int, progress: str, max_restarts: int
) -> EngineHealth:
    """What is to be told of the replicas of a server.

    Args:
        engines: By index, those that have been loaded, dead ones included.
        failures: By index, why one could not be loaded the last time.
        num_replicas: That there shall be.
        progress: Of what is being loaded.
        max_restarts: Of a WorkAgent in a row, after which it is told that they go on and on.
    """
    failed = {**failures, **{index: engine.dead for index, engine in engines.items() if engine.dead is not None}}
    restarting = {
        index: engine.restart_status or f"is started again: {engine.restarting}"
        for index, engine in engines.items()
        if engine.restarting is not None and engine.dead is None
    }
    exhausted = any(engines[index].restarts_exhausted for index in restarting)
    ready = any(engine.dead is None and engine.restarting is None for engine in engines.values())
    loading = bool(restarting) or len(engines.keys() | failed.keys()) < num_replicas
    notices = {index: engine.notice for index, engine in engines.items() if engine.notice}
    lasting = f"was started again more than {max_restarts} times in a row without a step"
    notices |= {index: lasting for index, engine in engines.items() if engine.restarts_exhausted}
    remarks = "; ".join(f"WorkAgent {index}: {remark}" for index, remark in sorted((notices | failed).items()))
    if not ready and not loading:
        return EngineHealth(False, f"no WorkAgent lives: {remarks}")
    if restarting and (ready or exhausted):
        remarks = "; ".join(f"WorkAgent {index} {why}" for index, why in restarting.items())
        return EngineHealth(ready, remarks, loading)
    if loading:
        return EngineHealth(ready, progress, loading)
    return EngineHealth(ready, f"ready; {remarks}" if remarks else "ready")


class CallsSoon(Protocol):
    """The part of an event loop that engines need."""

    def call_soon_threadsafe(self, callback: Callable[[T], None], argument: T, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Events:
    """Who is told on the event loop of what happens in the engine threads."""

    on_outputs: Callable[[list[RequestOutput]], None]
    """What a step brought."""
    on_started: Callable[[list[str]], None]
    """Ids of requests that are scheduled for the first time; before anything of them is told."""
    on_departures: Callable[[list[MigratingRequest]], None]
    """Requests that another replica is to go on with."""
    on_failure: Callable[[LLMServingError], None]
    """Why the server cannot serve and shall end."""
    on_ended: Callable[[Engine], None] = lambda engine: None
    """An engine that tells nothing any more, after all that it has told."""
    on_serving: Callable[[Engine], None] = lambda engine: None
    """An engine that was drained while it was loaded; until it is told to leave it may be given requests."""


class Replicas(EngineListener):
    """Replicas of the model by index; each has an engine with a thread and a WorkAgent of its own."""

    def __init__(self, config: ServingConfig, open_replica: OpenReplica, events: Events) -> None:
        self.engines: dict[int, Engine] = {}
        """Those that have been loaded, dead ones included until they are loaded again."""
        self.accounting = FleetAccounting()
        """What they tell each other."""
        self._carrier = BlockTransferrer(TransferThrottle(self._has_steps).rest)
        self._reloaded: tuple[int, ServingConfig] | None = None
        """What engines go by, where it is not what they are opened with; the first time, the second time, .."""
        self._opening = threading.Lock()
        self._changes = itertools.count(1)
        self._newest_change = 0
        """Of what `open` tells."""
        self._open: tuple[int, Mapping[int, Engine]] = (-1, {})
        """What it told last, behind the change after which it did."""
        self._drained: dict[int, threading.Event] = {}
        """Those that shall get no requests until they join again, each with what its thread waits for."""
        self._config = config.serving
        self._num_replicas = config.num_replicas
        self._num_transfer_blocks = config.num_transfer_blocks
        self._open_replica = open_replica
        self._events = events
        self._failures: dict[int, str] = {}
        self._threads: list[threading.Thread] = []
        self._progress = "starting"
        self._loop: CallsSoon | None = None
        self._stopping = threading.Event()

    def __len__(self) -> int:
        return self._num_replicas

    def start(self) -> None:
        """Begins to load all of them; call it on the event loop. `health` tells how far it is."""
        self._loop = asyncio.get_running_loop()
        for index in range(len(self)):
            thread = threading.Thread(target=self._run, args=(index,), name=f"engine-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def drive(self, index: int, make: Callable[[Publish], Engine], loop: CallsSoon) -> Engine:
        """Serves with an engine that its maker steps, in place of one with a thread and a WorkAgent of its own.

        Args:
            index: Of the replica.
            make: Is given what the engine publishes to.
            loop: Does what engines ask to be done on the event loop.
        """
        self._loop = loop
        engine = self.engines[index] = make(self._publish)
        self.watch(engine)
        self._join(engine)
        self._changed()
        return engine

    def watch(self, engine: Engine) -> None:
        """Has an engine tell what happens."""
        engine.add_listener(self)

    async def stop(self) -> None:
        """Ends those that serve; unfinished requests end with an error. One that still loads ends later."""
        self._stopping.set()
        for joined in self._drained.values():
            joined.set()
        living = self.living()
        for engine in living.values():
            engine.stop()
        for index in living:
            await asyncio.to_thread(self._threads[index].join)
        await asyncio.to_thread(self._carrier.close)

    def living(self) -> dict[int, Engine]:
        return {index: engine for index, engine in list(self.engines.items()) if engine.dead is None}

    def open(self) -> Mapping[int, Engine]:
        """Those that requests may be given to, in ascending order; the same object as long as they are the same."""
        with self._opening:
            change, found = self._open
            if change != self._newest_change:
                change = self._newest_change  # before they are looked at: they end at any time
                living = sorted(self.living().items())
                found = {index: each for index, each in living if index not in self._drained and not each.is_stopping}
                self._open = change, found
        return found

    def on_closing(self) -> None:
        self._changed()

    def on_blocks_released(self, blocks: list[TransferBlock]) -> None:
        self.give_back(blocks)

    def _changed(self) -> None:
        """Others than before may be given requests; from any thread."""
        self._newest_change = next(self._changes)

    def drain(self, index: int) -> None:
        """The replica gets no further requests; `leave` is to be called once it has none. Twice changes nothing.

        Raises:
            RequestError: There is no such replica, or no other would be left that serves.
        """
        self._check(index)
        if index in self._drained:
            return
        others = [engine for each, engine in self.open().items() if each != index]
        if self.state(index) == "serving":
            others = [engine for engine in others if engine.restarting is None]
        if not others:
            raise RequestError("replica", "must not be the only one that serves", index)
        self._drained[index] = threading.Event()
        self._changed()

    def is_drained(self, index: int) -> bool:
        """Whether it gets no further requests."""
        return index in self._drained

    def leave(self, index: int) -> None:
        """Ends the WorkAgent of a drained replica that has no requests; its thread waits until it may join."""
        engine = self.engines.get(index)
        if index in self._drained and engine is not None:
            engine.stop()

    def reload(self, config: ServingConfig) -> dict[int, Future[None]]:
        """Every engine goes on by the rules of another configuration, at its next step; later ones from the start.

        Returns:
            Done when an engine has; those that do not live are left out.
        """
        self._reloaded = reloaded = (1 if self._reloaded is None else self._reloaded[0] + 1), config
        asked = {}
        for index, engine in self.living().items():
            with contextlib.suppress(WorkerDiedError):
                asked[index] = engine.ask(partial(_reload, engine, *reloaded))
        return asked

    def give_back(self, blocks: list[TransferBlock]) -> None:
        """Blocks that replicas have handed over are not needed any more; from any thread."""
        blocks_of: dict[int, list[TransferBlock]] = {}
        for block in blocks:
            blocks_of.setdefault(block[0] // self._num_transfer_blocks, []).append(block)
        for index, given in blocks_of.items():
            self.engines[index].give_back(given)

    def bring(self, departure: MigratingRequest, index: int) -> int | None:
        """The replica that goes on with a request which a certain one shall go on with; None: it is not known yet.

        What it takes along has to be brought there first, then. It comes back with the next departures: with its blocks
        there, or without any, if they were lost. Where too much is on its way, it goes on where its blocks are.
        """
        blocks, brought = departure.blocks, departure.brought
        if not blocks or (brought is not None and brought.replica == index):
            return index
        begun = blocks[0][0] // self._num_transfer_blocks
        source, target = self.engines[begun].block_link, self.engines[index].block_link
        if begun == index or source is None or target is None or self._stopping.is_set():
            return index

        def done(there: bool) -> None:
            if not there:
                self.give_back(departure.leave_blocks())
            self.on_departures([departure._replace(brought=TransferredBlocks(index, target) if there else None)])

        if self._carrier.carry(begun, blocks, source, target, done):
            return None
        if self.engines[begun].dead is None:
            return begun
        self.give_back(departure.leave_blocks())
        return index

    def join(self, index: int) -> None:
        """A drained replica serves again, and loads if it has left. One that was not drained is left alone.

        Raises:
            RequestError: There is no such replica.
        """
        self._check(index)
        joined = self._drained.pop(index, None)
        if joined is not None:
            self._changed()
            joined.set()

    def state(self, index: int) -> ReplicaState:
        """What a replica does at this moment."""
        engine = self.engines.get(index)
        if engine is None or engine.dead is not None:
            return "left" if index in self._drained else "loading"
        if index in self._drained:
            return "draining"
        if engine.is_stopping:  # it was drained, and loads again
            return "loading"
        return "serving" if engine.restarting is None else "restarting"

    def _has_steps(self) -> bool:
        """Whether one is under way at any of them; from any thread."""
        return any(engine.has_steps for engine in self.living().values())

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise RequestError("replica", f"must be an integer from 0 to {len(self) - 1}", index)

    def index_of(self, engine: Engine) -> int | None:
        """None: another engine has taken its place."""
        return engine.index if self.engines.get(engine.index) is engine else None

    def health(self) -> EngineHealth:
        return health_of(
            {index: engine for index, engine in list(self.engines.items()) if index not in self._drained},
            {index: failure for index, failure in list(self._failures.items()) if index not in self._drained},
            len(self) - len(self._drained),
            self._progress,
            self._config.max_worker_restarts,
        )

    def counts(self) -> ReplicaCounts:
        ready = [engine for engine in self.living().values() if engine.restarting is None]
        return ReplicaCounts(len(self), len(ready))

    # --- in an engine's thread --------------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        """Loads and serves, and again if that ends before the server does.

        A server none of whose replicas could be loaded has failed; they are not tried again.
        """
        for attempt in itertools.count(1):
            try:
                self._serve(index)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other replicas go on and health tells
                self._failures[index] = str(error)
                logger.error("WorkAgent %d cannot serve: %s", index, error)
                if not self.engines and len(self._failures) == len(self):
                    failure = error if isinstance(error, LLMServingError) else WorkerDiedError(str(error))
                    self._call_soon(self._events.on_failure, failure)
                    return
            if (drained := self._drained.get(index)) is not None:
                logger.info("WorkAgent %d has left", index)
                drained.wait()
            elif self._stopping.wait(restart_delay_s(attempt)):
                return
            if self._stopping.is_set():
                return

    def _serve(self, index: int) -> None:
        with self._open_replica(index, self._publish, self._set_progress) as engine:
            self._begins(index, engine)
            try:
                engine.run()  # to its end at least: it may have been given requests
            finally:
                self._ends(index, engine)

    def _begins(self, index: int, engine: Engine) -> None:
        """A replica has been loaded: it may be given requests, unless it was drained meanwhile."""
        self.watch(engine)
        if (reloaded := self._reloaded) is not None:
            _reload(engine, *reloaded)
        self._join(engine)
        with self._opening:  # whoever finds it in its place finds it among those, too
            self.engines[index] = engine
            self._changed()
        if (newest := self._reloaded) is not None and newest is not reloaded:  # since it looked
            _reload(engine, *newest)
        self._failures.pop(index, None)
        if self._stopping.is_set():  # since it began to load
            engine.stop()
        elif index in self._drained:
            self._call_soon(self._events.on_serving, engine)
        else:
            logger.info("WorkAgent %d is ready", index)

    def _ends(self, index: int, engine: Engine) -> None:
        """Its engine has told all it had to tell."""
        self.accounting.leave(index)
        self._call_soon(self._events.on_ended, engine)

    def _join(self, engine: Engine) -> None:
        if engine.fleet is not None:
            engine.fleet.join(self.accounting, engine.wake)

    def _set_progress(self, text: str) -> None:
        self._progress = text
        logger.info("%s", text)

    def _publish(self, pieces: list[RequestOutput]) -> None:
        """Once a step."""
        self._call_soon(self._events.on_outputs, pieces)

    def on_started(self, request_ids: list[str]) -> None:
        self._call_soon(self._events.on_started, request_ids)

    def on_departures(self, departures: list[MigratingRequest]) -> None:
        for each in departures:
            self.accounting.tenant_slots.start_migration(each.request.request_id, each.request.tenant)
        self._call_soon(self._events.on_departures, departures)

    def on_restart_attempt(self) -> None:
        self._call_soon(self._check_restarts, None)

    def _call_soon(self, callback: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(callback, argument)

    # --- on the event loop ------------------------------------------------------------------------------------------

    def _check_restarts(self, _: None) -> None:
        """Ends the server, if it shall end then, once every WorkAgent has used up its restarts."""
        exhausted = any(engine.restarts_exhausted for engine in self.living().values())
        if self._config.exit_without_work_agents and exhausted and all(map(self._is_abandoned, range(len(self)))):
            self._events.on_failure(NoWorkAgentsError(self.health().detail))

    def _is_abandoned(self, index: int) -> bool:
        """Whether nobody should count on a replica: it is drained, could not be loaded, or has used up its restarts."""
        engine = self.engines.get(index)
        return index in self._drained or index in self._failures or (engine is not None and engine.restarts_exhausted)


def _reload(engine: Engine, number: int, config: ServingConfig) -> None:
    engine.reload(build_rules(config, engine.scheduler.blocks.max_request_tokens), number)
