"""Creates a model runner from the master's settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import mindspore as ms
import psutil

from llm_serving.backends import Backend, create_backend
from llm_serving.core.enums import ExactnessName, ImplementationName, QuantizationName
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
    model, device = settings.model, settings.device
    if device.num_threads is not None:
        os.environ.setdefault("LLM_SERVING_THREADS", str(device.num_threads))
    if model.mindir_path is not None:
        return _load_exported(settings, model.mindir_path, on_progress)
    implementation = ImplementationName(model.implementation)
    by_mindformers = implementation != ImplementationName.NATIVE
    configure_device(device, settings.device_id)
    ranks: RankGroup | None = None
    if settings.num_ranks > 1 and (device.device_target != "CPU" or device.kernels == "primitives"):
        on_progress("waiting for the other ranks")
        ranks = CollectiveGroup(
            settings.rank, settings.num_ranks, group_port, device.device_target, settings.rank_table
        )
    on_progress("preparing the kernels")
    if device.device_target != "CPU" or device.kernels != "plain":
        with suppress(KernelError):  # `backend_for` or the sampler raises it again or falls back
            library_path(on_progress)
    backend, notice = backend_for(device, model.model_dtype, is_native=not by_mindformers)
    framework = f"{ms.__version__} with MindFormers {mindformers_version()}" if by_mindformers else ms.__version__
    folder = model.folder
    spec = check_folder(folder)
    if settings.uses_mtp:
        mtp_layer(spec, WeightReader(folder, spec.scheme), folder)
    has_experts = has_experts_in_dtype(spec.network, settings.quant.quantization)
    guaranteed = guarantee(device.exactness, backend.name, has_experts)
    if guaranteed == OF_EXPERTS:
        notice = guaranteed
    check_block_size(backend.attention_rows, settings.pa.block_size)
    level = logging.INFO if device.device_target == "CPU" else logging.WARNING  # not verified on Ascend
    logger.log(level, "device_config.exactness: %s: %s", device.exactness, guaranteed)
    if spec.scheme is not None:
        quantization = settings.quant.quantization
        kept = f"{quantization}, others in " if quantization is not None else ""
        if isinstance(spec.scheme, Gguf) and keeps_blocks(_quantization(settings, backend)):
            size = readable_size(spec.scheme.block_bytes)
            kept = f"the blocks of the file, {size} without a second rounding, others in "
        text = "the stored weights are quantised by %s, and kept in memory as %s%s"
        logger.info(text, spec.scheme.description, kept, model.model_dtype)
    if ranks_fd is not None and ranks is None:
        ranks = _join_ranks(ranks_fd, settings, backend)
    spec = spec.of_rank(settings.rank, settings.num_ranks)
    if settings.groups_layers and backend.program() is not None:
        spec = spec.with_cache_groups(model.max_generate_length, int8=settings.quant.has_int8_kv_cache)
    if not settings.has_group_blocks:
        given = settings.pa.num_blocks
        num_blocks = None if given is None else spec.layout.num_blocks(given)
        settings = settings.with_blocks(num_blocks, spec.layout.num_blocks(settings.pa.num_swap_blocks))
    num_blocks = settings.pa.num_blocks or _num_blocks(settings, spec, backend)
    if ranks is not None:
        num_blocks = min(blocks for (blocks,) in ranks.exchange([num_blocks]))
    on_progress(f"reading {spec.num_weight_elements / 1e6:,.1f} M weights from {folder.name}")
    lora = settings.lora
    runner = ModelRunner(
        spec,
        folder,
        backend,
        num_blocks,
        settings.pa.block_size,
        model.max_generate_length,
        num_swap_blocks=settings.pa.num_swap_blocks,
        num_state_slots=_num_state_slots(settings, spec),
        as_program=device.kernels != "primitives",
        implementation=implementation,
        num_prompt_rows=model.decode_batch_size if device.exactness == ExactnessName.FAST else 0,
        quantization=_quantization(settings, backend),
        ranks=ranks,
        step_timeout_s=settings.step_timeout_s,
        int8_cache=settings.quant.has_int8_kv_cache,
        on_weights=limit_progress_reports(on_progress, folder.name),
        transfer_fd=transfer_fd,
        num_transfer_blocks=settings.num_transfer_blocks,
        adapters=AdapterLimits(lora.max_loras, lora.max_lora_rank) if lora.is_enabled else None,
    )
    runner.compute_fingerprint = _compute_fingerprint(settings, backend, framework)
    on_progress("compiling the network")
    runner.warm_up()
    if settings.draft_model_path is not None:
        runner.draft_model = _draft_model(settings, settings.draft_model_path, spec, backend, on_progress)
    elif settings.uses_mtp:
        on_progress(f"reading the layer for multi-token prediction of {folder.name}")
        reported_at = limit_progress_reports(on_progress, folder.name)
        runner.draft_model = load_mtp(runner, folder, backend, _quantization(settings, backend), reported_at)
    return runner, notice


def _draft_model(
    settings: LoadModel, folder: Path, spec: ModelSpec, backend: Backend, on_progress: Callable[[str], None]
) -> DraftModel:
    draft = check_folder(folder)
    if draft.states:
        rule = "must name a model without recurrent states"
        raise ConfigError(f"scheduler_config.draft_model_path {rule}. Given: {draft.architecture}")
    on_progress(f"reading {draft.num_weight_elements / 1e6:,.1f} M weights of the draft model from {folder.name}")
    size = settings.pa.block_size
    as_program = settings.device.kernels != "primitives"
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
    model, pa = settings.model, settings.pa
    assert pa.num_blocks is not None  # `config.sections.model` checks it
    spec = check_folder(model.folder)
    sizes = pa.num_blocks, pa.block_size, model.max_generate_length
    check_graph_settings(folder, graph_settings(spec, model.model_dtype, settings.quant.quantization, *sizes))
    on_progress(f"reading the graphs of {folder.name}")
    networks = load_networks(spec, folder, model.mindir_ini, settings.device_id)
    backend = create_backend("ascend", model.model_dtype)
    runner = ModelRunner(spec, model.folder, backend, *sizes, networks=networks)
    runner.compute_fingerprint = ComputeFingerprint(kernels="ge", framework=ms.__version__)
    guaranteed = guarantee(settings.device.exactness, backend.name)
    logger.warning("device_config.exactness: %s: %s", settings.device.exactness, guaranteed)
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
        kernels="primitives" if settings.device.kernels == "primitives" else "program",
        instruction_set=library.load().llm_isa().decode(),
        sources=sources,
        compiler=compiler,
        framework=framework,
        ranks=settings.num_ranks,
    )


def _quantization(settings: LoadModel, backend: Backend) -> Quantization | None:
    runs_program = backend.program() is not None and settings.device.kernels != "primitives"
    return settings.quant.weights or (None if runs_program else Quantization(QuantizationName.DEQUANTIZED))


def _npu_memory(settings: LoadModel) -> int:
    """Return this WorkAgent's NPU memory in bytes. Raise ConfigError if neither configuration nor device states it."""
    free, given = free_npu_memory(), settings.device.max_device_memory
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
    return num_state_slots(spec.state_bytes, settings.model.decode_batch_size, settings.pa.num_state_slots)


def _num_blocks(settings: LoadModel, spec: ModelSpec, backend: Backend) -> int:
    """Return how many blocks fit into memory, but no more than all running requests can fill."""
    block_size, length = settings.pa.block_size, settings.model.max_generate_length
    max_rows, device, lora = settings.model.decode_batch_size, settings.device, settings.lora
    one = block_bytes(spec, backend, block_size, int8=settings.quant.has_int8_kv_cache)
    groups = CacheGroups.of(spec.layout.windows, settings.max_num_batched_tokens, length)
    useful = max_rows * groups.max_blocks_of(length, block_size)
    if device.device_target == "Ascend":
        limit = _npu_memory(settings)
    elif device.max_device_memory is not None:
        limit = device.max_device_memory
    else:
        share = settings.memory_share / settings.num_agents
        limit = int(psutil.virtual_memory().available * FREE_MEMORY_FRACTION * share)
        limit -= settings.pa.num_swap_blocks * one
    step = settings.max_num_batched_tokens, max_rows
    keys = num_mask_keys(device.device_target, length)
    left = kv_cache_bytes_left(limit, spec, element_bytes(backend), *step, _quantization(settings, backend), keys)
    left -= _num_state_slots(settings, spec) * spec.state_bytes
    if lora.is_enabled:
        left -= spec.adapter_bytes(lora.max_loras, lora.max_lora_rank, element_bytes(backend))
    if settings.draft_model_path is not None:
        draft = ModelSpec.from_folder(settings.draft_model_path)
        left -= draft_model_bytes(draft, element_bytes(backend), block_size)
    if settings.uses_mtp:
        left -= mtp_bytes(spec, element_bytes(backend), block_size, _quantization(settings, backend))
    return min(useful, num_blocks_for(left, one, block_size * spec.layout.max_parts))
