"""Policies: whether a step begins with prefill or decode. Orders of admission within a class."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import OrderName, PolicyName
from llm_serving.core.request import Request
from llm_serving.scheduler.fair_sharing import MAX_TENANTS

LENGTH_MEMORY: Final = 16
"""Time constant, in requests, of the moving average of output lengths."""
PROMPT_TOKENS_A_STEP: Final = 64
"""Assumed number of prompt tokens that take as long as one decode step."""
NO_DEADLINE_S: Final = 86_400.0
"""Assumed seconds from arrival to deadline for a request without a deadline whose class has no SLO."""


class Preference(enum.Enum):
    """The stage that gets the token budget of a step first. The other stage gets the rest."""

    PREFILL_FIRST = enum.auto()
    DECODE_FIRST = enum.auto()
    DECODE_ONLY = enum.auto()
    """The step computes prompts only if no request can decode."""


class Policy:
    """Base class of the policies. Unless a policy overrides `prefer`, all its steps prefer the same stage."""

    preference = Preference.DECODE_FIRST
    max_decode_gap = 1
    """Maximum number of consecutive steps whose prefills leave out a decoding request."""
    max_prompt_gap: int | None = None
    """Maximum consecutive steps that begin with decoding while prompts wait. None: `max_prefill_gap` applies."""
    fills_steps = True
    """Whether prefills use the token budget that decoding requests leave."""
    honours_classes = True
    """Whether classes and priorities order requests. If not, requests run in order of arrival."""

    def __init__(self, config: ServingConfig) -> None:
        del config

    def prefer(self, num_decoding: int, *, prompts_wait: bool) -> Preference:
        del num_decoding, prompts_wait
        return self.preference


class PrefillFirst(Policy):
    """Prefill before decode. After `max_consecutive_prefill_steps` steps without decoding, a step decodes."""

    preference = Preference.PREFILL_FIRST
    max_prompt_gap = 1

    def __init__(self, config: ServingConfig) -> None:
        self.max_decode_gap = config.scheduler.max_consecutive_prefill_steps


class Mixed(Policy):
    """Decode, then fill the token budget with chunked prefills, as in Sarathi-Serve (Agrawal et al. 2024)."""


class DecodeFirst(Policy):
    """Decode before prefill, unless no request can decode or `max_prefill_gap` steps in a row left prompts waiting."""

    preference = Preference.DECODE_ONLY
    fills_steps = False


class Fcfs(Policy):
    """First come, first served: like `Mixed`, with prompts in order of arrival. Priorities have no effect."""

    honours_classes = False


class Throughput(Policy):
    """MindIE's rule: prefill once empty slots have wasted as much time as a prefill costs.

    A prefill costs its duration multiplied by the number of decoding requests, which it delays. While prompts wait,
    each decode step wastes its duration multiplied by the number of empty slots.
    """

    fills_steps = False

    def __init__(self, config: ServingConfig) -> None:
        self.max_decode_gap = config.scheduler.max_consecutive_prefill_steps
        self._prefill_ms = config.scheduler.prefill_time_ms_per_req
        self._decode_ms = config.scheduler.decode_time_ms_per_req
        self._num_slots = config.model.decode_batch_size
        self._waste = 0.0

    def prefer(self, num_decoding: int, *, prompts_wait: bool) -> Preference:
        if not prompts_wait:
            return Preference.DECODE_FIRST
        cost = self._prefill_ms * num_decoding
        self._waste += self._decode_ms * (self._num_slots - num_decoding)
        if cost > self._waste:
            return Preference.DECODE_ONLY
        self._waste = 0.0
        return Preference.PREFILL_FIRST


POLICIES: dict[str, Callable[[ServingConfig], Policy]] = {
    PolicyName.PREFILL_FIRST: PrefillFirst,
    PolicyName.DECODE_FIRST: DecodeFirst,
    PolicyName.MIXED: Mixed,
    PolicyName.THROUGHPUT: Throughput,
    PolicyName.FCFS: Fcfs,
}


class Order:
    """Order of a class's waiting requests. One of every `max_overtakes` + 1 admissions takes the oldest instead."""

    shares_fairly = False
    """Whether the tenant with the least service goes first. `sort_key` then orders the requests of one tenant."""
    record_finished: Callable[[Request], None] | None = None
    """Callback that learns the output length of each finished request. It is None if the order ignores lengths."""

    def sort_key(self, request: Request) -> float:
        """Return the sort key; smaller keys go first. Equal keys go in order of arrival, shifted by priorities."""
        del request
        return 0.0


class ArrivalOrder(Order):
    """Order of arrival."""


class FairOrder(Order):
    """Fair sharing among tenants."""

    shares_fairly = True


class ShortestOrder(Order):
    """Shortest job first. The expected output length is the mean length of the tenant's finished requests in the class,
    at most `max_tokens`. `PROMPT_TOKENS_A_STEP` prompt tokens count as much as one output token.
    """

    def __init__(self) -> None:
        self._mean_lengths: dict[tuple[str, str], float] = {}

    def sort_key(self, request: Request) -> float:
        most = request.sampling.max_tokens
        mean = self._mean_lengths.get((request.request_class.name, request.tenant), float(most))
        return min(mean, most) + request.num_prompt_tokens / PROMPT_TOKENS_A_STEP

    def record_finished(self, request: Request) -> None:
        length = len(request.output_token_ids)
        if not length:
            return
        key = (request.request_class.name, request.tenant)
        mean = self._mean_lengths.pop(key, float(length))
        self._mean_lengths[key] = mean + (length - mean) / LENGTH_MEMORY
        if len(self._mean_lengths) > MAX_TENANTS:
            del self._mean_lengths[next(iter(self._mean_lengths))]


class DeadlineOrder(Order):
    """Earliest deadline first (Liu and Layland 1973). The default deadline is arrival plus the class's TTFT SLO."""

    def sort_key(self, request: Request) -> float:
        if request.deadline is not None:
            return request.deadline
        slo_s = request.request_class.ttft_slo_s
        return request.arrival_time + (NO_DEADLINE_S if slo_s is None else slo_s)


ORDERS: Final[dict[str, Callable[[], Order]]] = {
    OrderName.FAIR: FairOrder,
    OrderName.ARRIVAL: ArrivalOrder,
    OrderName.SHORTEST: ShortestOrder,
    OrderName.DEADLINE: DeadlineOrder,
}
