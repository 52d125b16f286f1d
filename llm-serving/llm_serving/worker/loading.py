"""Creates a model runner from the master's settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import mindspore as ms
import msgspec
import psutil

from llm_serving.backends import Backend, create_backend
from llm_serving.core.enums import ExactnessName, ImplementationName, KVCacheDtypeName, QuantizationName
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.step import DRAFT_WINDOW, MAX_DRAFT_REQUESTS, MAX_DRAFT_TOKENS, blocks_per_draft_request
from llm_serving.core.timings import Clock, monotonic
from llm_serving.core.window import CacheGroups
from llm_serving.errors import ConfigError, KernelError
from llm_serving.formats.gguf import Gguf
from llm_serving.kernels import library
from llm_serving.kernels.compiler import library_path
from llm_serving.kernels.ranks import Ranks
from llm_serving.log import get_logger
from llm_serving.lowering.mindformers import mindformers_version
from llm_serving.lowering.mindir import check_graph_settings, graph_settings
from llm_serving.models.memory import (
    FREE_MEMORY_FRACTION,
    FREE_NPU_MEMORY_FRACTION,
    draft_model_bytes,
    kv_cache_bytes_left,
    mtp_bytes,
    num_mask_keys,
    num_state_slots,
    readable_size,
)
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader, check_folder, mtp_layer
from llm_serving.network.adapters import AdapterLimits
from llm_serving.network.quantization import Quantization, keeps_blocks
from llm_serving.transport.messages import LoadModel
from llm_serving.worker.compiled_graph import load_networks
from llm_serving.worker.device import backend_for, configure_device, free_npu_memory, npu_memory_limit
from llm_serving.worker.draft_model import DraftModel, load_mtp
from llm_serving.worker.exactness import OF_EXPERTS, check_block_size, guarantee, has_experts_in_dtype
from llm_serving.worker.kv_cache import block_bytes, element_bytes, num_blocks_for
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.rank_group import CollectiveGroup, RankGroup

logger = get_logger(__name__)

PROGRESS_INTERVAL_S: Final = 5.0


def load_runner(
    settings: LoadModel,
    on_progress: Callable[[str], None],
    ranks_fd: int | None = None,
    transfer_fd: int | None = None,
    group_port: int = 0,
) -> tuple[ModelRunner, str]:
    """Select the device, prepare kernels, read weights and compile the network. Return the runner, and a warning about
    missing kernels or inexact answers, or an empty text. `ranks_fd` and `transfer_fd` are the shared memory of the
    ranks and of the transfer pool, if they exist. `group_port` is the port on this machine that the collectives of the
    ranks use. Raise ConfigError if the model cannot be read or its cache does not fit, KernelError if kernels are
    missing, RankLostError if another rank has exited.
    """
    if settings.num_threads is not None:
        os.environ.setdefault("LLM_SERVING_THREADS", str(settings.num_threads))
    if settings.mindir_path is not None:
        return _load_exported(settings, Path(settings.mindir_path), on_progress)
    implementation = ImplementationName(settings.implementation)
    by_mindformers = implementation != ImplementationName.NATIVE
    configure_device(settings, settings.device_id)
    ranks: RankGroup | None = None
    if settings.num_ranks > 1 and (settings.device_target != "CPU" or settings.kernels == "primitives"):
        on_progress("waiting for the other ranks")
        ranks = CollectiveGroup(
            settings.rank, settings.num_ranks, group_port, settings.device_target, settings.rank_table
        )
    on_progress("preparing the kernels")
    if settings.device_target != "CPU" or settings.kernels != "plain":
        with suppress(KernelError):  # `backend_for` or the sampler raises it again or falls back
            library_path(on_progress)
    backend, notice = backend_for(settings, settings.dtype, is_native=not by_mindformers)
    framework = f"{ms.__version__} with MindFormers {mindformers_version()}" if by_mindformers else ms.__version__
    folder = Path(settings.model_path)
    spec = check_folder(folder)
    if settings.uses_mtp:
        mtp_layer(spec, WeightReader(folder, spec.scheme), folder)
    has_experts = has_experts_in_dtype(spec.network, settings.quantization)
    guaranteed = guarantee(settings.exactness, backend.name, has_experts)
    if guaranteed == OF_EXPERTS:
        notice = guaranteed
    check_block_size(backend.attention_rows, settings.block_size)
    level = logging.INFO if settings.device_target == "CPU" else logging.WARNING  # not verified on Ascend
    logger.log(level, "device_config.exactness: %s: %s", settings.exactness, guaranteed)
    if spec.scheme is not None:
        kept = f"{settings.quantization}, others in " if settings.quantization is not None else ""
        if isinstance(spec.scheme, Gguf) and keeps_blocks(_quantization(settings, backend)):
            size = readable_size(spec.scheme.block_bytes)
            kept = f"the blocks of the file, {size} without a second rounding, others in "
        described = spec.scheme.description
        logger.info(
            "the stored weights are quantised by %s, and kept in memory as %s%s", described, kept, settings.dtype
        )
    if ranks_fd is not None and ranks is None:
        ranks = _join_ranks(ranks_fd, settings, backend)
    spec = spec.of_rank(settings.rank, settings.num_ranks)
    if settings.groups_layers and backend.program() is not None:
        spec = spec.with_cache_groups(settings.max_model_len, int8=_has_int8_cache(settings))
    if not settings.has_group_blocks:
        settings = msgspec.structs.replace(
            settings,
            num_blocks=None if settings.num_blocks is None else spec.layout.num_blocks(settings.num_blocks),
            num_swap_blocks=spec.layout.num_blocks(settings.num_swap_blocks),
        )
    num_blocks = settings.num_blocks or _num_blocks(settings, spec, backend)
    if ranks is not None:
        num_blocks = min(blocks for (blocks,) in ranks.exchange([num_blocks]))
    on_progress(f"reading {spec.num_weight_elements / 1e6:,.1f} M weights from {folder.name}")
    runner = ModelRunner(
        spec,
        folder,
        backend,
        num_blocks,
        settings.block_size,
        settings.max_model_len,
        num_swap_blocks=settings.num_swap_blocks,
        num_state_slots=_num_state_slots(settings, spec),
        as_program=settings.kernels != "primitives",
        implementation=implementation,
        num_prompt_rows=settings.max_num_seqs if settings.exactness == ExactnessName.FAST else 0,
        quantization=_quantization(settings, backend),
        ranks=ranks,
        step_timeout_s=settings.step_timeout_s,
        int8_cache=_has_int8_cache(settings),
        on_weights=limit_progress_reports(on_progress, folder.name),
        transfer_fd=transfer_fd,
        num_transfer_blocks=settings.num_transfer_blocks,
        adapters=AdapterLimits(settings.max_loras, settings.max_lora_rank) if settings.max_loras else None,
    )
    runner.compute_fingerprint = _compute_fingerprint(settings, backend, framework)
    on_progress("compiling the network")
    runner.warm_up()
    if settings.draft_model_path is not None:
        runner.draft_model = _draft_model(settings, spec, backend, on_progress)
    elif settings.uses_mtp:
        on_progress(f"reading the layer for multi-token prediction of {folder.name}")
        reported_at = limit_progress_reports(on_progress, folder.name)
        runner.draft_model = load_mtp(runner, folder, backend, _quantization(settings, backend), reported_at)
    return runner, notice


def _draft_model(
    settings: LoadModel, spec: ModelSpec, backend: Backend, on_progress: Callable[[str], None]
) -> DraftModel:
    folder = Path(settings.draft_model_path or "")
    draft = check_folder(folder)
    if draft.states:
        rule = "must name a model without recurrent states"
        raise ConfigError(f"scheduler_config.draft_model_path {rule}. Given: {draft.architecture}")
    on_progress(f"reading {draft.num_weight_elements / 1e6:,.1f} M weights of the draft model from {folder.name}")
    size = settings.block_size
    as_program = settings.kernels != "primitives"
    blocks = MAX_DRAFT_REQUESTS * blocks_per_draft_request(size)
    reported_at = limit_progress_reports(on_progress, folder.name)
    length = DRAFT_WINDOW + MAX_DRAFT_TOKENS
    runner = ModelRunner(draft, folder, backend, blocks, size, length, as_program=as_program, on_weights=reported_at)
    on_progress("compiling the draft model")
    runner.warm_up()
    return DraftModel(runner, spec.vocab_size)


def limit_progress_reports(
    on_progress: Callable[[str], None], name: str, clock: Clock = monotonic
) -> Callable[[int, int], None]:
    """Return a function that reports the bytes read to `on_progress`, at most once in `PROGRESS_INTERVAL_S`."""
    reported_at = clock()

    def report(num_read: int, num_bytes: int) -> None:
        nonlocal reported_at
        if clock() - reported_at >= PROGRESS_INTERVAL_S:
            reported_at = clock()
            on_progress(f"{num_read / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB read of {name}")

    return report


def _load_exported(settings: LoadModel, folder: Path, on_progress: Callable[[str], None]) -> tuple[ModelRunner, str]:
    """Return a runner for exported graphs, which contain weights and caches, and the guarantee about its answers."""
    assert settings.num_blocks is not None  # `config.sections.model` checks it
    spec = check_folder(Path(settings.model_path))
    sizes = settings.num_blocks, settings.block_size, settings.max_model_len
    check_graph_settings(folder, graph_settings(spec, settings.dtype, settings.quantization, *sizes))
    on_progress(f"reading the graphs of {folder.name}")
    ini = None if settings.mindir_ini is None else Path(settings.mindir_ini)
    networks = load_networks(spec, folder, ini, settings.device_id)
    backend = create_backend("ascend", settings.dtype)
    runner = ModelRunner(spec, Path(settings.model_path), backend, *sizes, networks=networks)
    runner.compute_fingerprint = ComputeFingerprint(kernels="ge", framework=ms.__version__)
    guaranteed = guarantee(settings.exactness, backend.name)
    logger.warning("device_config.exactness: %s: %s", settings.exactness, guaranteed)
    runner.warm_up()
    return runner, guaranteed


def _join_ranks(ranks_fd: int, settings: LoadModel, backend: Backend) -> Ranks:
    if backend.name != "cpu":
        raise ConfigError(
            f"`cluster_config.tensor_parallel` must be 1 with the backend {backend.name}. Given: {settings.num_ranks}"
        )
    ranks = Ranks(ranks_fd, settings.rank, settings.num_ranks)
    ranks.use()
    return ranks


def _compute_fingerprint(settings: LoadModel, backend: Backend, framework: str) -> ComputeFingerprint:
    if backend.name != "cpu":
        return ComputeFingerprint(kernels=backend.name, framework=framework, ranks=settings.num_ranks)
    sources, compiler = library.loaded_path().stem.split("_")[-2:]
    return ComputeFingerprint(
        kernels="primitives" if settings.kernels == "primitives" else "program",
        instruction_set=library.load().llm_isa().decode(),
        sources=sources,
        compiler=compiler,
        framework=framework,
        ranks=settings.num_ranks,
    )


def _quantization(settings: LoadModel, backend: Backend) -> Quantization | None:
    if settings.quantization is not None:
        return Quantization(QuantizationName(settings.quantization), settings.group_size)
    runs_program = backend.program() is not None and settings.kernels != "primitives"
    return None if runs_program else Quantization(QuantizationName.DEQUANTIZED)


def _has_int8_cache(settings: LoadModel) -> bool:
    return settings.kv_cache_dtype == KVCacheDtypeName.INT8


def _npu_memory(settings: LoadModel) -> int:
    """Return this WorkAgent's NPU memory in bytes. Raise ConfigError if neither configuration nor device states it."""
    free, given = free_npu_memory(), settings.max_device_memory
    if given is None and free <= 0:
        raise ConfigError(
            "`device_config.max_device_memory` must be given: the device does not report how much memory is free. "
            "Given: None"
        )
    if given is None:
        return int(free * FREE_NPU_MEMORY_FRACTION)
    limit = npu_memory_limit(given, free)
    if limit < given:
        logger.warning(
            "device_config.max_device_memory is %s, but the device has only %s free; the WorkAgent uses %s",
            *map(readable_size, (given, free, limit)),
        )
    return limit


def _num_state_slots(settings: LoadModel, spec: ModelSpec) -> int:
    return num_state_slots(spec.state_bytes, settings.max_num_seqs, settings.num_state_slots)


def _num_blocks(settings: LoadModel, spec: ModelSpec, backend: Backend) -> int:
    """Return how many blocks fit into memory, but no more than all running requests can fill."""
    one = block_bytes(spec, backend, settings.block_size, int8=_has_int8_cache(settings))
    groups = CacheGroups.of(spec.layout.windows, settings.max_num_batched_tokens, settings.max_model_len)
    useful = settings.max_num_seqs * groups.max_blocks_of(settings.max_model_len, settings.block_size)
    if settings.device_target == "Ascend":
        limit = _npu_memory(settings)
    elif settings.max_device_memory is not None:
        limit = settings.max_device_memory
    else:
        share = settings.memory_share / settings.num_agents
        limit = int(psutil.virtual_memory().available * FREE_MEMORY_FRACTION * share)
        limit -= settings.num_swap_blocks * one
    step = settings.max_num_batched_tokens, settings.max_num_seqs
    keys = num_mask_keys(settings.device_target, settings.max_model_len)
    left = kv_cache_bytes_left(limit, spec, element_bytes(backend), *step, _quantization(settings, backend), keys)
    left -= _num_state_slots(settings, spec) * spec.state_bytes
    if settings.max_loras:
        left -= spec.adapter_bytes(settings.max_loras, settings.max_lora_rank, element_bytes(backend))
    if settings.draft_model_path is not None:
        draft = ModelSpec.from_folder(Path(settings.draft_model_path))
        left -= draft_model_bytes(draft, element_bytes(backend), settings.block_size)
    if settings.uses_mtp:
        left -= mtp_bytes(spec, element_bytes(backend), settings.block_size, _quantization(settings, backend))
    return min(useful, num_blocks_for(left, one, settings.block_size * spec.layout.max_parts))
