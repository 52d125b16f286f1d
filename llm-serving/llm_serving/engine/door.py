"""Honest refusal: who would exceed a limit, or wait longer than its class was promised, is told so at once."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.engine.class_metrics import ClassMetrics
from llm_serving.engine.load_estimator import Measured, Queue
from llm_serving.engine.waiting_room import WaitingRoom
from llm_serving.errors import CapacityError, RequestError

UNKNOWN_RETRY_AFTER_S = 1.0
"""Told while too little has been measured."""


class Door:
    """Decides on the event loop, before anything is submitted."""

    def __init__(self, config: ServingConfig, room: WaitingRoom, metrics: ClassMetrics) -> None:
        self._classes = config.request_classes
        self._factor = config.scheduler.slo_refusal_factor
        self._room = room
        self._metrics = metrics

    def check(
        self,
        prompt_lens: Sequence[int],
        priority: int,
        tenant: str,
        *,
        replica: int,
        num_replicas: int,
        measured: Measured | None,
        honours_classes: bool,
    ) -> None:
        """Checks requests that belong together: all may come in, or none.

        Args:
            prompt_lens: Tokens of each prompt.
            priority: Of all of them.
            tenant: Who asks.
            replica: Where the first would go.
            num_replicas: Over which they are spread.
            measured: Of that replica.
            honours_classes: Whether its policy lets higher classes go first.

        Raises:
            RequestError: They would not come in even if nothing waited.
            CapacityError: They may not come in now.
        """
        request_class = class_of(priority, self._classes)
        num_requests, num_tokens = len(prompt_lens), sum(prompt_lens)
        try:
            self._room.check_group(num_requests, num_tokens, request_class, tenant)
        except RequestError:
            self._metrics.refused(request_class, "never_fits", num_requests)
            raise
        excess = self._room.excess(num_requests, num_tokens, request_class, tenant)
        if excess is None and (self._factor is None or request_class.ttft_slo_s is None):
            return
        max_rank = request_class.rank if honours_classes else None
        ahead = self._room.load(replicas=(replica,), max_rank=max_rank)
        num_running_in_all = self._room.load(replicas=(replica,)).num_running

        def seconds(num_requests: int, num_tokens: int) -> float | None:
            """Until so many requests of the queue have their first tokens."""
            if measured is None:
                return None
            queue = Queue(num_requests, num_tokens, ahead.num_running, num_running_in_all)
            return measured.seconds_to_first_token(queue)

        # A group is spread over the replicas.
        share, share_tokens = -(-num_requests // num_replicas), -(-num_tokens // num_replicas)
        estimate_s = seconds(ahead.num_waiting + share, ahead.num_waiting_tokens + share_tokens)
        estimate_ms = None if estimate_s is None else 1000 * estimate_s
        if excess is not None:
            self._metrics.refused(request_class, excess.limit, num_requests)
            drain_s = seconds(-(-excess.num_requests // num_replicas), -(-excess.num_tokens // num_replicas))
            retry_after = UNKNOWN_RETRY_AFTER_S if drain_s is None else drain_s
            raise CapacityError(excess.message, retry_after, estimate_ms)
        if estimate_s is not None:
            self._check_promise(request_class, estimate_s, num_requests)

    def _check_promise(self, request_class: RequestClass, estimate_s: float, num_requests: int) -> None:
        promised_s = request_class.ttft_slo_s
        assert promised_s is not None and self._factor is not None
        if estimate_s <= promised_s * self._factor:
            return
        self._metrics.refused(request_class, "slo", num_requests)
        place = f"request_classes.{request_class.name}.ttft_slo_s, scheduler_config.slo_refusal_factor"
        limit = f"{promised_s:g} s times {self._factor:g} ({place})"
        message = f"the first token is expected in {estimate_s:.1f} s, more than {limit}"
        raise CapacityError(message, estimate_s - promised_s, 1000 * estimate_s)
