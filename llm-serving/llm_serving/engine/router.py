"""Which replica gets a request, asked on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from llm_serving.admission.door import Door, Replica
from llm_serving.admission.load_estimator import Measured
from llm_serving.admission.slots import Slots
from llm_serving.admission.waiting_room import WaitingRoom
from llm_serving.config.schema import ServingConfig
from llm_serving.core.caller import Caller
from llm_serving.core.choices import RoleName
from llm_serving.core.clock import Clock
from llm_serving.core.request_class import class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.engine import Engine
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.prompt_blocks import PromptBlocks, block_names
from llm_serving.engine.replicas import Replicas
from llm_serving.engine.request_stream import RequestStream
from llm_serving.engine.routing import ROUTINGS, Candidate
from llm_serving.errors import UnavailableError
from llm_serving.kvcache import BlockManager


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
        room: WaitingRoom,
        door: Door,
        clock: Clock,
    ) -> None:
        self.rule = ROUTINGS[config.serving.routing]()
        self._config = config
        roles = config.roles
        self._prefilling = {index for index, role in enumerate(roles) if role is RoleName.PREFILL}
        self._decoding = {index for index, role in enumerate(roles) if role is RoleName.DECODE}
        self._replicas = replicas
        self._requests = requests
        self._room = room
        self._door = door
        self._clock = clock
        self._prompts = PromptBlocks()

    def reload(self, config: ServingConfig) -> None:
        """Another configuration counts; the rule stays."""
        self._config = config

    # --- requests ---------------------------------------------------------------------------------------------------

    def block_names(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller) -> list[bytes]:
        """Names of the blocks by which it is told what a replica has of a prompt; none where nothing depends on it."""
        living, scheduler = self._to_begin(self._replicas.open()), self._config.scheduler
        if not living or sampling.prompt_logprobs is not None or not scheduler.prefix_caching:
            return []
        is_compared = len(living) > 1 and self.rule.needs_prefixes
        may_be_refused = caller.deadline is not None or scheduler.slo_refusal_factor is not None
        if not (is_compared or may_be_refused):
            return []
        block_size = next(iter(living.values())).scheduler.blocks.block_size
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
        living = self._begin()
        present = {index: engine for index, engine in living.items() if engine.away is None}
        candidates = [self._candidate(each, prompt_lens[0], names) for each in sorted((present or living).items())]
        index = candidates[0].replica
        if len(candidates) > 1:
            request_class = class_of(caller.priority, self._config.request_classes)

            def predict(candidate: Candidate) -> float | None:
                at = self.seen(candidate.replica, living[candidate.replica], candidate.num_cached_tokens)
                forecast = self._door.predict(prompt_lens, request_class, caller.tenant, at)
                return None if forecast is None else forecast.seconds

            index = self.rule.choose(candidates, predict).replica
        self._check_away(index, living[index])
        cached = next(each.num_cached_tokens for each in candidates if each.replica == index)
        return Placed(index, living[index], cached)

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
                each[1].away is not None,
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

    def seen(self, index: int, engine: Engine, num_cached_tokens: int = 0) -> Replica:
        """A replica as the door sees it. One that has measured too little is expected to be as quick as another."""
        return Replica(
            index,
            len(self._replicas.open()),
            self._measured(engine) if engine.restarting is None else None,
            engine.scheduler.policy.honours_classes,
            engine.load.slots,
            engine.load.under_way,
            num_cached_tokens,
            self._slots_elsewhere(index),
        )

    def _slots_elsewhere(self, index: int) -> list[Slots]:
        living = self._replicas.living()
        return [each.load.slots for other, each in living.items() if other != index and each.load.slots is not None]

    def smallest_cache(self) -> BlockManager:
        """Of all replicas that get requests: what it can hold any of them can.

        Raises:
            UnavailableError: There is none.
        """
        return min((each.scheduler.blocks for each in self._living().values()), key=lambda each: each.longest)

    def _measured(self, engine: Engine) -> Measured | None:
        if engine.load.measured is not None:
            return engine.load.measured
        measured = (each.load.measured for each in self._replicas.living().values())
        other = next((each for each in measured if each is not None), None)
        return None if other is None else replace(other, num_slots=other.limits.max_num_seqs)

    def _living(self) -> dict[int, Engine]:
        living = self._replicas.open()
        if not living:
            raise UnavailableError(self._replicas.health().detail)
        return living

    def _begin(self) -> dict[int, Engine]:
        return self._to_begin(self._living())

    def _to_begin(self, living: dict[int, Engine]) -> dict[int, Engine]:
        """Those where requests begin: where all others are away, also those that are to decode."""
        chosen = {index: each for index, each in living.items() if index not in self._decoding}
        return chosen if any(each.away is None for each in chosen.values()) else living

    def _candidate(self, replica: tuple[int, Engine], num_prompt_tokens: int, names: Sequence[bytes]) -> Candidate:
        index, engine = replica
        blocks = engine.scheduler.blocks
        return Candidate(
            index,
            self._requests.num_of(engine),
            num_prompt_tokens,
            self._prompts.num_found(index, names, blocks.pool) * blocks.block_size,
            self._room.load(replicas=(index,)).num_owed_tokens,
            blocks.pool.num_used_blocks,
            blocks.block_size,
            0.0 if (measured := self._measured(engine)) is None else measured.token_s,
        )

    def _check_away(self, index: int, engine: Engine) -> None:
        away, now = engine.away, self._clock()
        if away is not None:
            wait_s = away.predicted_s(now)
            if wait_s is None or wait_s > self._config.serving.restart_wait_s:
                raise UnavailableError(f"WorkAgent {index} {away}", away.retry_after_s(now))
