"""Estimate of the memory that a model needs, made before its weights are downloaded or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
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


class _Sizes:
    """Bytes of memory that one WorkAgent needs for each purpose. `spec`: the part of the model on the first rank."""

    def __init__(self, config: ServingConfig, spec: ModelSpec) -> None:
        self.config, self.spec = config, spec
        # The plain backend computes every dtype in float32. Whether `auto` selects it is known only in the WorkAgent.
        is_plain = config.device.device_target == "CPU" and config.device.kernels == "plain"
        self.dtype = "float32" if is_plain else config.model.model_dtype
        self.dtype_bytes = dtype_bytes = 4 if self.dtype == "float32" else 2
        self.max_tokens, max_prefill = config.model.max_generate_length, config.scheduler.max_prefill_tokens
        self.quantization = config.quant.weights_on(config.device)
        self.weights = weight_bytes(spec, dtype_bytes, self.quantization)
        keys = num_mask_keys(config.device.device_target, self.max_tokens)
        self.working = working_bytes(spec, dtype_bytes, max_prefill, config.model.decode_batch_size, keys)
        self.per_token = spec.kv_bytes_per_token(dtype_bytes, int8=config.quant.has_int8_kv_cache)
        self.per_block = self.per_token * config.pa.block_size
        self.num_states = config.num_state_slots(spec.state_bytes)
        self.states = self.num_states * spec.state_bytes
        lora = config.lora
        self.adapters = spec.adapter_bytes(lora.max_loras, lora.max_lora_rank, dtype_bytes) if lora.is_enabled else 0
        self.groups = CacheGroups.of(spec.layout.windows, max_prefill, self.max_tokens)
        self.num_groups = len(self.groups.windows)

    @cached_property
    def drafts(self) -> int:
        block_size, draft_model = self.config.pa.block_size, self.config.scheduler.draft_model_path
        if self.config.scheduler.speculative_method == SpeculativeMethodName.MTP:
            return mtp_bytes(self.spec, self.dtype_bytes, block_size, self.quantization)
        if draft_model is None:
            return 0
        return draft_model_bytes(ModelSpec.from_folder(draft_model), self.dtype_bytes, block_size)

    @property
    def without_cache(self) -> int:
        return PROCESS_BYTES + self.weights + self.working + self.states + self.drafts + self.adapters

    def room(self, num_tokens: int) -> str:
        if self.num_groups == 1:
            return f"{num_tokens:,} tokens"
        return f"{num_tokens // self.config.pa.block_size:,} blocks of a group"


def _rank_spec(config: ServingConfig) -> ModelSpec:
    return ModelSpec.from_folder(config.model.folder).of_rank(0, config.cluster.tensor_parallel)


def model_size(config: ServingConfig, stored_bytes: int | None = None) -> ModelSize:
    """Estimate the memory that a WorkAgent needs for the model. `stored_bytes`: size of the weight files, if known."""
    sizes = _Sizes(config, config.served_spec(_rank_spec(config)))
    spec, longest = sizes.spec, sizes.max_tokens
    is_dequantized = sizes.quantization is not None and sizes.quantization.name == QuantizationName.DEQUANTIZED
    kept = sizes.dtype if is_dequantized else config.quant.quantization
    if kept is None:
        kept = spec.scheme.stored_types if isinstance(spec.scheme, Gguf) else sizes.dtype
    fits, verdict, num_tokens = _verdict(sizes)
    cache_type = f" ({config.quant.kv_cache_dtype})" if config.quant.has_int8_kv_cache else ""
    num_held = sizes.groups.max_blocks_of(longest, config.pa.block_size)
    held = min(longest * sizes.num_groups, num_held * config.pa.block_size)
    beyond = f" for the {held:,} that a window and a step hold" if held < longest else ""
    in_groups = ""
    if sizes.num_groups > 1:
        beyond = f" in {num_held:,} blocks of a group"
        sliding = sum(each.is_sliding for each in sizes.groups.windows)
        in_groups = f" in each of {sizes.num_groups} groups of layers; {sliding} of them keep only a window"
    rows = [("weights as stored", readable_size(stored_bytes))] if stored_bytes is not None else []
    rows.append((f"weights as served ({kept})", readable_size(sizes.weights)))
    rows.append(("process and largest step", readable_size(PROCESS_BYTES + sizes.working)))
    if sizes.drafts:
        what = "draft model" if config.scheduler.draft_model_path is not None else "MTP layer"
        rows.append((f"{what}, with its cache", readable_size(sizes.drafts)))
    rows.append(("a token of context", f"{sizes.per_token / 1024:,.1f} KiB{cache_type}{in_groups}"))
    if spec.states:
        slots = f"{sizes.num_states} slots of {readable_size(spec.state_bytes)}, {readable_size(sizes.states)}"
        rows.append(("states of requests", slots))
    if sizes.adapters:
        rows.append(("slots of adapters", readable_size(sizes.adapters)))
    rows.append(("longest context", f"{longest:,} tokens, {readable_size(held * sizes.per_token)}{beyond}"))
    if num_tokens is not None:
        reserved = f"{sizes.room(num_tokens)}, {readable_size(num_tokens * sizes.per_token)}"
        if config.device.device_target == "CPU":
            rows.append(("KV cache, reserved", f"{reserved}; committed as blocks are used"))
            rows.append(("resident when idle", readable_size(sizes.weights + sizes.drafts + IDLE_BYTES)))
        else:
            rows.append(("KV cache", reserved))
    rows.append(("fits", verdict))
    width = max(len(name) for name, _ in rows)
    return ModelSize([f"{name:<{width}}  {text}" for name, text in rows], fits)


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
    sizes = _Sizes(config, _rank_spec(config))
    num_blocks = (config.pa.num_blocks or 1) + config.pa.num_swap_blocks
    return (sizes.without_cache + num_blocks * sizes.per_block) * config.num_processes


def check_device_memory(config: ServingConfig, spec: ModelSpec) -> None:
    """Check that `max_device_memory` leaves room for one KV block if the cache takes all remaining memory."""
    name, limit = "device_config.max_device_memory", config.device.max_device_memory
    if limit is None or config.pa.num_blocks is not None:
        return
    sizes = _Sizes(config, spec.of_rank(0, config.cluster.tensor_parallel))
    minimum = PROCESS_BYTES + sizes.weights + sizes.working + sizes.states + sizes.per_block
    if limit < minimum:
        states = f", {sizes.states} for the states" if sizes.states else ""
        raise ConfigError(
            f"{config.sources[name]}: `{name}` must be at least {minimum} bytes: {PROCESS_BYTES} for the process, "
            f"{sizes.weights} for the weights, {sizes.working} for the largest step{states} and {sizes.per_block} for "
            f"one block of the KV cache. Given: {limit}"
        )


class _Verdict(NamedTuple):
    fits: bool
    text: str
    num_tokens: int | None
    """Number of tokens that fit into the KV cache. None if only a WorkAgent can compute it."""


def _on_npus(sizes: _Sizes) -> _Verdict:
    """State how many cached tokens fit on NPUs of `NPU_SIZES_GB`. Only a WorkAgent can read the actual memory size."""
    config, given = sizes.config, []
    for gigabytes in NPU_SIZES_GB:
        limit = int((gigabytes * 2**30 - CANN_BYTES) * FREE_NPU_MEMORY_FRACTION)
        one = replace(config, device=replace(config.device, max_device_memory=limit))
        fits, text, num_tokens = _verdict(_Sizes(one, sizes.spec))
        what = f"{num_tokens:,} tokens" if fits else text.partition(":")[0]
        given.append(f"{what} on an NPU of {gigabytes} GB")
    share = f"with {FREE_NPU_MEMORY_FRACTION:.0%} of what CANN leaves free"
    return _Verdict(True, f"{', '.join(given)}, {share}; device_config.max_device_memory is not given", None)


def _verdict(sizes: _Sizes) -> _Verdict:
    config, size = sizes.config, sizes.config.pa.block_size
    limit = config.device.max_device_memory
    source = "max_device_memory"
    if limit is None:
        if config.device.device_target != "CPU":
            return _on_npus(sizes)
        free = psutil.virtual_memory().available
        limit = int(free * FREE_MEMORY_FRACTION / config.num_processes)
        source = f"{FREE_MEMORY_FRACTION:.0%} of {readable_size(free)} free here"
        if config.num_processes > 1:
            source += f", for each of {config.num_processes} WorkAgents"
        limit -= config.pa.num_swap_blocks * sizes.per_block
    left = limit - sizes.without_cache
    tokens = left // sizes.per_token
    if config.pa.num_blocks is not None:
        asked = sizes.spec.layout.num_blocks(config.pa.num_blocks) * size
        verdict = "yes" if asked <= tokens else "no"
        rooms = [sizes.room(each) for each in (asked, max(tokens, 0))]
        text = f"{verdict}: {rooms[0]} by pa_config.num_blocks, {rooms[1].removesuffix(' tokens')} in {source}"
        return _Verdict(asked <= tokens, text, asked)
    if tokens < size:
        return _Verdict(False, f"no: {readable_size(sizes.per_block - left)} more are needed than {source}", None)
    length = sizes.max_tokens
    how = "in part" if sizes.groups.max_request_tokens(size, tokens // size) < length else "yes"
    most = sizes.groups.max_blocks_of(length, size)
    text = f"{how}: {tokens:,} tokens of context, all requests together, in {source}"
    if sizes.num_groups > 1:
        room = sizes.room(tokens)
        text = f"{how}: {room}, for {tokens // size // most} requests of {length:,} tokens, in {source}"
    return _Verdict(True, text, min(config.model.decode_batch_size * most, tokens // size) * size)
