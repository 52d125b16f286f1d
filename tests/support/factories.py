"""Factories with defaults, so that a test shows only the values that matter to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.window import CacheGroups, LayerWindow
from llm_serving.kvcache import BlockManager, StateSlots
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.scheduler import PreemptionMode, Schedule, Scheduler, SchedulerLimits, SchedulingRules
from llm_serving.scheduler.policies import ORDERS, POLICIES

_names = (f"request-{count}" for count in itertools.count())


def create_request(
    num_prompt_tokens: int = 4,
    *,
    request_id: str | None = None,
    priority: int = 0,
    tenant: str = "",
    fork_of: str | None = None,
    arrival_time: float = 0.0,
    stop_token_ids: frozenset[int] = frozenset(),
    **sampling: Any,
) -> Request:
    """Return a request whose prompt is 100, 101, ...; other keyword arguments are SamplingParams."""
    return Request(
        request_id=request_id or next(_names),
        prompt_token_ids=list(range(100, 100 + num_prompt_tokens)),
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
        stop_token_ids=stop_token_ids,
        priority=priority,
        tenant=tenant,
        fork_of=fork_of,
        arrival_time=arrival_time,
    )


def create_config(
    *, policy: str = "prefill_first", max_num_seqs: int = 8, max_decode_gap: int = 2, **scheduler: Any
) -> ServingConfig:
    """Return a configuration with these scheduler options."""
    return ServingConfig(
        model=ModelConfig(decode_batch_size=max_num_seqs),
        scheduler=SchedulerConfig(policy=policy, max_consecutive_prefill_steps=max_decode_gap, **scheduler),
    )


def create_classes(ageing_steps: int = 100, **changes: Any) -> tuple[RequestClass, ...]:
    """Return one class for each priority from -1 to 1 with weights 4, 2 and 1; `high=dict(...)` changes a class."""
    names = {"high": -1, "normal": 0, "low": 1}
    weights = {"high": 4, "normal": 2, "low": 1}
    return tuple(
        RequestClass(
            **{
                "name": name,
                "rank": rank,
                "weight": weights[name],
                "ageing_steps": ageing_steps,
                **changes.get(name, {}),
            }
        )
        for name, rank in names.items()
    )


def create_scheduler(
    *,
    policy: str = "prefill_first",
    num_blocks: int = 64,
    block_size: int = 4,
    num_swap_blocks: int = 0,
    prefix_caching: bool = False,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_prefill_seqs: int = 8,
    max_model_len: int = 256,
    max_decode_gap: int = 2,
    preemption_mode: str = PreemptionMode.RECOMPUTE,
    classes: Sequence[RequestClass] | None = None,
    order: str = "fair",
    window: int | None = None,
    windows: Sequence[LayerWindow] = (),
    exports: TransferPool | None = None,
    num_spare_states: int | None = None,
    adapters: AdapterSlots | None = None,
    **limits: Any,
) -> Scheduler:
    """`windows`: window of each group of layers; empty: one group, of `window`.
    `num_spare_states`: spare slots of a model with states of fixed size; None: the model has none."""
    has_states = num_spare_states is not None
    states = StateSlots(max_num_seqs + num_spare_states, max_num_seqs, block_size) if has_states else None
    config = create_config(policy=policy, max_num_seqs=max_num_seqs, max_decode_gap=max_decode_gap)
    rules = SchedulingRules(
        SchedulerLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_model_len=max_model_len,
            preemption_mode=PreemptionMode(preemption_mode),
            **limits,
        ),
        POLICIES[policy](config),
        create_classes() if classes is None else classes,
        ORDERS[order](),
        prefix_caching,
    )
    blocks = BlockManager(
        num_blocks,
        block_size,
        num_swap_blocks=num_swap_blocks,
        groups=CacheGroups.of(windows or (LayerWindow(window or 0),), max_num_batched_tokens, max_model_len),
        exports=exports,
        adapters=adapters,
        states=states,
    )
    return Scheduler(rules, blocks)


def rows(schedule: Schedule | None) -> list[tuple[str, int, int, bool]]:
    """Return (request id, tokens before, tokens computed, samples) of each row."""
    assert schedule is not None
    return [(row.request.request_id, row.num_computed, row.query_len, row.num_samples) for row in schedule.rows]


def run_step(scheduler: Scheduler, token_id: int = 7, now: float = 0.0) -> Schedule | None:
    """Schedule one step and update it with the same token for every sample."""
    schedule = scheduler.schedule(now)
    if schedule is not None:
        scheduler.update(schedule, [token_id] * sum(row.num_samples for row in schedule.rows))
    scheduler.check_integrity()
    return schedule
