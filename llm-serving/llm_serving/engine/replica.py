"""Builds the parts of one replica around an executor: scheduler, KV blocks and engine."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import OrderName
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock, monotonic
from llm_serving.core.window import CacheGroups, LayerWindow
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.executor.executor import Executor
from llm_serving.kvcache import BlockManager, StateSlots
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.kvcache.transfer_pool import DiskPrefixes, TransferPool
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.recording.record_files import RecordFiles
from llm_serving.recording.recorder import RecordedScheduler, Recorder
from llm_serving.scheduler import PreemptionMode, Scheduler, SchedulerLimits
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.policies import ORDERS, POLICIES
from llm_serving.speculation import DraftModelProposer, NgramProposer, SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

EPOCHS_PER_POOL: Final = 2**22
"""Distance between the first epochs of successive transfer pools, which use the same memory."""
_POOL_NUMBERS: Final = itertools.count()


def build_scheduler(
    config: ServingConfig,
    num_blocks: int,
    num_swap_blocks: int = 0,
    index: int = 0,
    windows: Sequence[LayerWindow] = (LayerWindow(),),
    clock: Clock = monotonic,
    whole_prompts: bool = False,
    *,
    num_state_slots: int = 0,
    num_state_pieces: int = 1,
) -> Scheduler:
    """Create the scheduler of replica `index`, which may record its decisions. `windows`: attention window of each
    group of layers. `whole_prompts`: whether a step must compute a prompt at once, because tokens attend to later ones.
    `num_state_pieces`: blocks that a recurrent state fills in a transfer.
    """
    scheduler, num_disk = config.scheduler, config.num_disk_blocks
    num_transfer = config.num_transfer_blocks - 2 * num_disk
    states = None
    if num_state_slots:
        sizes = num_state_slots, config.model.decode_batch_size, config.pa.block_size, num_state_pieces
        states = StateSlots(*sizes)
    blocks = BlockManager(
        num_blocks,
        config.pa.block_size,
        num_swap_blocks=num_swap_blocks,
        groups=CacheGroups.of(windows, scheduler.max_prefill_tokens, config.model.max_generate_length),
        exports=create_transfer_pool(num_transfer, index * num_transfer),
        states=states,
        adapters=AdapterSlots(config.lora.max_loras) if config.lora.is_enabled else None,
    )
    if num_disk:  # the pool's next `num_disk` ids belong to disk reads
        blocks.disk = DiskPrefixes(config.pa.block_size, create_transfer_pool(num_disk, 2 * index * num_disk))
    if whole_prompts:
        blocks.max_request_tokens = min(blocks.max_request_tokens, scheduler.max_prefill_tokens)
    rules = build_rules(config, blocks.max_request_tokens, whole_prompts=whole_prompts)
    if scheduler.record_path is None:
        return Scheduler(rules, blocks)
    name = f"replica-{index}"
    recorder = Recorder(
        RecordFiles(scheduler.record_path, name, scheduler.record_files), name, scheduler.record_file_bytes, clock
    )
    recorded = RecordedScheduler(rules, blocks, recorder)
    weakref.finalize(recorded, recorder.close)
    return recorded


def create_transfer_pool(num_blocks: int, first: int) -> TransferPool:
    return TransferPool(num_blocks, first, next(_POOL_NUMBERS) * EPOCHS_PER_POOL)


def build_rules(config: ServingConfig, max_request_tokens: int, *, whole_prompts: bool = False) -> SchedulingRules:
    """Return the scheduling rules. With `whole_prompts`, the longest request fits into the token budget of a step."""
    scheduler, model = config.scheduler, config.model
    max_model_len = min(model.max_generate_length, max_request_tokens)
    policy = POLICIES[scheduler.policy](config)
    limits = SchedulerLimits(
        max_num_batched_tokens=max(scheduler.max_prefill_tokens, max_model_len * whole_prompts),
        max_num_seqs=model.decode_batch_size,
        max_prefill_seqs=model.prefill_batch_size or model.decode_batch_size,
        max_model_len=max_model_len,
        max_prefill_gap=scheduler.max_consecutive_decode_steps,
        max_preemptions=scheduler.max_preemptions_per_request,
        max_overtakes=scheduler.max_overtakes if policy.honours_classes else 0,
        max_head_start_steps=scheduler.max_head_start_steps,
        quantum_steps=scheduler.quantum_steps,
        max_steps_in_flight=2 if scheduler.async_scheduling else 1,
        max_long_prefill_tokens=scheduler.max_long_prefill_tokens or max(1, scheduler.max_prefill_tokens // 2),
        whole_prompts=whole_prompts,
        separate=not scheduler.enable_mixed_chunk,
        preemption_mode=PreemptionMode(scheduler.preemption_mode),
        swap_block_cost_tokens=scheduler.swap_block_cost_tokens,
        static_batching=model.batching_strategy == "static",
        batch_waiting_time=model.batch_waiting_time,
        max_running_per_tenant=scheduler.max_running_per_tenant,
        num_schedulers=config.num_replicas,
        max_running_of_tenant={key.name: key.max_running for key in config.api_keys if key.max_running is not None},
    )
    caches = scheduler.prefix_caching and not whole_prompts
    classes = config.request_classes if policy.honours_classes else (RequestClass(name="all", rank=0),)
    order = scheduler.order or (OrderName.FAIR if scheduler.tenant_fairness else OrderName.ARRIVAL)
    if not policy.honours_classes:
        order = OrderName.ARRIVAL
    return SchedulingRules(limits, policy, classes, ORDERS[order](), caches)


def _longest_request(config: ServingConfig, blocks: BlockManager) -> str:
    configured = config.model.max_generate_length
    source = config.sources.get("model_config.max_generate_length", "default")
    if blocks.max_request_tokens < configured:
        held = blocks.max_request_tokens
        return f"a request has up to {held} tokens, as many as the KV cache holds ({configured}: {source})"
    text = f"a request has up to {configured} tokens ({source})"
    if blocks.has_sliding_window:
        most = blocks.max_blocks_of(configured)
        text += f" and holds at most {most} blocks: {_windows(blocks.groups)}"
    return text


def _windows(groups: CacheGroups) -> str:
    if len(groups.windows) == 1:
        return f"every layer sees {groups.windows[0].num_tokens} tokens"
    texts = []
    for window, count in Counter(groups.windows).items():
        unit = "chunks of " if window.is_chunked else ""
        seen = f"{unit}{window.num_tokens} tokens" if window.is_sliding else "all tokens"
        texts.append(f"{count} {'sees' if count == 1 else 'see'} {seen}")
    return f"its layers form {len(groups.windows)} groups: {', '.join(texts)}"


def build_drafter(
    config: ServingConfig, executor: Executor, clock: Clock, blocks: BlockManager
) -> SpeculationController | None:
    scheduler = config.scheduler
    if scheduler.speculative_method == "none":
        return None
    model = None
    if scheduler.draft_model_path is not None:
        model = DraftModelProposer(executor.propose, config.pa.block_size, clock)
    elif scheduler.speculative_method == "mtp":
        model = DraftModelProposer(executor.propose, config.pa.block_size, clock, blocks)
    ngram = NgramProposer(scheduler.prompt_lookup_min, clock=clock)
    return SpeculationController(scheduler.num_speculative_tokens, ngram, model, clock)


BuildDrafter = Callable[[ServingConfig, Executor, Clock, BlockManager], SpeculationController | None]


def build_engine(
    config: ServingConfig,
    num_blocks: int,
    executor: Executor,
    tokenizer: Tokenizer,
    metrics: Metrics,
    publish: Publish,
    index: int = 0,
    num_swap_blocks: int = 0,
    windows: Sequence[LayerWindow] = (LayerWindow(),),
    clock: Clock = monotonic,
    whole_prompts: bool = False,
    num_state_slots: int = 0,
    num_state_pieces: int = 1,
    build_drafter: BuildDrafter = build_drafter,
    **options: Any,
) -> Engine:
    """Create the scheduler (see `build_scheduler`) and the engine of replica `index`; `options` go to `Engine`."""
    sizes = {"num_state_slots": num_state_slots, "num_state_pieces": num_state_pieces}
    scheduler = build_scheduler(config, num_blocks, num_swap_blocks, index, windows, clock, whole_prompts, **sizes)
    longest = _longest_request(config, scheduler.blocks)
    text = "replica %d: the KV cache has %d blocks of %d tokens; %s"
    logger.info(text, index, num_blocks, config.pa.block_size, longest)
    if (states := scheduler.blocks.states) is not None:
        text = "replica %d has %d state slots, of which %d are reserved for running requests"
        logger.info(text, index, states.pool.num_blocks, states.max_running)
    if (num_disk := config.num_disk_blocks) > 0:
        options["disk_reads"] = create_transfer_pool(num_disk, (2 * index + 1) * num_disk)
    event_log = EventLog(config.serving.explain_requests, config.serving.timeline_steps)
    engine = Engine(
        scheduler,
        executor,
        tokenizer,
        metrics,
        publish,
        index=index,
        max_steps_in_flight=scheduler.limits.max_steps_in_flight,
        audit_every=config.serving.audit_every,
        event_log=event_log,
        restart_wait_s=config.serving.restart_wait_s,
        drafter=build_drafter(config, executor, clock, scheduler.blocks),
        clock=clock,
        **options,
    )
    engine.log_bounds()
    return engine
