"""The choice of a replica for each request, on the event loop: which replicas are open, and what each has cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import islice
from typing import Final, NamedTuple

from llm_serving.admission.admission_control import AdmissionControl, ReplicaLoad
from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.admission.ttft_predictor import ReplicaSpeed
from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import RoleName
from llm_serving.core.request_class import Caller, class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.routing_policies import ROUTINGS, Candidate, Candidates
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.replicas import Replicas
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import UnavailableError
from llm_serving.kvcache import BlockManager, BlockPool
from llm_serving.kvcache.block_table import block_hash, namespace_hash

MAX_BLOCKS: Final = 1024
"""Blocks of a prompt that are looked up."""


class Fleet:
    """
    Args:
        engines: By index, in ascending order.
    """

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = engines
        self.indices = tuple(engines)
        self.pools = [(index, engine.scheduler.blocks.pool.is_cached) for index, engine in engines.items()]

    @cached_property
    def smallest_cache(self) -> BlockManager:
        """What it can hold any of them can."""
        return min((each.scheduler.blocks for each in self.engines.values()), key=lambda each: each.max_request_tokens)

    @property
    def present(self) -> int | None:
        """One of them whose WorkAgent is there; None: all are away."""
        return next((index for index, engine in self.engines.items() if engine.restart_status is None), None)


def block_names(namespace: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of a prompt that need not be computed where somebody has them: never its last token."""
    names: list[bytes] = []
    previous = namespace_hash(namespace)
    for index in range(min(MAX_BLOCKS, (len(token_ids) - 1) // block_size)):
        previous = block_hash(previous, token_ids[index * block_size : (index + 1) * block_size])
        names.append(previous)
    return names


class PromptBlocks:
    """Blocks of the prompts of unfinished requests, by replica.

    What is not computed yet counts like what is: who comes behind the first request with a prefix finds it computed.
    """

    def __init__(self) -> None:
        self._names: dict[str, tuple[int, Sequence[bytes]]] = {}
        """By request: its replica and its blocks."""
        self._counts: dict[int, Counter[bytes]] = {}
        self._begun: dict[bytes, Counter[int]] = {}
        """By a prompt's first block, how many requests of each replica begin with it."""

    def enter(self, request_id: str, replica: int, names: Sequence[bytes]) -> None:
        if names:
            self._names[request_id] = replica, names
            self._counts.setdefault(replica, Counter()).update(names)
            self._begun.setdefault(names[0], Counter())[replica] += 1

    def leave(self, request_id: str) -> None:
        """The request has ended; one that is not known is left alone."""
        replica, names = self._names.pop(request_id, (-1, ()))
        counts = self._counts.get(replica)
        if counts is not None:
            for name in names:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]
        if names:
            begun = self._begun[names[0]]
            begun[replica] -= 1
            if not begun[replica]:
                del begun[replica]
            if not begun:
                del self._begun[names[0]]

    def move(self, request_id: str, replica: int) -> None:
        """Another replica has the request, and with it these blocks."""
        _, names = self._names.get(request_id, (replica, ()))
        self.leave(request_id)
        self.enter(request_id, replica, names)

    def having(self, name: bytes, pools: Iterable[tuple[int, Callable[[bytes], bool]]]) -> set[int]:
        """Replicas that have the block with which a prompt begins, or are to compute it.

        Args:
            name: Of the block.
            pools: (replica, `BlockPool.has` of its cache) of those that count.
        """
        return {replica for replica, has in pools if has(name)}.union(self._begun.get(name, ()))

    def num_found(self, replica: int, names: Sequence[bytes], pool: BlockPool) -> int:
        """Of these blocks, from the first on, how many a replica has in its cache or is to compute."""
        counts = self._counts.get(replica, Counter())
        for number, name in enumerate(names):
            if name not in counts and pool.find_cached(name) is None:
                return number
        return len(names)


class Placed(NamedTuple):
    """The replica of a request."""

    replica: int
    engine: Engine
    num_cached_tokens: int
    """Of its prompt, that this replica has or is about to have."""


class Router:
    """Gives requests to living replicas by the rule of the configuration; a request stays where it is.

    Replicas whose WorkAgent is away get none while others serve, drained ones none at all.
    """

    def __init__(
        self,
        config: ServingConfig,
        replicas: Replicas,
        requests: OpenRequests,
        queue: AdmissionQueue,
        admission: AdmissionControl,
        clock: Clock,
    ) -> None:
        self.rule = ROUTINGS[config.serving.routing]()
        self._config = config
        roles = config.roles
        self._prefilling = {index for index, role in enumerate(roles) if role is RoleName.PREFILL}
        self._decoding = {index for index, role in enumerate(roles) if role is RoleName.DECODE}
        self._replicas = replicas
        self._requests = requests
        self._queue = queue
        self._admission = admission
        self._clock = clock
        self._prompts = PromptBlocks()
        self._open = self._beginning = Fleet({})
        """Those that may be given requests, and of these those that may begin with one."""

    def reload(self, config: ServingConfig) -> None:
        """Another configuration counts; the rule stays."""
        self._config = config

    # --- requests ---------------------------------------------------------------------------------------------------

    def block_names(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller) -> list[bytes]:
        """Names of the blocks by which it is told what a replica has of a prompt; none where nothing depends on it."""
        fleet, scheduler = self._to_begin(), self._config.scheduler
        if not fleet.engines or sampling.prompt_logprobs is not None or not scheduler.prefix_caching:
            return []
        is_compared = len(fleet.engines) > 1 and self.rule.needs_prefixes
        may_be_refused = caller.deadline is not None or scheduler.slo_refusal_factor is not None
        if not (is_compared or may_be_refused):
            return []
        block_size = next(iter(fleet.engines.values())).scheduler.blocks.block_size
        return block_names(caller.cache_namespace, prompt_token_ids, block_size)

    def place(self, prompt_lens: Sequence[int], caller: Caller, names: Sequence[bytes] = ()) -> Placed:
        """The replica that gets the next request; asking changes nothing.

        Args:
            prompt_lens: Tokens of its prompt, and of those that belong together with it.
            caller: Who asks.
            names: Of the blocks of its prompt, as far as they are to be compared.

        Raises:
            UnavailableError: No WorkAgent is ready.
        """
        fleet = self._to_begin()
        engines = fleet.engines
        if not engines:
            raise UnavailableError(self._replicas.health().detail)
        by_load = self._requests.by_load(engines)
        cached = self._cached(fleet, by_load, names)
        present = fleet.present
        speed_of = self._speeds()
        candidates = Candidates(
            fleet.indices,
            by_load,
            cached,
            lambda index: self._candidate(
                index, engines[index], prompt_lens[0], cached.get(index, 0), speed_of(engines[index])
            ),
            # A WorkAgent may be lost at any moment.
            lambda index: present in (None, index) or engines[index].restart_status is None,
        )
        chosen, *others = islice(candidates.by_load(), 2)
        if others:
            request_class = class_of(caller.priority, self._config.request_classes)

            def predict(candidate: Candidate) -> float | None:
                index = candidate.replica
                at = self._seen(index, engines[index], candidate.num_cached_tokens, speed_of)
                return self._admission.predict_s(prompt_lens, request_class, caller.tenant, at)

            chosen = self.rule.choose(candidates, predict)
        engine = engines[chosen.replica]
        self._check_away(chosen.replica, engine)
        return Placed(chosen.replica, engine, chosen.num_cached_tokens)

    def moves(self, replica: int) -> bool:
        """Whether requests that begin at a replica go on at another."""
        return replica in self._prefilling

    def next_of(self, preferred: int | None = None) -> list[tuple[int, Engine]]:
        """Living replicas that may go on with a request whose prompt is computed, the best first.

        Those that get requests before drained ones, those that are to decode before those that are not, those whose
        WorkAgent is there before those where it is away; then the preferred one, and those with the fewest requests,
        those whose blocks are on the way there included.
        """
        engines = self._replicas.living().items()
        return sorted(
            engines,
            key=lambda each: (
                self._replicas.is_drained(each[0]),
                self.moves(each[0]),
                each[1].restart_status is not None,
                each[0] != preferred,
                self._requests.num_of(each[1]) + self._requests.num_coming(each[1]),
                each[0],
            ),
        )

    def move(self, request_id: str, replica: int) -> None:
        """Another replica has the request from now on."""
        self._prompts.move(request_id, replica)

    def beside(self, stream: RequestStream | None) -> Placed | None:
        """The living replica that has the request of a stream, as long as that has not ended."""
        opened = None if stream is None else self._requests.get(stream.request_id)
        if opened is None or opened.engine.dead is not None:
            return None
        index = self._replicas.index_of(opened.engine)
        # The prompt that both have is computed for the other one.
        num_shared = 0 if self._config.model.batching_strategy == "static" else opened.request.num_prompt_tokens - 1
        return None if index is None else Placed(index, opened.engine, num_shared)

    def enter(self, request_id: str, placed: Placed, names: Sequence[bytes]) -> None:
        """The request is given to this replica."""
        self._prompts.enter(request_id, placed.replica, names)
        self.rule.chosen(placed.replica)

    def leave(self, request_id: str) -> None:
        """The request has ended; twice changes nothing."""
        self._prompts.leave(request_id)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def seen(self, index: int, engine: Engine, num_cached_tokens: int = 0) -> ReplicaLoad:
        """Return what admission control needs of a replica; an unmeasured one counts as fast as another."""
        return self._seen(index, engine, num_cached_tokens, self._speeds())

    def _seen(
        self, index: int, engine: Engine, num_cached_tokens: int, speed_of: Callable[[Engine], ReplicaSpeed | None]
    ) -> ReplicaLoad:
        return ReplicaLoad(
            index,
            len(self._replicas.open()),
            speed_of(engine) if engine.restarting is None else None,
            engine.scheduler.policy.honours_classes,
            engine.ttft_predictor.in_flight,
            num_cached_tokens,
        )

    def smallest_cache(self) -> BlockManager:
        """Of all replicas that get requests: what it can hold any of them can.

        Raises:
            UnavailableError: There is none.
        """
        if not self._look().engines:
            raise UnavailableError(self._replicas.health().detail)
        return self._open.smallest_cache

    def _speeds(self) -> Callable[[Engine], ReplicaSpeed | None]:
        """Return a function for the speed of a replica, or of the first measured other one if it has none yet."""

        @cache
        def of_another() -> ReplicaSpeed | None:
            living = (each for each in list(self._replicas.engines.values()) if each.dead is None)
            other = next((speed for each in living if (speed := each.ttft_predictor.speed) is not None), None)
            return None if other is None else replace(other, num_slots=other.limits.max_num_seqs)

        def speed_of(engine: Engine) -> ReplicaSpeed | None:
            return of_another() if (speed := engine.ttft_predictor.speed) is None else speed

        return speed_of

    def _look(self) -> Fleet:
        """The replicas that may be given requests."""
        engines = self._replicas.open()
        if engines is not self._open.engines:
            self._open = self._beginning = Fleet(engines)
            if self._decoding:
                self._beginning = Fleet({index: each for index, each in engines.items() if index not in self._decoding})
        return self._open

    def _to_begin(self) -> Fleet:
        """Those where requests begin: where all others are away, also those that are to decode."""
        opened = self._look()
        return opened if self._beginning.present is None else self._beginning

    def _cached(self, fleet: Fleet, by_load: Sequence[tuple[int, int]], names: Sequence[bytes]) -> dict[int, int]:
        """Of replicas that have any of a prompt with blocks of these names, how many tokens; least loaded first."""
        having = self._prompts.having(names[0], fleet.pools) if names else ()
        cached = {}
        for index in [index for _, index in by_load if index in having] if having else ():
            blocks = fleet.engines[index].scheduler.blocks
            if num_blocks := self._prompts.num_found(index, names, blocks.pool):
                cached[index] = num_blocks * blocks.block_size
        return cached

    def _candidate(
        self, index: int, engine: Engine, num_prompt_tokens: int, num_cached_tokens: int, speed: ReplicaSpeed | None
    ) -> Candidate:
        blocks = engine.scheduler.blocks
        return Candidate(
            index,
            self._requests.num_of(engine),
            num_prompt_tokens,
            num_cached_tokens,
            self._queue.load(index).num_uncached_tokens,
            blocks.pool.num_used_blocks,
            blocks.block_size,
            0.0 if speed is None else speed.token_s,
        )

    def _check_away(self, index: int, engine: Engine) -> None:
        status, now = engine.restart_status, self._clock()
        if status is not None:
            wait_s = status.predicted_s(now)
            if wait_s is None or wait_s > self._config.serving.restart_wait_s:
                raise UnavailableError(f"WorkAgent {index} {status}", status.retry_after_s(now))
