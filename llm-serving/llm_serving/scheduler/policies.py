"""Policies: the stage that a step begins with, prefill or decode, within the scheduler's bounds."""

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
    """Prompts are computed only if no request can decode."""


class PolicyInput(NamedTuple):
    """The state before a step that policies may depend on."""

    num_decoding: int
    """Number of running requests past their prompt."""
    prompts_wait: bool
    """Whether a prompt, or a part of one, remains to be computed."""


class Policy(Protocol):
    max_decode_gap: int
    """Maximum number of consecutive steps in which prefills leave out a decoding request."""
    max_prompt_gap: int | None
    """Maximum number of consecutive steps that begin with decoding although prompts wait; None: `max_prefill_gap`."""
    fills_steps: bool
    """Whether prefills get the budget that decoding leaves in every step."""
    honours_classes: bool
    """Whether classes and priorities order requests. If not, they run in order of arrival."""

    def prefer(self, load: PolicyInput) -> Preference:
        """Return what the next step begins with. The scheduler calls it once per step, so a policy may count steps."""


class PrefillFirst:
    """Prefill before decode: early first tokens, and a decoding batch that fills quickly.

    A decoding request is left out of at most `max_consecutive_prefill_steps` consecutive steps.
    """

    honours_classes = True
    max_prompt_gap: int | None = 1
    fills_steps = True

    def __init__(self, config: ServingConfig) -> None:
        self.max_decode_gap = config.scheduler.max_consecutive_prefill_steps

    def prefer(self, load: PolicyInput) -> Preference:
        del load
        return Preference.PREFILL_FIRST


class DecodeFirst:
    """Decode before prefill: the smoothest streams, the latest first tokens.

    Prompts are computed when no request decodes, and at least every `max_consecutive_decode_steps` steps.
    """

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
    """Every running request in every step. Chunked prefills fill the rest of the token budget, as in Sarathi-Serve
    (Agrawal et al. 2024).
    """

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
    """Prefill once the empty slots of decode steps have cost as much as a prefill step delays decoding requests.

    MindIE's rule: a prefill step delays every decoding request by the time of a prompt; a decode step while prompts
    wait wastes its time on every empty slot.
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
    """First come, first served: running requests, then prompts in order of arrival, for all priorities."""

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
