"""Admission control: refuses a request early if the queue is full or the first token would come too late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.admission.queue_limits import AdmissionQueue, QueueLimit
from llm_serving.admission.ttft_predictor import NO_STEPS, InFlightSteps, QueueAhead, ReplicaSpeed
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import Caller, RequestClass, class_of
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import CapacityError, TooLateError
from llm_serving.observability.component_metrics import ClassMetrics

RETRY_SHARE: Final = 0.6
"""Fraction of the drain rate that is reserved for retries of refused clients. New requests use the rest."""
MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 120.0
"""Maximum Retry-After in seconds. The official OpenAI client ignores longer ones."""
JITTER: Final = 0.1
"""Maximum fraction of a delay that is added at random, so that refused clients do not return at the same time."""
MAX_SOURCES: Final = 256
"""Maximum number of clients whose retries are spread separately. All others count as one."""
IDLE_S: Final = 10.0
"""Seconds without a step after which the measured speed of an idle replica is too old to refuse a request."""
MAX_REFUSED: Final = 20_000
"""Maximum number of refused requests, the latest ones, that are recorded for `llm-serving advice`."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    index: int
    num_replicas: int
    """Number of replicas over which the requests of a group are spread."""
    speed: ReplicaSpeed | None
    honours_classes: bool
    in_flight: InFlightSteps = NO_STEPS
    num_cached_tokens: int = 0


class RefusedRequests(NamedTuple):
    """A group of requests that were refused together, at `time` on the engine's clock."""

    time: float
    prompt_lens: tuple[int, ...]
    """Prompt tokens of each request, or a lower bound if its text was not tokenized."""
    priority: int
    tenant: str


class RetrySchedule:
    """Spreads the retries of refused clients over time, so that `Retry-After` grows with the number of refusals.

    All clients (`source`) that have a scheduled retry get equal shares of the server's admission rate. A refusal of `n`
    requests delays the client's next retry by the time in which the client's share admits `n` requests. So a client
    that floods the server mostly delays itself.
    """

    def __init__(self, seed: int = 0) -> None:
        self._last_retry: dict[tuple[str, str], float] = {}
        """(limit, source) -> time of the latest scheduled retry."""
        self._random = random.Random(seed)

    def delay_s(self, limit: str, source: str, num_requests: int, rate: float, min_delay_s: float, now: float) -> float:
        """Return the seconds after which a refused client should retry, at most `MAX_RETRY_AFTER_S`. `num_requests`:
        how many requests were refused. `rate`: how many are admitted per second. If the limit with the name `limit`
        counts tokens, both are numbers of tokens.
        """
        self._last_retry = {key: time for key, time in self._last_retry.items() if time > now}
        key = (limit, source)
        if key not in self._last_retry and len(self._last_retry) >= MAX_SOURCES:
            key = (limit, "")
        earliest = now + max(MIN_RETRY_AFTER_S, min_delay_s)
        before = self._last_retry.get(key, earliest)
        num_sources = len({name for each, name in self._last_retry if each == limit} | {key[1]})
        retry = max(before, earliest) + num_requests * num_sources / (RETRY_SHARE * rate)
        latest = now + MAX_RETRY_AFTER_S / (1 + JITTER)
        self._last_retry[key] = retry = min(retry, latest)
        return (retry - now) * (1 + JITTER * self._random.random())


class AdmissionControl:
    """Decides whether a request is admitted, before it is submitted to an engine. Only the event loop may call it."""

    def __init__(
        self, config: ServingConfig, queue: AdmissionQueue, metrics: ClassMetrics, clock: Clock = monotonic
    ) -> None:
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._retries = RetrySchedule()
        self._refused: deque[RefusedRequests] = deque()
        self._num_refused = 0
        self.reload(config)

    def reload(self, config: ServingConfig) -> None:
        self._classes = config.request_classes
        self._slo_factor = config.scheduler.slo_refusal_factor
        self._prefix_caching = config.scheduler.prefix_caching

    def refused_since(self, time: float) -> list[RefusedRequests]:
        return [each for each in self._refused if each.time >= time]

    def check(
        self,
        prompt_lens: Sequence[int],
        caller: Caller,
        replica: ReplicaLoad,
        uncached_lens: Sequence[int] | None = None,
    ) -> float | None:
        """Check whether a group of requests is admitted, all or none.

        Return the predicted seconds until all have a first token, or None if they are unknown. `replica`: replica that
        would serve the first request. `uncached_lens`: number of tokens to compute of each prompt, by default all.

        Raises:
            RequestError: The group would exceed a limit even in an empty queue.
            CapacityError: The group exceeds a limit now, or its predicted time to first token is too far above the SLO.
            TooLateError: The first token is predicted after the client's deadline.
        """
        if caller.deadline is not None:
            self.check_deadline(uncached_lens or prompt_lens, caller, replica)
        request_class = class_of(caller.priority, self._classes)
        limits = self._queue.limits(len(prompt_lens), sum(prompt_lens), request_class, caller.tenant)
        for each in limits:
            if each.amount > each.limit:
                self._metrics.refused(request_class, "never_fits", len(prompt_lens))
                raise each.never_fits
        predicted_s = self.predict_s(uncached_lens or prompt_lens, request_class, caller.tenant, replica)
        for each in limits:
            if each.used + each.amount > each.limit:
                self._record_refusal(each.name, request_class, prompt_lens, caller)
                raise self._capacity_error(each.refusal, limits, caller, predicted_s)
        slo_s = request_class.ttft_slo_s
        if predicted_s is None or slo_s is None or self._slo_factor is None or not self._is_current(replica):
            return predicted_s
        if predicted_s > slo_s * self._slo_factor:
            self._record_refusal("slo", request_class, prompt_lens, caller)
            keys = f"request_classes.{request_class.name}.ttft_slo_s, scheduler_config.slo_refusal_factor"
            rule = f"more than {slo_s:g} s times {self._slo_factor:g}"
            message = f"the first token is expected in {predicted_s:.1f} s, {rule} ({keys})"
            raise self._capacity_error(message, limits[:1], caller, predicted_s, predicted_s - slo_s)
        return predicted_s

    def check_deadline(self, prompt_lens: Sequence[int], caller: Caller, replica: ReplicaLoad) -> None:
        """Raise TooLateError if the first token of the last request would come after the client's deadline."""
        assert caller.deadline is not None
        request_class = class_of(caller.priority, self._classes)
        predicted_s = self.predict_s(prompt_lens, request_class, caller.tenant, replica)
        left_s = caller.deadline - self._clock()
        if predicted_s is None or predicted_s <= left_s or not self._is_current(replica):
            return
        self._record_refusal("deadline", request_class, prompt_lens, caller)
        expected = f"the first token is expected in {predicted_s:.3g} s"
        message = f"{expected}, and `timeout_s` leaves {max(0.0, left_s):.3g} s"
        raise TooLateError(message, max(MIN_RETRY_AFTER_S, predicted_s - left_s), 1000 * predicted_s)

    def min_uncached(self, prompt_lens: Sequence[int]) -> Sequence[int]:
        """Return lower bounds of the tokens to compute of each prompt, for use before the prefix cache is searched."""
        return [1] * len(prompt_lens) if self._prefix_caching else prompt_lens

    def predict_s(
        self, prompt_lens: Sequence[int], request_class: RequestClass, tenant: str, replica: ReplicaLoad
    ) -> float | None:
        """Return the predicted seconds to the first token of the last of these requests, or None if unknown."""
        if (speed := replica.speed) is None:
            return None
        max_rank = request_class.rank if replica.honours_classes else None
        num_waiting, num_tokens = self._queue.waiting_ahead(replica.index, max_rank)
        num_requests = -(-len(prompt_lens) // replica.num_replicas)
        num_own = -(-sum(prompt_lens) * num_requests // len(prompt_lens)) - replica.num_cached_tokens
        num_finishes, tenant_slots = 0, self._queue.max_running(tenant)
        if tenant_slots is not None:
            num_finishes = self._queue.num_unfinished_of(tenant) + num_requests - tenant_slots
        return speed.seconds_to_first_token(
            QueueAhead(
                num_waiting + num_requests,
                num_tokens + max(num_requests, num_own),
                self._queue.load(replica.index, max_rank).num_running,
                self._queue.load(replica.index).num_running,
                replica.in_flight,
                max(0.0, self._clock() - replica.in_flight.since),
                num_finishes,
                tenant_slots or 1,
            )
        )

    def _is_current(self, replica: ReplicaLoad) -> bool:
        load = self._queue.load(replica.index)
        is_idle = load.num_waiting == load.num_running == 0
        return not is_idle or self._clock() - replica.in_flight.since < IDLE_S

    def _record_refusal(
        self, reason: str, request_class: RequestClass, prompt_lens: Sequence[int], caller: Caller
    ) -> None:
        self._metrics.refused(request_class, reason, len(prompt_lens))
        self._refused.append(RefusedRequests(self._clock(), tuple(prompt_lens), caller.priority, caller.tenant))
        self._num_refused += len(prompt_lens)
        while self._num_refused > MAX_REFUSED:
            self._num_refused -= len(self._refused.popleft().prompt_lens)

    def _capacity_error(
        self, message: str, limits: Sequence[QueueLimit], caller: Caller, predicted_s: float | None, min_s: float = 0.0
    ) -> CapacityError:
        now, delay_s = self._clock(), 0.0
        for each in [each for each in limits if each.is_exceeded] or limits:
            rate = each.freed_per_second(now) or max(1.0, each.limit / 2)
            delay_s = max(delay_s, self._retries.delay_s(each.key, caller.source, each.amount, rate, min_s, now))
        if predicted_s is None:
            return CapacityError(message, delay_s)
        return CapacityError(message, delay_s, 1000 * predicted_s, delay_s + predicted_s)
