"""The serving process: builds tokenizer, replicas, engine and HTTP server from a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from llm_serving.config.model_size import check_memory
from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import EngineName
from llm_serving.engine.adapters import AdapterRegistry
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.replica import build_engine
from llm_serving.executor.cluster.placement import open_placement
from llm_serving.executor.model_files import SameFiles
from llm_serving.executor.placement import Placement
from llm_serving.executor.supervisor import ConsistencyCheck, SupervisedExecutor, WorkAgentProcess, start_work_agent
from llm_serving.executor.worker_process import StartCancellation
from llm_serving.log import get_logger, logged_model
from llm_serving.models.pooling import pooling_mode
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics, StateSlotUsage, WorkAgentMemory
from llm_serving.scheduler import Scheduler
from llm_serving.server.app import serve
from llm_serving.server.served_models import OpenedModel
from llm_serving.text.tokenizer.tokenizer import Tokenizer, check_draft_vocabulary, notice_of_unknown_tokens
from llm_serving.transport.messages import Loaded

logger = get_logger(__name__)


def run(config: ServingConfig) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code: 0 after a graceful shutdown."""
    if config.models:
        return _run_several(config.models)
    with open_placement(config) as placement:
        return serve(build(config, placement))


def _run_several(configs: Sequence[ServingConfig]) -> int:
    at_start = [config for config in configs if config.load_at_start]
    check_memory(at_start)
    with contextlib.ExitStack() as stack:
        opened = []
        for config in at_start:
            opened.append(open_model(config))
            stack.callback(opened[-1].close)
        return serve(opened[0].engine, opened[1:], open_checked)


def open_model(config: ServingConfig) -> OpenedModel:
    """Build the engine of one of several models without starting it. Raise ConfigError if it cannot be used."""
    with contextlib.ExitStack() as undo:
        engine = build(config, undo.enter_context(open_placement(config)), config.model.model_name)
        return OpenedModel(engine, undo.pop_all().close)


def open_checked(config: ServingConfig, reserved_bytes: int) -> OpenedModel:
    """Check that a model fits into the free memory that other models have not reserved, then call `open_model`."""
    check_memory([config], reserved_bytes)
    return open_model(config)


def build(config: ServingConfig, placement: Placement, log_name: str = "") -> AsyncEngine:
    """Build the engine of a configuration without starting it. `placement` starts WorkAgents. Logs show `log_name`."""
    spec = ModelSpec.from_folder(config.model.folder)
    tokenizer = Tokenizer.load(config.model.folder, config.model.tokenizer_path)
    pooling = pooling_mode(config.model.pooling, config.model.folder, spec)
    if (notice := notice_of_unknown_tokens(tokenizer, spec.vocab_size)) is not None:
        logger.warning("%s", notice)
    if config.scheduler.draft_model_path is not None:
        check_draft_vocabulary(tokenizer, config.scheduler.draft_model_path)
    adapters = AdapterRegistry(config, spec)
    metrics = Metrics(config.model.model_name, config.request_classes)
    consistency, same_files = ConsistencyCheck(), SameFiles(config.model)
    all_starts = StartCancellation()

    @contextmanager
    def open_replica(index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        logged_model.set(log_name)

        def start(previous: Loaded | None, timeout_s: float | None) -> WorkAgentProcess:
            files = same_files  # `set_weights` may replace it meanwhile
            served = replace(config, model=files.model)
            agent = files.start_checked(
                partial(start_work_agent, served, index, on_progress, previous, timeout_s, cancellation, placement)
            )
            return consistency.check(agent)

        serving, cancellation = config.serving, StartCancellation()
        with all_starts.on_cancel(cancellation.cancel):
            executor = SupervisedExecutor(
                start, serving.step_timeout_s, serving.max_worker_restarts, cancellation=cancellation, index=index
            )
        metrics.watch_agent(index, lambda: executor.num_compilations, lambda: executor.machine)
        try:
            loaded = executor.loaded
            engine = build_engine(
                config,
                loaded.num_blocks,
                executor,
                tokenizer,
                metrics,
                publish,
                index,
                loaded.num_swap_blocks,
                loaded.windows,
                whole_prompts=not spec.network.causal,
                pooling=pooling,
                num_state_slots=config.num_state_slots(spec.state_bytes),
                num_state_pieces=-(-spec.state_bytes // max(1, loaded.block_bytes)),
                notice=loaded.notice,
                compute_fingerprint=loaded.compute_fingerprint,
            )
            engine.ask(partial(_send_adapters, adapters, executor))  # before its first request
            metrics.block_bytes = loaded.block_bytes
            metrics.memory[index] = partial(_memory_of, config, engine.scheduler, executor)
            metrics.state_slots[index] = partial(_state_slots_of, engine.scheduler)
            yield engine
        finally:
            executor.close()

    def set_weights(folder: Path) -> None:
        nonlocal same_files
        same_files = SameFiles(replace(config.model, model_path=folder))

    # A cluster sends the files of one folder to its machines, and exported graphs contain the weights.
    is_replaceable = config.cluster.engine == EngineName.LOCAL and config.model.mindir_path is None
    replaces = set_weights if is_replaceable else None
    engine = AsyncEngine(config, spec, tokenizer, metrics, open_replica, set_weights=replaces, adapters=adapters)
    engine.replicas.cancel_starts = all_starts.cancel
    return engine


def _send_adapters(adapters: AdapterRegistry, executor: SupervisedExecutor) -> None:
    for number, folder in adapters.folders.items():
        executor.set_adapter(number, folder)


def _memory_of(config: ServingConfig, scheduler: Scheduler, executor: SupervisedExecutor) -> WorkAgentMemory:
    """Return the WorkAgent's memory. A CPU commits a KV block at its first use, a device the whole cache at start."""
    pool = scheduler.blocks.pool
    is_lazy = config.device.device_target == "CPU"
    num_committed = pool.num_touched_blocks if is_lazy else pool.num_blocks
    block_bytes = executor.loaded.block_bytes * config.cluster.tensor_parallel
    return WorkAgentMemory(pool.num_blocks * block_bytes, num_committed * block_bytes, executor.resident_bytes)


def _state_slots_of(scheduler: Scheduler) -> StateSlotUsage:
    if scheduler.blocks.states is None:
        return StateSlotUsage()
    pool = scheduler.blocks.states.pool
    return StateSlotUsage(pool.num_blocks, pool.num_used_blocks, pool.num_cached_blocks)
