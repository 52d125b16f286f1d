"""Policies: whether a step begins with prefill or decode, within the scheduler's bounds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import PolicyName


class Preference(enum.Enum):
    """The stage that gets the token budget of a step first. The other stage gets the rest."""

    PREFILL_FIRST = enum.auto()
    DECODE_FIRST = enum.auto()
    DECODE_ONLY = enum.auto()
    """Decode only. The step computes prompts only if no request can decode."""


class PolicyInput(NamedTuple):
    """What a policy knows of the scheduler before a step."""

    num_decoding: int
    prompts_wait: bool


class Policy(Protocol):
    max_decode_gap: int
    """Maximum number of consecutive steps whose prefills leave out a decoding request."""
    max_prompt_gap: int | None
    """Maximum number of consecutive steps that begin with decoding while prompts wait. None: `max_prefill_gap`."""
    fills_steps: bool
    """Whether prefills use the token budget that decoding requests leave."""
    honours_classes: bool
    """Whether classes and priorities order requests. If not, requests run in order of arrival."""

    def prefer(self, load: PolicyInput) -> Preference:
        """Return the stage that the next step begins with. The scheduler calls this once for each step."""


class PrefillFirst:
    """Prefill before decode. After `max_consecutive_prefill_steps` steps without decoding, a step decodes."""

    honours_classes = True
    max_prompt_gap: int | None = 1
    fills_steps = True

    def __init__(self, config: ServingConfig) -> None:
        self.max_decode_gap = config.scheduler.max_consecutive_prefill_steps

    def prefer(self, load: PolicyInput) -> Preference:
        del load
        return Preference.PREFILL_FIRST


class DecodeFirst:
    """Decode before prefill. A step computes prompts if no request decodes or `max_prefill_gap` steps had no prompt."""

    honours_classes = True
    max_decode_gap = 1
    max_prompt_gap: int | None = None
    fills_steps = False

    def __init__(self, config: ServingConfig) -> None:
        del config

    def prefer(self, load: PolicyInput) -> Preference:
        del load
        return Preference.DECODE_ONLY


class Mixed:
    """Decode, then fill the token budget with chunked prefills, as in Sarathi-Serve (Agrawal et al. 2024)."""

    honours_classes = True
    max_decode_gap = 1
    max_prompt_gap: int | None = None
    fills_steps = True

    def __init__(self, config: ServingConfig) -> None:
        del config

    def prefer(self, load: PolicyInput) -> Preference:
        del load
        return Preference.DECODE_FIRST


class Throughput:
    """MindIE's rule: prefill once empty slots have wasted as much time as a prefill costs.

    A prefill step delays each decoding request by the duration of the prefill. A decode step while prompts wait wastes
    its duration once for each empty slot.
    """

    honours_classes = True
    max_prompt_gap: int | None = None
    fills_steps = False

    def __init__(self, config: ServingConfig) -> None:
        self.max_decode_gap = config.scheduler.max_consecutive_prefill_steps
        self._prefill_ms = config.scheduler.prefill_time_ms_per_req
        self._decode_ms = config.scheduler.decode_time_ms_per_req
        self._num_slots = config.model.decode_batch_size
        self._waste = 0.0

    def prefer(self, load: PolicyInput) -> Preference:
        if not load.prompts_wait:
            return Preference.DECODE_FIRST
        cost = self._prefill_ms * load.num_decoding
        self._waste += self._decode_ms * (self._num_slots - load.num_decoding)
        if cost > self._waste:
            return Preference.DECODE_ONLY
        self._waste = 0.0
        return Preference.PREFILL_FIRST


class Fcfs:
    """First come, first served: decode, then prompts in order of arrival. Priorities have no effect."""

    honours_classes = False
    max_decode_gap = 1
    max_prompt_gap: int | None = None
    fills_steps = True

    def __init__(self, config: ServingConfig) -> None:
        del config

    def prefer(self, load: PolicyInput) -> Preference:
        del load
        return Preference.DECODE_FIRST


POLICIES: dict[str, Callable[[ServingConfig], Policy]] = {
    PolicyName.PREFILL_FIRST: PrefillFirst,
    PolicyName.DECODE_FIRST: DecodeFirst,
    PolicyName.MIXED: Mixed,
    PolicyName.THROUGHPUT: Throughput,
    PolicyName.FCFS: Fcfs,
}
