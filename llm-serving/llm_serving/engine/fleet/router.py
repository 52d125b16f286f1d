"""Routing: the event loop chooses the replica that computes each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import Final, NamedTuple

from llm_serving.admission.admission_control import AdmissionControl, ReplicaLoad
from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.admission.ttft_predictor import ReplicaSpeed
from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import RoleName
from llm_serving.core.request_class import Caller, cache_namespace, class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.routing_policies import ROUTING_POLICIES, WITHOUT_PREFIXES, Candidate, Candidates
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.replicas import Replicas
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import UnavailableError
from llm_serving.kvcache import BlockManager, BlockPool
from llm_serving.kvcache.block_table import block_hash, namespace_hash

MAX_BLOCKS: Final = 1024
"""Maximum number of prompt blocks that routing looks up in the caches of the replicas."""


class OpenReplicas:
    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = engines

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(self.engines)

    @cached_property
    def caches(self) -> list[tuple[int, Callable[[bytes], bool]]]:
        return [(index, engine.scheduler.blocks.pool.is_cached) for index, engine in self.engines.items()]

    @cached_property
    def smallest_cache(self) -> BlockManager:
        return min((each.scheduler.blocks for each in self.engines.values()), key=lambda each: each.max_request_tokens)

    @property
    def first_available(self) -> int | None:
        return next((index for index, engine in self.engines.items() if engine.executor.restart_status is None), None)


def prompt_block_hashes(namespace: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks. The last token is always computed, so its block is left out."""
    hashes: list[bytes] = []
    previous = namespace_hash(namespace)
    for index in range(min(MAX_BLOCKS, (len(token_ids) - 1) // block_size)):
        previous = block_hash(previous, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(previous)
    return hashes


class PromptBlocks:
    """Prompt blocks of unfinished requests, by replica. Routing treats them as cached even before they are computed."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[int, Sequence[bytes]]] = {}
        """Request id -> (replica, hashes of its prompt blocks). Other classes only read it."""
        self._counts: dict[int, Counter[bytes]] = {}
        self._first_blocks: dict[bytes, Counter[int]] = {}

    def add(self, request_id: str, replica: int, hashes: Sequence[bytes]) -> None:
        if hashes:
            self.requests[request_id] = replica, hashes
            self._counts.setdefault(replica, Counter()).update(hashes)
            self._first_blocks.setdefault(hashes[0], Counter())[replica] += 1

    def remove(self, request_id: str) -> None:
        replica, hashes = self.requests.pop(request_id, (-1, ()))
        if not hashes:
            return
        counts = self._counts[replica]
        for each in hashes:
            counts[each] -= 1
            if not counts[each]:
                del counts[each]
        by_replica = self._first_blocks[hashes[0]]
        by_replica[replica] -= 1
        if not by_replica[replica]:
            del by_replica[replica]
        if not by_replica:
            del self._first_blocks[hashes[0]]

    def move(self, request_id: str, replica: int) -> None:
        _, hashes = self.requests.get(request_id, (replica, ()))
        self.remove(request_id)
        self.add(request_id, replica, hashes)

    def replicas_with(self, first: bytes, caches: Iterable[tuple[int, Callable[[bytes], bool]]]) -> set[int]:
        return {replica for replica, is_cached in caches if is_cached(first)}.union(self._first_blocks.get(first, ()))

    def num_found(self, replica: int, hashes: Sequence[bytes], pool: BlockPool) -> int:
        counts = self._counts.get(replica, Counter())
        for number, each in enumerate(hashes):
            if each not in counts and pool.find_cached(each) is None:
                return number
        return len(hashes)


class Route(NamedTuple):
    """The replica chosen for a request. `num_cached_tokens` of the prompt are cached there or being computed."""

    replica: int
    engine: Engine
    num_cached_tokens: int


@dataclass(eq=False)
class Router:
    """Chooses a running replica for each request, by the configured policy. A replica whose WorkAgent restarts gets
    requests only if no other replica accepts any. A drained replica gets none.
    """

    _config: ServingConfig
    _replicas: Replicas
    _requests: OpenRequests
    _queue: AdmissionQueue
    _admission: AdmissionControl
    _clock: Clock

    def __post_init__(self) -> None:
        config = self._config
        self.policy = ROUTING_POLICIES[config.serving.routing]
        self.latest = -1
        """Replica of the latest request that was submitted."""
        self.prefill_replicas = {index for index, role in enumerate(config.roles) if role is RoleName.PREFILL}
        self._decode_replicas = {index for index, role in enumerate(config.roles) if role is RoleName.DECODE}
        self.has_several = config.num_replicas > 1
        self.prompts = PromptBlocks()
        self._open = self._prefilling = OpenReplicas({})
        """`_open`: replicas that accept requests. `_prefilling`: the subset that computes prompts."""

    def reload(self, config: ServingConfig) -> None:
        self._config = config

    # --- requests ---------------------------------------------------------------------------------------------------

    def block_hashes(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller) -> list[bytes]:
        """Return the hashes of the prompt's blocks, or an empty list if routing and admission control need none."""
        scheduler = self._config.scheduler
        if not scheduler.prefix_caching or sampling.prompt_logprobs is not None:
            return []
        engines = self._first_stage().engines
        is_compared = len(engines) > 1 and self._config.serving.routing not in WITHOUT_PREFIXES
        may_be_refused = caller.deadline is not None or scheduler.slo_refusal_factor is not None
        if not engines or not (is_compared or may_be_refused):
            return []
        block_size = next(iter(engines.values())).scheduler.blocks.block_size
        namespace = cache_namespace(caller.tenant, caller.cache_salt, caller.adapter)
        return prompt_block_hashes(namespace, prompt_token_ids, block_size)

    def route(self, prompt_lens: Sequence[int], caller: Caller, hashes: Sequence[bytes] = ()) -> Route:
        """Return the best replica for a group of requests, without changing state. `hashes`: the first prompt's blocks.
        Raise UnavailableError if no replica accepts requests, or if the chosen WorkAgent will not restart soon.
        """
        fleet = self._first_stage()
        if not fleet.engines:
            raise UnavailableError(self._replicas.health().detail)
        if len(fleet.engines) > 1:
            route = self._choose(fleet, prompt_lens, caller, hashes)
        else:
            [(index, engine)] = fleet.engines.items()
            route = Route(index, engine, self._num_cached(index, engine, hashes) if hashes else 0)
        if (status := route.engine.executor.restart_status) is not None:
            now = self._clock()
            wait_s = status.predicted_s(now)
            if wait_s is None or wait_s > self._config.serving.restart_wait_s:
                raise UnavailableError(f"WorkAgent {route.replica} {status}", status.retry_after_s(now))
        return route

    def route_of(self, stream: RequestStream) -> Route | None:
        opened = self._requests.by_id.get(stream.request_id)
        if opened is None or opened.engine.dead is not None:
            return None
        index = self._replicas.index_of(opened.engine)
        # A static batch computes the prompt of each of its requests.
        num_shared = 0 if self._config.model.batching_strategy == "static" else opened.request.num_prompt_tokens - 1
        return None if index is None else Route(index, opened.engine, num_shared)

    def migration_targets(self, preferred: int | None = None) -> list[tuple[int, Engine]]:
        """Return the replicas that may continue a request whose prompt is computed, best first."""
        return sorted(
            self._replicas.living().items(),
            key=lambda each: (
                self._replicas.is_drained(each[0]),
                each[0] in self.prefill_replicas,
                each[1].executor.restart_status is not None,
                each[0] != preferred,
                self._requests.num_of[each[1]] + self._requests.num_migrating_to[each[1]],
                each[0],
            ),
        )

    # --- replicas ---------------------------------------------------------------------------------------------------

    def load_of(self, route: Route, speed_of_another: Callable[[], ReplicaSpeed | None] | None = None) -> ReplicaLoad:
        """Return the load of the route's replica. If its speed is not measured, `speed_of_another` provides one."""
        index, engine, num_cached_tokens = route
        speed = None
        if engine.restarting is None:
            speed = engine.ttft_predictor.speed
            if speed is None and self.has_several:
                speed = (speed_of_another or self._speed_of_another)()
        return ReplicaLoad(
            index,
            len(self._replicas.open()),
            speed,
            engine.scheduler.policy.honours_classes,
            engine.ttft_predictor.in_flight,
            num_cached_tokens,
        )

    def smallest_cache(self) -> BlockManager:
        """Return the KV cache with the lowest `max_request_tokens`. Raise UnavailableError if no replica is open."""
        if not self._first_stage().engines:
            raise UnavailableError(self._replicas.health().detail)
        return self._open.smallest_cache

    def _first_stage(self) -> OpenReplicas:
        """Return the replicas that may start a request: those that compute prompts, or, if none is available, all."""
        engines = self._replicas.open()
        if engines is not self._open.engines:
            self._open = self._prefilling = OpenReplicas(engines)
            if self._decode_replicas:
                others = {index: each for index, each in engines.items() if index not in self._decode_replicas}
                self._prefilling = OpenReplicas(others)
        if self._prefilling is not self._open and self._prefilling.first_available is None:
            return self._open
        return self._prefilling

    def _choose(
        self, fleet: OpenReplicas, prompt_lens: Sequence[int], caller: Caller, hashes: Sequence[bytes]
    ) -> Route:
        engines = fleet.engines
        by_load = self._requests.by_load(engines)
        with_prefix = self.prompts.replicas_with(hashes[0], fleet.caches) if hashes else set()
        found = [
            (index, self._num_cached(index, engines[index], hashes)) for _, index in by_load if index in with_prefix
        ]
        cached = {index: num_tokens for index, num_tokens in found if num_tokens}
        first_available = fleet.first_available
        speed_of_another = cache(self._speed_of_another)
        request_class = class_of(caller.priority, self._config.request_classes)

        def is_available(index: int) -> bool:
            # Any WorkAgent may be lost in the meantime.
            return first_available in (None, index) or engines[index].executor.restart_status is None

        def candidate_of(index: int) -> Candidate:
            blocks, predictor = engines[index].scheduler.blocks, engines[index].ttft_predictor
            speed = predictor.speed or speed_of_another()
            return Candidate(
                index,
                self._requests.num_of[engines[index]],
                prompt_lens[0],
                cached.get(index, 0),
                self._queue.load(index).num_uncached_tokens,
                blocks.pool.num_used_blocks,
                blocks.block_size,
                0.0 if speed is None else speed.token_s,
            )

        def predict(candidate: Candidate) -> float | None:
            route = Route(candidate.replica, engines[candidate.replica], candidate.num_cached_tokens)
            load = self.load_of(route, speed_of_another)
            return self._admission.predict_s(prompt_lens, request_class, caller.tenant, load)

        candidates = Candidates(fleet.indices, by_load, cached, candidate_of, is_available, self.latest)
        chosen, *others = islice(candidates.by_load(), 2)
        if others:
            chosen = self.policy(candidates, predict)
        return Route(chosen.replica, engines[chosen.replica], chosen.num_cached_tokens)

    def _speed_of_another(self) -> ReplicaSpeed | None:
        """Return the measured speed of the first replica that has one, or None. `num_slots` is replaced by
        `max_num_seqs`, because a full KV cache may have lowered the measured number.
        """
        for engine in list(self._replicas.engines.values()):
            if engine.dead is None and (speed := engine.ttft_predictor.speed) is not None:
                return replace(speed, num_slots=speed.limits.max_num_seqs)
        return None

    def _num_cached(self, index: int, engine: Engine, hashes: Sequence[bytes]) -> int:
        blocks = engine.scheduler.blocks
        return self.prompts.num_found(index, hashes, blocks.pool) * blocks.block_size
