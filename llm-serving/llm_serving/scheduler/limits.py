"""Limits and other settings of one scheduler, for its steps, running batch and waiting requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

MAX_WEIGHT_DIVISOR: Final = 8


class PreemptionMode(enum.StrEnum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits and settings of one scheduler. `SchedulerConfig` explains those that are keys of the configuration."""

    max_num_batched_tokens: int
    """Token budget of a step: prompt and output tokens together. It is at least `max_num_seqs`."""
    max_num_seqs: int
    max_prefill_seqs: int
    max_model_len: int
    max_prefill_gap: int = 16
    """Maximum number of consecutive steps that compute no prompt although one could run."""
    max_preemptions: int = 8
    """Maximum number of preemptions of a request. After the last one, admission allocates all blocks up to its end."""
    max_overtakes: int = 0
    max_head_start_steps: int = 256
    quantum_steps: int = 64
    max_steps_in_flight: int = 1
    whole_prompts: bool = False
    """Whether a step computes each prompt at once. `max_num_batched_tokens` is then at least `max_model_len`."""
    max_long_prefill_tokens: int | None = None
    separate: bool = False
    """Whether each step computes only prompts or only decoding requests."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    swap_block_cost_tokens: float = 4.0
    static_batching: bool = False
    """Whether a new batch is admitted only after the previous one has finished; a baseline for comparisons."""
    max_running_per_tenant: int | None = None
    max_running_of_tenant: dict[str, int] = field(default_factory=dict)
    num_schedulers: int = 1
    """Number of schedulers (one per replica) that share class weights and tenant limits."""
    batch_waiting_time: float = 0.0

    @property
    def weight_divisor(self) -> int:
        return min(2 * self.num_schedulers, MAX_WEIGHT_DIVISOR) if self.num_schedulers > 1 else 1
