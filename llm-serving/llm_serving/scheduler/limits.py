"""What one step and one batch may hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

MAX_WEIGHT_DIVISOR: Final = 8
"""Bounds on waiting grow with it, so it does not grow with the number of schedulers for ever."""


class PreemptionMode(enum.StrEnum):
    """What becomes of what a preempted request has computed."""

    RECOMPUTE = "recompute"
    """It is computed again."""
    SWAP = "swap"
    """It waits in host memory, where there is room."""
    AUTO = "auto"
    """Whichever costs less."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    """Token budget of a step, prompts and decoding together; at least `max_num_seqs`."""
    max_num_seqs: int
    """Most running requests."""
    max_prefill_seqs: int
    """Most prompts (or parts of prompts) in one step."""
    max_model_len: int
    """Most tokens of a request."""
    max_prefill_gap: int = 16
    """Most steps in a row that may leave out prompts which could run."""
    max_preemptions: int = 8
    """Times a request may lose its place; after that it is admitted with all it can ever need, and keeps it."""
    max_overtakes: int = 0
    """Times the oldest request of a class may be overtaken by those the order prefers; 0: by nobody."""
    max_head_start_steps: int = 256
    """Steps by which a priority moves a request forward or back in its class, at most."""
    quantum_steps: int = 64
    """Steps that a lower class may have more of a place than its weight gives it, before a higher one takes it back."""
    max_steps_in_flight: int = 1
    """Steps that are formed before the result of the first of them is known, at most."""
    max_long_prefill_tokens: int | None = None
    """Most tokens of a step for one prompt while others wait for some; None: no limit."""
    separate: bool = False
    """A step computes prompts or decodes, never both."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    swap_block_cost_tokens: float = 4.0
    """Tokens computed in the time that one block is moved out and in."""
    static_batching: bool = False
    """Admit a new batch only when the one before it has ended: the baseline for comparisons."""
    max_running_per_tenant: int | None = None
    """Most requests of a tenant that have a place or had one, but for further beams of a search; None: no limit."""
    max_running_of_tenant: dict[str, int] = field(default_factory=dict)
    """The same for single tenants."""
    num_schedulers: int = 1
    """That classes and tenants share: weights, and what limits a tenant, hold for all of them together."""
    batch_waiting_time: float = 0.0
    """Seconds to wait after the first arrival for a batch to fill."""

    @property
    def weight_divisor(self) -> int:
        """By what the weight of a class is divided here while it is ahead of its share of all schedulers.

        So it can have all of the others to itself and come to its share of the whole all the same, if that is no more
        than half of what it has there.
        """
        return min(2 * self.num_schedulers, MAX_WEIGHT_DIVISOR) if self.num_schedulers > 1 else 1
