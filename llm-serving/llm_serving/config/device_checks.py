"""What kernels and memory of the device ask of the configuration, so that no WorkAgent is the first to find out."""

from __future__ import annotations

from typing import Final

from llm_serving.config.mindformers import MindFormersFile
from llm_serving.config.values import Values
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import ExactnessName, KVCacheDtypeName, QuantizationName
from llm_serving.models.memory import MAX_SLOTS, PROCESS_BYTES, num_mask_keys, weight_bytes, working_bytes
from llm_serving.models.spec import MAX_VOCAB_SIZE, ModelSpec
from llm_serving.network.quantization import (
    Quantization,
    lacking,
    lacking_in_cells,
    lacking_in_coded_cache,
    lacking_of_codes,
)

BLOCK_SIZE: Final = "pa_config.block_size"
NUM_BLOCKS: Final = "pa_config.num_blocks"
NUM_SWAP_BLOCKS: Final = "pa_config.num_swap_blocks"
TARGET: Final = "device_config.device_target"
KERNELS: Final = "device_config.kernels"
GRAPH_KERNEL: Final = "device_config.enable_graph_kernel"
EXACTNESS: Final = "device_config.exactness"
JIT_LEVEL: Final = "device_config.jit_level"
MODEL_PATH: Final = "model_config.model_path"
DTYPE: Final = "model_config.model_dtype"
MAX_MEMORY: Final = "device_config.max_device_memory"
QUANTIZATION: Final = "quant_config.quantization"
GROUP_SIZE: Final = "quant_config.group_size"
KV_CACHE_DTYPE: Final = "quant_config.kv_cache_dtype"
COMPOSITION: Final = "scheduler_config.composition"
PREEMPTION: Final = "scheduler_config.preemption_mode"

MULTIPLE: Final = 16
"""Tokens of a block, and numbers of a head: caches lie in groups of so many."""
ASCEND_DTYPES: Final = tuple(dtype.name for dtype in MODEL_DTYPES.values() if dtype.on_ascend)
ASCEND_HEAD_MULTIPLE: Final = 32
ASCEND_LARGEST_HEAD: Final = 256
ASCEND_LARGEST_BLOCK: Final = 16384
"""Numbers in one head of one block that PagedAttention takes."""


def check_device(values: Values, spec: ModelSpec | None, mindformers: MindFormersFile | None) -> None:
    """Refuses what only the load of the model or the first step would refuse otherwise.

    Raises:
        ConfigError: A combination that cannot be served.
    """
    if values[TARGET] == "Ascend":
        _check_ascend(values, spec)
        _check_infer_boost(values, mindformers)
    elif values[KERNELS] != "plain":
        hint = "for the operator library; device_config.kernels: plain takes any, many times slower"
        _check_multiple(values, spec, MULTIPLE, hint)
    if values[TARGET] == "CPU" and values[GRAPH_KERNEL]:
        told = "on a CPU MindSpore fuses graphs of fixed shapes; these leave the rows of a step open"
        values.notice(GRAPH_KERNEL, f"{values[GRAPH_KERNEL]} has no effect: {told}")
    for name in (NUM_BLOCKS, NUM_SWAP_BLOCKS):
        if (values[name] or 0) * values[BLOCK_SIZE] > MAX_SLOTS:
            rule = f"times pa_config.block_size {values[BLOCK_SIZE]} must be at most {MAX_SLOTS} tokens"
            raise values.error(name, rule, values[name])
    if spec is not None:
        if spec.vocab_size > MAX_VOCAB_SIZE:
            rule = f"must name a model with a vocabulary of at most {MAX_VOCAB_SIZE}"
            raise values.error(MODEL_PATH, rule, spec.vocab_size)
        _check_memory(values, spec.of_rank(0, values["cluster_config.tensor_parallel"]))
        _check_primitives(values, spec)
    _check_exactness(values)
    _check_quantization(values)
    _check_kv_cache(values, spec)
    _notice_what_is_not_served(values)


def _check_multiple(values: Values, spec: ModelSpec | None, head_multiple: int, hint: str) -> None:
    if values[BLOCK_SIZE] % MULTIPLE:
        raise values.error(BLOCK_SIZE, f"must be a multiple of {MULTIPLE} {hint}", values[BLOCK_SIZE])
    for head_dim in spec.head_dims if spec is not None else ():
        if head_dim % head_multiple:
            rule = f"must name a model whose head_dim is a multiple of {head_multiple} {hint}"
            raise values.error(MODEL_PATH, rule, head_dim)


def _check_ascend(values: Values, spec: ModelSpec | None) -> None:
    if values[DTYPE] not in ASCEND_DTYPES:
        raise values.error(DTYPE, f"must be one of {', '.join(ASCEND_DTYPES)} on Ascend", values[DTYPE])
    _check_multiple(values, spec, ASCEND_HEAD_MULTIPLE, "on Ascend")
    if spec is None:
        return
    head_dim = max(spec.head_dims)
    if head_dim > ASCEND_LARGEST_HEAD:
        rule = f"must name a model whose head_dim is at most {ASCEND_LARGEST_HEAD} on Ascend"
        raise values.error(MODEL_PATH, rule, head_dim)
    if head_dim * values[BLOCK_SIZE] > ASCEND_LARGEST_BLOCK:
        rule = f"times the model's head_dim {head_dim} must be at most {ASCEND_LARGEST_BLOCK} on Ascend"
        raise values.error(BLOCK_SIZE, rule, values[BLOCK_SIZE])


def _check_infer_boost(values: Values, mindformers: MindFormersFile | None) -> None:
    """Ascend serves with infer boost, without which PagedAttention has no kernel; and that takes jit_level O0 alone.

    What a MindFormers file says of it is a notice: those files ask for fusion, and what serves them for infer boost.
    """
    for name, needed in ((GRAPH_KERNEL, False), (JIT_LEVEL, "O0")):
        given, source = values[name], values.source(name)
        if given == needed:
            continue
        if mindformers is None or name not in mindformers.values or mindformers.values[name].where != source:
            rule = (
                f"must be {needed} with device_config.device_target: Ascend ({values.source(TARGET)}): PagedAttention "
                "has a kernel with infer boost only, which takes level O0 alone"
            )
            raise values.error(name, rule, given)
        values.notice(name, f"{given} is read as {needed}: Ascend serves with infer boost at level O0")
        values.set(name, needed, source)


def _check_primitives(values: Values, spec: ModelSpec) -> None:
    on_ascend = values[TARGET] == "Ascend"
    if not on_ascend and values[KERNELS] not in ("primitives", "plain"):
        return
    in_cells = lacking_in_cells(spec.network)
    if in_cells is None and not on_ascend and values[KERNELS] == "plain":
        return
    lacks = lacking(spec.network, values["model_config.max_generate_length"])
    if lacks is not None:
        have = "program has" if in_cells else "program and plain have"
        where = "on Ascend" if on_ascend else f"with device_config.kernels: {values[KERNELS]} ({have} it)"
        raise values.error(MODEL_PATH, f"must name a model without {lacks} {where}", spec.architecture)
    if values[DTYPE] not in ASCEND_DTYPES and not on_ascend:
        rule = f"must be {' or '.join(ASCEND_DTYPES)} with device_config.kernels: primitives"
        raise values.error(DTYPE, rule, values[DTYPE])


def _check_exactness(values: Values) -> None:
    if values[EXACTNESS] != ExactnessName.FAST:
        return
    if values[TARGET] != "Ascend" and values[KERNELS] != "primitives":
        rule = f"must be exact with {KERNELS}: {values[KERNELS]} on a CPU: only the primitives have another attention"
        raise values.error(EXACTNESS, rule, values[EXACTNESS])
    if values[COMPOSITION] == "mixed":
        values.notice(EXACTNESS, f"fast is for steps of whole prompts; {COMPOSITION}: separate makes more")


def _quantization(values: Values) -> Quantization | None:
    name = values[QUANTIZATION]
    return None if name is None else Quantization(QuantizationName(name), values[GROUP_SIZE])


def _check_quantization(values: Values) -> None:
    quantization = _quantization(values)
    if quantization is None or _runs_programs(values):
        return
    where = _where(values)
    if values[TARGET] == "CPU" and values[KERNELS] == "plain":
        raise values.error(QUANTIZATION, f"must be null {where}: program on a CPU has it", values[QUANTIZATION])
    if lacking_of_codes(quantization) is not None:
        raise values.error(QUANTIZATION, f"must be w8a8 or null {where}: program on a CPU has it", values[QUANTIZATION])


def _check_kv_cache(values: Values, spec: ModelSpec | None) -> None:
    if not _has_coded_cache(values):
        return
    auto = KVCacheDtypeName.AUTO
    if not _runs_programs(values):
        rule = f"must be {auto} {_where(values)}: program on a CPU has it"
        raise values.error(KV_CACHE_DTYPE, rule, values[KV_CACHE_DTYPE])
    lacks = None if spec is None else lacking_in_coded_cache(spec.network)
    if spec is not None and lacks is not None:
        rule = f"must be {auto} for {spec.architecture}, which has {lacks}"
        raise values.error(KV_CACHE_DTYPE, rule, values[KV_CACHE_DTYPE])


def _has_coded_cache(values: Values) -> bool:
    return bool(values[KV_CACHE_DTYPE] == KVCacheDtypeName.INT8)


def _runs_programs(values: Values) -> bool:
    return values[TARGET] == "CPU" and values[KERNELS] in ("auto", "program", "plugin")


def _where(values: Values) -> str:
    return f"with {TARGET}: {values[TARGET]} and {KERNELS}: {values[KERNELS]}"


def _check_memory(values: Values, spec: ModelSpec) -> None:
    """Where the cache takes what `max_device_memory` leaves, it must leave room for one block."""
    limit = values[MAX_MEMORY]
    if limit is None or values[NUM_BLOCKS] is not None:
        return
    # The plain backend computes in float32 whatever the dtype; where it stands in for the library is found out later.
    is_plain = values[TARGET] == "CPU" and values[KERNELS] == "plain"
    dtype_bytes = 4 if is_plain or values[DTYPE] == "float32" else 2
    budget, seqs = values["scheduler_config.max_prefill_tokens"], values["model_config.decode_batch_size"]
    weights = weight_bytes(spec, dtype_bytes, _quantization(values))
    keys = num_mask_keys(values[TARGET], values["model_config.max_generate_length"])
    working = working_bytes(spec, dtype_bytes, budget, seqs, keys)
    block = values[BLOCK_SIZE] * spec.kv_bytes_per_token(dtype_bytes, coded=_has_coded_cache(values))
    least = PROCESS_BYTES + weights + working + block
    if limit < least:
        rule = (
            f"must be at least {least} bytes: {PROCESS_BYTES} for the process, {weights} for the weights, {working} "
            f"for the largest step and {block} for one block of the KV cache"
        )
        raise values.error(MAX_MEMORY, rule, limit)


def _notice_what_is_not_served(values: Values) -> None:
    if values["model_config.batching_strategy"] == "static":
        values.notice("model_config.batching_strategy", "static: requests with use_beam_search are refused with 400")
    swaps, num_blocks = values[PREEMPTION] != "recompute", values[NUM_SWAP_BLOCKS]
    if swaps and num_blocks == 0:
        values.notice(PREEMPTION, f"{values[PREEMPTION]} moves nothing out: {NUM_SWAP_BLOCKS} is 0")
    if not swaps and num_blocks > 0:
        values.notice(NUM_SWAP_BLOCKS, f"{num_blocks} blocks are never used: {PREEMPTION} is recompute")
