"""What is known of requests and schedulers to those who ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from llm_serving.config.schema import ServingConfig
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import Replicas
from llm_serving.errors import RequestNotFoundError, WorkerDiedError
from llm_serving.observability.event_log import RequestRecord, client_ids
from llm_serving.observability.latency_breakdown import Explanation, answers_to, explain
from llm_serving.observability.snapshot import EngineSnapshot, SchedulerState
from llm_serving.observability.timeline import JsonObject, ReplicaTrace, trace

T = TypeVar("T")

STATE_TIMEOUT_S: Final = 5.0
"""How long an engine is waited for; one whose WorkAgent is started again answers later."""


class RequestLookup:
    """Answers from the journals of all replicas, and from their schedulers.

    A `tenant` is who asks and sees its own requests only; None sees everybody's. A `request_id` is the client's, alone
    or as the id of an answer.
    """

    def __init__(self, config: ServingConfig, replicas: Replicas, requests: OpenRequests, clock: Clock) -> None:
        self._config = config
        self._replicas = replicas
        self._requests = requests
        self._clock = clock
        self._states: dict[int, asyncio.Future[SchedulerState]] = {}
        """The newest question to each replica."""
        self._glances: dict[int, asyncio.Future[EngineSnapshot]] = {}

    def find(self, request_id: str, tenant: str | None) -> list[OpenRequest]:
        """The requests that live and are meant by an id; none when all have ended. Call it on the event loop.

        Raises:
            RequestNotFoundError: No request is known by it, or it is another tenant's.
        """
        found, ids = self._requests.find(request_id, tenant), self._ids(request_id)
        if not found and not any(_lives(engine, ids, tenant) for engine in list(self._replicas.engines.values())):
            num_kept = self._config.serving.explain_requests
            rule = f"must be that of a request that lives or is among the newest {num_kept} that ended"
            raise RequestNotFoundError("request_id", f"{rule} (serving_config.explain_requests)", request_id)
        return found

    async def scheduler_states(self) -> dict[int, SchedulerState | None]:
        """Every living replica's scheduler as it is between two steps; None: it did not answer in time.

        However many ask at once, each replica answers once.
        """
        return await self._ask_all(self._states, lambda engine: engine.state, STATE_TIMEOUT_S)

    async def glances(self, since: float, timeout_s: float) -> dict[int, EngineSnapshot | None]:
        """The same, with what has happened since a time; for one who watches, and asks again and again."""
        return await self._ask_all(self._glances, lambda engine: partial(engine.take_snapshot, since), timeout_s)

    async def _ask_all(
        self, asked: dict[int, asyncio.Future[T]], question: Callable[[Engine], Callable[[], T]], timeout_s: float
    ) -> dict[int, T | None]:
        """Answers of all living replicas; one that has not answered the question before is not asked another."""
        living = self._replicas.living()
        for index, engine in living.items():
            before = asked.get(index)
            if before is None or before.done():
                asked.pop(index, None)
                with contextlib.suppress(WorkerDiedError):
                    asked[index] = asyncio.wrap_future(engine.ask(question(engine)))
        asked_now = {index: asked[index] for index in living if index in asked}
        if asked_now:
            await asyncio.wait(asked_now.values(), timeout=timeout_s)
        return {index: answer.result() if answer.done() else None for index, answer in asked_now.items()}

    def explain(self, request_id: str, tenant: str | None = None) -> list[Explanation]:
        """Where the time of every request went that a client means by this id; call it from any thread."""
        found, ids = [], self._ids(request_id)
        with_tenant = bool(self._config.api_keys)
        for index, engine in sorted(self._replicas.engines.items()):
            lives = _lives(engine, ids, tenant)
            if lives:
                record = engine.journal.record(self._clock())
                bounds = {each.name: each for each in engine.scheduler.bounds}
                found += [
                    explain(
                        life,
                        record,
                        bounds[life.request_class.name],
                        index,
                        with_tenant=with_tenant,
                        step_s=engine.mean_step_s,
                    )
                    for life in lives
                ]
        return found

    def timeline(self, num_steps: int, tenant: str | None = None) -> JsonObject:
        """A trace of the newest steps of each replica and of their requests, or of a tenant's part in both.

        Call it from any thread.
        """
        return trace(
            [
                ReplicaTrace(
                    index,
                    engine.journal.record(self._clock()),
                    [life for life in engine.journal.lives() if tenant in (None, life.tenant)],
                    own_steps_only=tenant is not None,
                    machine=engine.machine,
                )
                for index, engine in sorted(self._replicas.engines.items())
            ],
            num_steps,
        )

    def _ids(self, request_id: str) -> list[str]:
        """What a client means by an id: its own requests, and those of others that its answers came from."""
        return [request_id, *self._requests.coalesced_with(request_id)]


def _lives(engine: Engine, ids: Sequence[str], tenant: str | None) -> list[RequestRecord]:
    names = frozenset(name for each in ids for name in client_ids(each))
    return [life for life in engine.journal.lives() if tenant in (None, life.tenant) and answers_to(life, names)]
