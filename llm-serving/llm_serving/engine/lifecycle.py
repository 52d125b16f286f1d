"""Changes of one running model: pause, sleep, new weights, new configuration. Only the event loop may use it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from llm_serving.config.reload import Change, check_reload, read_again
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import FinishReason
from llm_serving.engine.engine import Engine
from llm_serving.engine.replicas import EngineHealth, Replicas
from llm_serving.engine.request_dispatcher import RequestDispatcher
from llm_serving.errors import CapacityError, ConfigError, RequestError, UnavailableError, WorkerDiedError
from llm_serving.executor.model_files import ModelFiles, hash_in_thread
from llm_serving.log import get_logger
from llm_serving.models.gguf import is_gguf
from llm_serving.observability.metrics import Metrics

logger = get_logger(__name__)

POLL_S: Final = 0.02
SHUTTING_DOWN: Final = "the server is shutting down"
Running = Literal["finish", "abort", "freeze"]
"""What happens to accepted requests: they finish, they end with finish reason `abort`, or they keep their state."""
NewRequests = Literal["wait", "refuse"]
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of sleep. With KEEP_WEIGHTS, WorkAgents keep their weights. With DROP_WEIGHTS, they exit."""
TIMEOUT_S: Final = 5.0
"""Maximum seconds to wait for the engines. An engine whose WorkAgent is restarting applies the changes later."""


@dataclass(eq=False, slots=True)
class Gate:
    """Makes new requests wait, or refuses them, while a model pauses or sleeps."""

    reason: str
    new_requests: NewRequests
    max_waiting: int
    _num_waiting: int = field(default=0, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_open: bool = field(default=False, init=False)

    async def enter(self) -> None:
        """Wait until the gate opens. Raise UnavailableError if it refuses requests, CapacityError if too many wait."""
        if self._num_waiting >= self.max_waiting:
            rule = f"{self._num_waiting} requests wait already, the limit of scheduler_config.max_waiting_queue"
            raise CapacityError(f"{self.reason}, and {rule}")
        self._num_waiting += 1
        try:
            while not self._is_open:
                self.check()
                await self._changed.wait()
        finally:
            self._num_waiting -= 1

    def check(self) -> None:
        if self.new_requests == "refuse":
            raise UnavailableError(f"{self.reason}; new requests are refused")

    def change(self, reason: str, new_requests: NewRequests) -> None:
        self.reason, self.new_requests = reason, new_requests
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def open(self) -> None:
        self._is_open = True
        self._changed.set()


class Lifecycle:
    """The state of a model: it serves, pauses or sleeps. `set_weights` sets the folder from which WorkAgents load."""

    def __init__(
        self, config: ServingConfig, dispatcher: RequestDispatcher, set_weights: Callable[[Path], None] | None
    ) -> None:
        self.gate: Gate | None = None
        self.level = 0
        self.weights = config.model.model_path
        self._unrecorded = ""
        """Hash of the weights that a sleeping model will load. When it wakes up, the recordings get this hash."""
        self._config = config
        self._dispatcher = dispatcher
        self._replicas = dispatcher.replicas
        self._set_weights = set_weights
        self._is_frozen = self._is_suspended = self._is_changing = False
        self._ending = asyncio.Event()
        self._change: asyncio.Task[Any] | None = None

    @property
    def can_replace_weights(self) -> bool:
        return self._set_weights is not None and self.weights is not None and not is_gguf(self.weights)

    @property
    def health(self) -> EngineHealth | None:
        if self.gate is None:
            return None
        health = self._replicas.health()
        return EngineHealth(False, f"{self.gate.reason}; {health.detail}" if health.loading else self.gate.reason)

    async def pause(self, running: Running, new_requests: NewRequests) -> None:
        """Make new requests wait, or refuse them. `running`: what happens to accepted requests. Raise RequestError if
        the model sleeps.
        """
        with self._ended_by_shutdown():
            self._check_awake()
            self._check_running(running)
            self._close("the model is paused", new_requests)
            await self._stop_accepted(running)
            await self._note("paused")

    async def resume(self) -> None:
        with self._ended_by_shutdown():
            self._check_awake()
            await self._open("resumed")

    async def sleep(self, level: int, running: Running, new_requests: NewRequests) -> None:
        """Drop the KV cache, at level 2 also the weights. At level 1, requests may be frozen until the model wakes."""
        drops_weights = level == DROP_WEIGHTS or self._config.device.device_target != "CPU"
        if running == "freeze" and drops_weights:
            rule = "must be finish or abort at level 2, and on an NPU also at level 1, because WorkAgents exit"
            raise RequestError("running", rule, running)
        with self._ended_by_shutdown():
            self._check_running(running)
            level = max(level, self.level)
            self._close(f"the model sleeps at level {level}", new_requests)
            await self._stop_accepted(running)
            await self._note(f"sleep level {level}")
            if drops_weights:
                await self._suspend()
            elif not self._is_suspended:
                await self._freeze(True)
                await self._call(Engine.drop_cache)
            self.level = level

    async def wake_up(self) -> None:
        with self._ended_by_shutdown():
            if self.level:
                await self._wake()
                if self._unrecorded:
                    await self._note(f"weights {self._unrecorded} are served")
                self.level, self._unrecorded = 0, ""
                await self._open("awake")

    async def replace_weights(self, folder: Path, running: Running, new_requests: NewRequests) -> str:
        """Load the weights of a new folder, once accepted requests have finished or are aborted. Return their hash. A
        sleeping model loads them at wake-up. If the load fails, load the former weights and raise UnavailableError.
        """
        before, set_weights = self.weights, self._set_weights
        assert before is not None and set_weights is not None
        with self._ended_by_shutdown():
            new = await self._hash(folder)
            self._check_running(running)
            reason = "" if self.gate is None else self.gate.reason
            self._close("the weights are being replaced", new_requests)
            await self._stop_accepted(running)
            await self._note(f"replacing the weights by {new}")
            await self._suspend()
            self._dispatcher.coalesced.clear()
            self._use(folder)
            if self.level:
                self.level, self._unrecorded = DROP_WEIGHTS, new
                await self._reopen(f"the model sleeps at level {DROP_WEIGHTS}")
                return new
            try:
                await self._wake()
            except UnavailableError:
                self._use(before)
                await self._suspend()
                await self._wake()
                await self._note("the former weights are served again")
                await self._reopen(reason)
                raise
            await self._note(f"weights {new} are served")
            await self._reopen(reason)
            return new

    def reload(self, config: ServingConfig) -> None:
        self._config = config
        if self.gate is not None:
            self.gate.max_waiting = config.scheduler.max_waiting_queue

    def begin_shutdown(self) -> None:
        """End what would delay a shutdown: a change in progress, frozen requests, and new requests that wait."""
        self._ending.set()
        if self._change is not None:
            self._change.cancel()
        if self.gate is not None:
            self.gate.change(SHUTTING_DOWN, "refuse")
        if self._is_frozen:
            for engine in self._replicas.living().values():
                with contextlib.suppress(WorkerDiedError):  # the engine has ended its requests
                    engine.ask(partial(engine.end_all, SHUTTING_DOWN, FinishReason.UNAVAILABLE))

    # --- steps of a change ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Return a context that excludes other changes of the model. Raise RequestError if one is in progress."""
        if self._is_changing:
            raise RequestError(
                "model",
                "is being changed by another request: wait until that request has ended, then send this one again",
            )
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False

    @contextlib.contextmanager
    def _ended_by_shutdown(self) -> Iterator[None]:
        if self._ending.is_set():
            raise UnavailableError(SHUTTING_DOWN)
        with self.exclusive():
            self._change = task = asyncio.current_task()
            assert task is not None
            try:
                yield
            except asyncio.CancelledError:
                if not self._ending.is_set():
                    raise
                task.uncancel()
                raise UnavailableError(SHUTTING_DOWN) from None
            finally:
                self._change = None

    def _check_awake(self) -> None:
        if self.level:
            raise RequestError("level", "must be 0 (awake): send POST /v1/wake_up first", self.level)

    def _check_running(self, running: Running) -> None:
        if self._is_frozen and self._dispatcher.requests.by_id and running == "finish":
            raise RequestError("running", "must be freeze or abort, because accepted requests are frozen", running)

    async def _hash(self, folder: Path) -> str:
        model = self._config.model
        return (await hash_in_thread(ModelFiles.of(folder, model.tokenizer_path or model.model_path))).weights

    def _use(self, folder: Path) -> None:
        assert self._set_weights is not None
        self._set_weights(folder)
        self.weights = folder

    def _close(self, reason: str, new_requests: NewRequests) -> None:
        if self.gate is None:
            self.gate = Gate(reason, new_requests, self._config.scheduler.max_waiting_queue)
        else:
            self.gate.change(reason, new_requests)
        logger.info("%s: new_requests=%s", reason, new_requests)

    async def _reopen(self, reason: str) -> None:
        if self.gate is not None and reason:
            self.gate.reason = reason
        else:
            await self._open("awake")

    async def _open(self, event: str) -> None:
        await self._note(event)
        await self._freeze(False)
        if self.gate is not None:
            self.gate.open()
            self.gate = None
        logger.info("the model serves again")

    async def _stop_accepted(self, running: Running) -> None:
        requests = self._dispatcher.requests.by_id
        if running == "freeze":
            await self._freeze(True)
            return
        while requests:
            if running == "abort":
                for opened in list(requests.values()):
                    opened.is_cancelled = True
                    opened.engine.abort(opened.request.request_id)
            await asyncio.sleep(POLL_S)

    async def _freeze(self, is_frozen: bool) -> None:
        def set_frozen(engine: Engine) -> bool:
            engine.is_frozen = is_frozen
            return not (is_frozen and engine.has_steps)

        self._is_frozen = True  # until all engines have resumed
        await self._call(set_frozen)
        self._is_frozen = is_frozen

    async def _note(self, text: str) -> None:
        await self._call(lambda engine: engine.scheduler.note(text))

    async def _call(self, function: Callable[[Engine], object]) -> None:
        """Call a function in the thread of each engine, and call it again while it returns False."""
        for engine in self._replicas.living().values():
            with contextlib.suppress(WorkerDiedError):  # the engine has ended; the next one starts without state
                while await asyncio.wrap_future(engine.ask(partial(function, engine))) is False:
                    await asyncio.sleep(POLL_S)

    async def _suspend(self) -> None:
        self._is_suspended, self._is_frozen = True, False
        self._replicas.suspend()
        while not self._replicas.all_left:
            await asyncio.sleep(POLL_S)

    async def _wake(self) -> None:
        if not self._is_suspended:
            return
        self._replicas.unsuspend()
        while (counts := self._replicas.counts()).num_ready < counts.num_replicas - len(self._replicas.drained):
            if failures := self._replicas.load_failures:
                raise UnavailableError(f"the weights were not loaded: {'; '.join(failures)}")
            await asyncio.sleep(POLL_S)
        self._is_suspended = False


@dataclass(frozen=True, slots=True)
class ReloadResult:
    changes: list[Change]
    late: list[int]


class ConfigReloader:
    """Applies a changed YAML file completely or not at all. Only the event loop may call it."""

    def __init__(self, config: ServingConfig, replicas: Replicas, metrics: Metrics) -> None:
        self.followers: list[Callable[[ServingConfig], None]] = []
        """Functions that get each new configuration. They must not raise errors."""
        self._started = self._running = config
        self._replicas = replicas
        self._metrics = metrics
        self._lock = asyncio.Lock()

    async def reload(self) -> ReloadResult:
        """Apply a changed YAML file between two steps, or raise RequestError if it is invalid or needs a restart."""
        async with self._lock:
            try:
                read = await asyncio.to_thread(read_again, self._running)
                changes = check_reload(self._started, self._running, read)
            except ConfigError as error:
                self._metrics.reloaded("refused")
                logger.error("reload failed: %s", error)
                raise RequestError("configuration", f"cannot be applied: {error}") from None
            if not changes:
                self._metrics.reloaded("unchanged")
                logger.info("reload: no key of the YAML has changed")
                return ReloadResult([], [])
            self._running = read
            for follow in self.followers:
                follow(read)
            logger.info("reload applied: %s", "; ".join(map(str, changes)))
            self._metrics.reloaded("applied")
            replies = {index: asyncio.wrap_future(reply) for index, reply in self._replicas.reload(read).items()}
            if replies:
                await asyncio.wait(replies.values(), timeout=TIMEOUT_S)
            return ReloadResult(changes, [index for index, reply in replies.items() if not reply.done()])
