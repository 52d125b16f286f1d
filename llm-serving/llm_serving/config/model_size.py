"""Estimate of the memory that a model needs, made before its weights are downloaded or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import psutil

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import QuantizationName, SpeculativeMethodName
from llm_serving.core.window import CacheGroups
from llm_serving.errors import ConfigError
from llm_serving.formats.gguf import Gguf
from llm_serving.models.memory import (
    CANN_BYTES,
    FREE_MEMORY_FRACTION,
    FREE_NPU_MEMORY_FRACTION,
    IDLE_BYTES,
    NPU_SIZES_GB,
    PROCESS_BYTES,
    draft_model_bytes,
    kv_cache_bytes_left,
    mtp_bytes,
    num_mask_keys,
    readable_size,
    weight_bytes,
    working_bytes,
)
from llm_serving.models.spec import ModelSpec


class ModelSize(NamedTuple):
    """The memory of a model as a two-column table, and whether its weights and KV cache (at least one block) fit."""

    lines: list[str]
    fits: bool


def model_size(config: ServingConfig, stored_bytes: int | None = None) -> ModelSize:
    """Estimate the memory that a WorkAgent needs for the model. `stored_bytes`: size of the weight files, if known."""
    assert config.model.model_path is not None
    spec = config.served_spec(ModelSpec.from_folder(config.model.model_path).of_rank(0, config.cluster.tensor_parallel))
    is_plain = config.device.device_target == "CPU" and config.device.kernels == "plain"
    dtype = "float32" if is_plain else config.model.model_dtype
    dtype_bytes = 4 if dtype == "float32" else 2
    keys = num_mask_keys(config.device.device_target, config.model.max_generate_length)
    step = config.scheduler.max_prefill_tokens, config.model.decode_batch_size, keys
    quantization = config.quant.weights_on(config.device)
    is_dequantized = quantization is not None and quantization.name == QuantizationName.DEQUANTIZED
    kept = dtype if is_dequantized else config.quant.quantization
    if kept is None:
        kept = spec.scheme.stored_types if isinstance(spec.scheme, Gguf) else dtype
    per_token = spec.kv_bytes_per_token(dtype_bytes, int8=config.quant.has_int8_kv_cache)
    weights = weight_bytes(spec, dtype_bytes, quantization)
    fits, verdict, num_tokens = _verdict(config, spec, dtype_bytes, per_token)
    longest = config.model.max_generate_length
    groups = CacheGroups.of(spec.layout.windows, config.scheduler.max_prefill_tokens, longest)
    num_held = groups.max_blocks_of(longest, config.pa.block_size)
    held = min(longest * len(groups.windows), num_held * config.pa.block_size)
    cache_type = f" ({config.quant.kv_cache_dtype})" if config.quant.has_int8_kv_cache else ""
    beyond = f" for the {held:,} that a window and a step hold" if held < longest else ""
    if len(groups.windows) > 1:
        beyond = f" in {num_held:,} blocks of a group"
    adapter_bytes = _adapter_bytes(config, spec, dtype_bytes)
    idle_bytes = weights + _draft_bytes(config, spec, dtype_bytes) + IDLE_BYTES
    rows = [("weights as stored", readable_size(stored_bytes))] if stored_bytes is not None else []
    rows += [
        (f"weights as served ({kept})", readable_size(weights)),
        ("process and largest step", readable_size(PROCESS_BYTES + working_bytes(spec, dtype_bytes, *step))),
        *_draft_model(config, spec, dtype_bytes),
        ("a token of context", f"{per_token / 1024:,.1f} KiB{cache_type}{_in_groups(groups)}"),
        *_states(config, spec),
        *([("slots of adapters", readable_size(adapter_bytes))] if adapter_bytes else []),
        ("longest context", f"{longest:,} tokens, {readable_size(held * per_token)}{beyond}"),
        *_cache(config, num_tokens, len(groups.windows), per_token, idle_bytes),
        ("fits", verdict),
    ]
    width = max(len(name) for name, _ in rows)
    return ModelSize([f"{name:<{width}}  {text}" for name, text in rows], fits)


def _room(num_tokens: int, block_size: int, num_groups: int) -> str:
    if num_groups == 1:
        return f"{num_tokens:,} tokens"
    return f"{num_tokens // block_size:,} blocks of a group"


def _in_groups(groups: CacheGroups) -> str:
    if (count := len(groups.windows)) == 1:
        return ""
    sliding = sum(each.is_sliding for each in groups.windows)
    return f" in each of {count} groups of layers; {sliding} of them keep only a window"


def check_memory(configs: Sequence[ServingConfig], reserved_bytes: int = 0) -> None:
    """Raise ConfigError if the WorkAgents of several models on a CPU need more than the free memory minus
    `reserved_bytes`, which loaded models have reserved for KV caches. Only each config.json is read.
    """
    needs = {each.model.model_name: needed_bytes(each) for each in configs if each.device.device_target == "CPU"}
    free, total = psutil.virtual_memory().available, sum(needs.values())
    if total > free - reserved_bytes:
        each = ", ".join(f"{name} {readable_size(need)}" for name, need in needs.items())
        rule = f"must fit into the {readable_size(free)} of free memory"
        if reserved_bytes:
            rule += f", of which loaded models have reserved {readable_size(reserved_bytes)} for their KV caches"
        rule += f"; they need {readable_size(total)}"
        raise ConfigError(f"`models` {rule}: {each}. Reduce pa_config.num_blocks, or quantize the weights")


def needed_bytes(config: ServingConfig) -> int:
    """Return the bytes that a model's WorkAgents need with a KV cache of `pa_config.num_blocks`, or of one block."""
    assert config.model.model_path is not None
    spec = ModelSpec.from_folder(config.model.model_path).of_rank(0, config.cluster.tensor_parallel)
    is_plain = config.device.kernels == "plain"
    dtype_bytes = 4 if is_plain or config.model.model_dtype == "float32" else 2
    step = config.scheduler.max_prefill_tokens, config.model.decode_batch_size
    num_slots = (config.pa.num_blocks or 1) + config.pa.num_swap_blocks
    cache = num_slots * config.pa.block_size * spec.kv_bytes_per_token(dtype_bytes, int8=config.quant.has_int8_kv_cache)
    states = config.num_state_slots(spec.state_bytes) * spec.state_bytes
    used = -kv_cache_bytes_left(0, spec, dtype_bytes, *step, config.quant.weights_on(config.device))
    others = _draft_bytes(config, spec, dtype_bytes) + _adapter_bytes(config, spec, dtype_bytes)
    return (used + cache + states + others) * config.num_processes


def _states(config: ServingConfig, spec: ModelSpec) -> list[tuple[str, str]]:
    if not spec.states:
        return []
    slots, one = config.num_state_slots(spec.state_bytes), spec.state_bytes
    return [("states of requests", f"{slots} slots of {readable_size(one)}, {readable_size(slots * one)}")]


def _cache(
    config: ServingConfig, num_tokens: int | None, num_groups: int, per_token: int, idle_bytes: int
) -> list[tuple[str, str]]:
    if num_tokens is None:
        return []
    reserved = f"{_room(num_tokens, config.pa.block_size, num_groups)}, {readable_size(num_tokens * per_token)}"
    if config.device.device_target != "CPU":
        return [("KV cache", reserved)]
    return [
        ("KV cache, reserved", f"{reserved}; committed as blocks are used"),
        ("resident when idle", readable_size(idle_bytes)),
    ]


def _draft_model(config: ServingConfig, spec: ModelSpec, dtype_bytes: int) -> list[tuple[str, str]]:
    num_bytes = _draft_bytes(config, spec, dtype_bytes)
    what = "draft model" if config.scheduler.draft_model_path is not None else "MTP layer"
    return [(f"{what}, with its cache", readable_size(num_bytes))] if num_bytes else []


def _draft_bytes(config: ServingConfig, spec: ModelSpec, dtype_bytes: int) -> int:
    path = config.scheduler.draft_model_path
    if config.scheduler.speculative_method == SpeculativeMethodName.MTP:
        return mtp_bytes(spec, dtype_bytes, config.pa.block_size, config.quant.weights_on(config.device))
    return 0 if path is None else draft_model_bytes(ModelSpec.from_folder(path), dtype_bytes, config.pa.block_size)


def _adapter_bytes(config: ServingConfig, spec: ModelSpec, dtype_bytes: int) -> int:
    lora = config.lora
    return spec.adapter_bytes(lora.max_loras, lora.max_lora_rank, dtype_bytes) if lora.is_enabled else 0


class _Verdict(NamedTuple):
    fits: bool
    text: str
    num_tokens: int | None
    """Number of tokens that fit into the KV cache. None if only a WorkAgent can compute it."""


def _on_npus(config: ServingConfig, spec: ModelSpec, dtype_bytes: int, per_token: int) -> _Verdict:
    """State how many cached tokens fit on NPUs of `NPU_SIZES_GB`. Only a WorkAgent can read the actual memory size."""
    given = []
    for gigabytes in NPU_SIZES_GB:
        limit = int((gigabytes * 2**30 - CANN_BYTES) * FREE_NPU_MEMORY_FRACTION)
        one = replace(config, device=replace(config.device, max_device_memory=limit))
        fits, text, num_tokens = _verdict(one, spec, dtype_bytes, per_token)
        what = f"{num_tokens:,} tokens" if fits else text.partition(":")[0]
        given.append(f"{what} on an NPU of {gigabytes} GB")
    share = f"with {FREE_NPU_MEMORY_FRACTION:.0%} of what CANN leaves free"
    return _Verdict(True, f"{', '.join(given)}, {share}; device_config.max_device_memory is not given", None)


def _verdict(config: ServingConfig, spec: ModelSpec, dtype_bytes: int, per_token: int) -> _Verdict:
    limit = config.device.max_device_memory
    source = "max_device_memory"
    if limit is None:
        if config.device.device_target != "CPU":
            return _on_npus(config, spec, dtype_bytes, per_token)
        free = psutil.virtual_memory().available
        limit = int(free * FREE_MEMORY_FRACTION / config.num_processes)
        source = f"{FREE_MEMORY_FRACTION:.0%} of {readable_size(free)} free here"
        if config.num_processes > 1:
            source += f", for each of {config.num_processes} WorkAgents"
        limit -= config.pa.num_swap_blocks * config.pa.block_size * per_token
    limit -= _draft_bytes(config, spec, dtype_bytes) + _adapter_bytes(config, spec, dtype_bytes)
    limit -= config.num_state_slots(spec.state_bytes) * spec.state_bytes
    step = config.scheduler.max_prefill_tokens, config.model.decode_batch_size, config.quant.weights_on(config.device)
    keys = num_mask_keys(config.device.device_target, config.model.max_generate_length)
    size, left = config.pa.block_size, kv_cache_bytes_left(limit, spec, dtype_bytes, *step, keys)
    tokens = left // per_token
    num_groups = len(spec.layout.windows)
    if config.pa.num_blocks is not None:
        asked = spec.layout.num_blocks(config.pa.num_blocks) * size
        verdict = "yes" if asked <= tokens else "no"
        rooms = [_room(each, size, num_groups) for each in (asked, max(tokens, 0))]
        text = f"{verdict}: {rooms[0]} by pa_config.num_blocks, {rooms[1].removesuffix(' tokens')} in {source}"
        return _Verdict(asked <= tokens, text, asked)
    if tokens < size:
        missing = size * per_token - left
        return _Verdict(False, f"no: {readable_size(missing)} more are needed than {source}", None)
    length = config.model.max_generate_length
    groups = CacheGroups.of(spec.layout.windows, config.scheduler.max_prefill_tokens, length)
    how = "in part" if groups.max_request_tokens(size, tokens // size) < length else "yes"
    most = groups.max_blocks_of(length, size)
    useful = config.model.decode_batch_size * most
    text = f"{how}: {tokens:,} tokens of context, all requests together, in {source}"
    if num_groups > 1:
        room = _room(tokens, size, num_groups)
        text = f"{how}: {room}, for {tokens // size // most} requests of {length:,} tokens, in {source}"
    return _Verdict(True, text, min(useful, tokens // size) * size)
