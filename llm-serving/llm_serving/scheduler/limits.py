"""Limits of steps, of the running batch and of the bounds on waiting."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

MAX_WEIGHT_DIVISOR: Final = 8
"""Maximum divisor, because wait bounds grow with it."""


class PreemptionMode(enum.StrEnum):
    """What happens to the KV cache of a preempted request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """It is swapped out to host memory, if there is room."""
    AUTO = "auto"
    """The cheaper of the two."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    """Token budget of a step, for prefill and decode together; at least `max_num_seqs`."""
    max_num_seqs: int
    """Number of running slots."""
    max_prefill_seqs: int
    """Maximum number of prompts (or chunks of prompts) in one step."""
    max_model_len: int
    """Maximum number of tokens of a request."""
    max_prefill_gap: int = 16
    """Maximum number of consecutive steps that leave out prompts which could run."""
    max_preemptions: int = 8
    """Maximum number of preemptions of a request. After them, it is admitted with all blocks that it can ever need."""
    max_overtakes: int = 0
    """Maximum number of times that the order admits later requests before the oldest request of a class."""
    max_head_start_steps: int = 256
    """Maximum number of steps by which a priority shifts a request within its class."""
    quantum_steps: int = 64
    """Steps by which a lower class may exceed its share of a slot before a higher class preempts it."""
    max_steps_in_flight: int = 1
    """Maximum number of steps that are formed before the reply to the first of them."""
    max_long_prefill_tokens: int | None = None
    """Maximum number of tokens of one prompt in a step while other prompts wait; None: no limit."""
    separate: bool = False
    """Whether a step computes either prompts or decoding requests, never both."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    swap_block_cost_tokens: float = 4.0
    """Number of tokens computed in the time that swapping one block out and in takes."""
    static_batching: bool = False
    """Whether a new batch is admitted only after the previous one has finished; a baseline for comparisons."""
    max_running_per_tenant: int | None = None
    """Maximum number of requests of a tenant that hold or held a slot; None: no limit. Beams of a search that has a
    slot do not count.
    """
    max_running_of_tenant: dict[str, int] = field(default_factory=dict)
    """Tenant -> its own limit."""
    num_schedulers: int = 1
    """Number of schedulers (one per replica) that share class weights and tenant limits."""
    batch_waiting_time: float = 0.0
    """Seconds to wait after the first arrival for a batch to fill."""

    @property
    def weight_divisor(self) -> int:
        """Divisor of a class's weight here while the class exceeds its share across all schedulers.

        With a divisor of twice the number of schedulers, a class that has all other schedulers to itself still gets its
        share of the whole, if that share is at most half of what it gets there.
        """
        return min(2 * self.num_schedulers, MAX_WEIGHT_DIVISOR) if self.num_schedulers > 1 else 1
