"""Sections `device_config`, `pa_config` and `quant_config`: the device, its memory and its number formats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.config.legacy import MindFormersFile
from llm_serving.config.paths import Kind
from llm_serving.config.rules import BOOLEAN, MEMORY, TEXT, choice, integer, one_of, option, path
from llm_serving.config.values import Values
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.enums import ExactnessName, ImplementationName, KVCacheDtypeName, QuantizationName
from llm_serving.models.memory import MAX_SLOTS
from llm_serving.models.spec import MAX_VOCAB_SIZE, ModelSpec
from llm_serving.network.quantization import (
    Quantization,
    unsupported_by_ascend,
    unsupported_by_cells,
    unsupported_by_int8_cache,
    unsupported_quantization,
)

MODEL_PATH: Final = "model_config.model_path"
DTYPE: Final = "model_config.model_dtype"
BLOCK_SIZE: Final = "pa_config.block_size"
TARGET: Final = "device_config.device_target"
KERNELS: Final = "device_config.kernels"
DISK_CACHE: Final = "pa_config.disk_cache_path"

NPU_FOLDER: Path = Path("/dev")
MULTIPLE: Final = 16
"""The block size must be a multiple of this: the KV cache is stored in tiles of 16 tokens by 16 elements of a head."""
ASCEND_DTYPES: Final = tuple(dtype.name for dtype in MODEL_DTYPES.values() if dtype.on_ascend)
ASCEND_HEAD_MULTIPLE: Final = 32
ASCEND_MAX_HEAD_DIM: Final = 256
ASCEND_MAX_BLOCK_ELEMENTS: Final = 16384
"""Maximum number of elements of one head in one block that PagedAttention accepts on Ascend."""
ASCEND_MAX_LATENT_DIM: Final = 576
ASCEND_MAX_LATENT_BLOCK_SIZE: Final = 128
"""Limits of PagedAttention on Ascend for the keys of multi-head latent attention, which hold their values."""
_FAST_BLOCK_SIZES: Final = (128, 64)
_EXACT_BLOCK_SIZES: Final = (32,)
"""Default block sizes with `exactness: exact`. With 64 and 128, a row's bits depend on other rows (`worker.device`)."""


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Section `device_config`: the device and MindSpore's settings. A MindFormers YAML sets them in `context`."""

    device_target: str = option("CPU", choice(("CPU", "Ascend")))
    """Device that computes the model."""
    num_threads: int | None = option(None, integer(1, 1024))
    """CPU threads that the kernels of one WorkAgent use. null: the machine's cores divided by its WorkAgents."""
    max_device_memory: int | None = option(None, MEMORY)
    """Memory for the weights, the working buffers and the KV cache of one WorkAgent: bytes, or text such as "2GB" (1 GB
    is 2**30 bytes). null: on a CPU, half of the free memory divided by the WorkAgents of the machine; on Ascend, 90 %
    of the free device memory."""
    kernels: str = option("auto", choice(("auto", "program", "primitives", "plain", "plugin")), expert=True)
    """Implementation of the network on a CPU. `program` (`plugin` in older files): a single custom operator.
    `primitives`: the graph that Ascend runs, with this project's CPU library. `plain`: MindSpore's own operators, much
    slower. `auto`: the first of these that works. No effect on Ascend."""
    exactness: str = option("exact", choice(tuple(ExactnessName), {"paged": "exact", "flash": "fast"}), expert=True)
    """Attention kernel for whole prompts in the graph of primitives. `exact`: PagedAttention in every step. `fast`:
    FlashAttentionScore in steps of whole prompts. On a CPU both give the same results. On Ascend, `exact` gives the
    same request the same bytes if `ms_custom_ops` and the CANN package `ops-batchinvariant` are installed, except for
    experts in the model dtype; prompts then take longer. The log states whether this applies."""
    enable_graph_kernel: bool = option(False, BOOLEAN, expert=True)
    """MindSpore's graph kernel fusion: not allowed on Ascend, where infer boost excludes it, and without effect on a
    CPU."""
    graph_kernel_flags: str = option("", TEXT, expert=True)
    """Flags of the graph kernel fusion in MindSpore's notation, such as "--enable_parallel_fusion=true"."""
    jit_level: str = option("O0", choice(("O0", "O1", "O2")), expert=True)
    """Optimization level of MindSpore's graph compiler. `O0` runs kernel by kernel and is the only level on Ascend."""
    save_graphs: bool = option(False, BOOLEAN, expert=True)
    """True: MindSpore writes the compiled graphs to `save_graphs_path`, for debugging."""
    save_graphs_path: Path = option(Path("graph"), path(Kind.MADE_FOLDER), expert=True)
    """Folder for the compiled graphs, relative to the working folder of the server."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Section `pa_config`: the paged KV cache."""

    num_blocks: int | None = option(None, integer(1))
    """Number of KV blocks of each WorkAgent, with keys and values of all layers or of a group of layers. null: as many
    as fit into `device_config.max_device_memory`. A request that needs more blocks is refused with 400."""
    block_size: int = option(16, integer(1, 1024))
    """Tokens in one KV block: a multiple of 16, or any number with `device_config.kernels: plain`. On Ascend the
    default is 128 with `exactness: fast` (64 if heads are wider than 128) and 32 with `exact`."""
    num_swap_blocks: int = option(0, integer(0), expert=True)
    """Number of KV blocks in host memory of each WorkAgent for preempted requests (`scheduler_config.preemption_mode`);
    beyond it, they are recomputed. 0: no pool."""
    num_state_slots: int | None = option(None, integer(1), expert=True)
    """Number of state slots of each WorkAgent, for models with a fixed-size state for each request (LFM2, Qwen3-Next,
    Mamba-2). At least `model_config.decode_batch_size`: each running request uses one slot. Spare slots hold states of
    cached prefixes, draft tokens and swapped requests. null: `decode_batch_size` and as many spare slots, up to 1 GiB
    of these, but always 8 or more."""
    disk_cache_path: Path | None = option(None, path(Kind.MADE_FOLDER))
    """Folder on a local disk that keeps the KV blocks of prompts. A later prompt with the same prefix reads its blocks,
    also after a restart. Only this user can read it; several servers and models may share it. null: no disk cache."""
    disk_cache_bytes: int = option(16 * 2**30, MEMORY)
    """Maximum size of all files in `disk_cache_path`, in bytes or as "16GB". The least recently used ones are
    deleted."""
    decode_seq_length: int | None = option(None, integer(1), expert=True)
    """Accepted from older files, which repeat `model_config.max_generate_length` here. No effect."""


PROGRAM_KERNELS: Final = ("auto", "program", "plugin")
"""Values of `device_config.kernels` with which one operator runs the network on a CPU."""


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Section `quant_config`: quantized weights and KV cache."""

    quantization: str | None = option(None, choice(tuple(QuantizationName)))
    """Weight quantization, computed while the weights are loaded. `w8a8`: 8-bit weights with one scale for each output
    channel; activations are quantized to 8 bits with one scale for each token. `w8a16`: 8-bit weights, activations in
    `model_config.model_dtype`. `w4a16`: 4-bit weights with one scale for each output channel and `group_size` inputs,
    and an 8-bit LM head. `w4a8`: 4-bit weights with 8-bit activations. Norm weights, biases and embeddings stay in
    `model_dtype`. On a CPU with `kernels: program`; `w8a8` also with `primitives` and on Ascend. null: as the model
    stores them; the blocks of a GGUF file stay as they are on a CPU with `kernels: program`, and activations are
    quantized to 8 bits with one scale for each 32 inputs. `blocks_a16`: the same, with activations in `model_dtype`.
    `dequantized`: all weights in `model_dtype`."""
    kv_cache_dtype: str = option(KVCacheDtypeName.AUTO.value, choice(tuple(KVCacheDtypeName)))
    """Data type of the KV cache. `int8`: 8 bits with one scale for each token and head, about half the memory; only on
    a CPU with `kernels: program`. `auto`: `model_config.model_dtype`."""
    group_size: int = option(128, one_of((32, 64, 128)), expert=True)
    """Number of inputs that share a scale in 4-bit weights. A weight that it does not divide has 8 bits."""

    @property
    def has_int8_kv_cache(self) -> bool:
        return self.kv_cache_dtype == KVCacheDtypeName.INT8

    @property
    def weights(self) -> Quantization | None:
        """How weights are quantized, or None if they stay as the model stores them."""
        return _quantization(self.quantization, self.group_size)

    def weights_on(self, device: DeviceConfig) -> Quantization | None:
        """Return the format of weights on a device: `weights` if it is set. Otherwise None, which keeps the format of
        the files, or DEQUANTIZED if the device cannot multiply GGUF blocks.
        """
        keeps_blocks = _runs_programs(device.device_target, device.kernels)
        return self.weights or (None if keeps_blocks else Quantization(QuantizationName.DEQUANTIZED))


def _quantization(name: str | None, group_size: int) -> Quantization | None:
    return None if name is None else Quantization(QuantizationName(name), group_size)


def _runs_programs(target: str, kernels: str) -> bool:
    return target == "CPU" and kernels in PROGRAM_KERNELS


def groups_layers(target: str, kernels: str, disk_cache: object | None) -> bool:
    """Return whether each group of layers may have its own block tables. This requires the operator that runs the whole
    network on a CPU (`PROGRAM_KERNELS`), and no disk cache, which stores each block for all layers.
    """
    return _runs_programs(target, kernels) and disk_cache is None


def set_block_size(values: Values, spec: ModelSpec | None) -> None:
    """Set the default block size on Ascend: the largest that PagedAttention accepts for the model's heads and that is
    compatible with `device_config.exactness`. Exported graphs contain their block size and get no default.
    """
    if values[TARGET] != "Ascend" or values.is_given(BLOCK_SIZE) or values["model_config.mindir_path"] is not None:
        return
    most = ASCEND_MAX_BLOCK_ELEMENTS // ASCEND_MAX_HEAD_DIM if spec is None else _max_block_size(values, spec)
    is_fast = values["device_config.exactness"] == ExactnessName.FAST
    sizes = _FAST_BLOCK_SIZES if is_fast else _EXACT_BLOCK_SIZES
    fitting = [size for size in sizes if size <= most]
    values.set(BLOCK_SIZE, fitting[0] if fitting else MULTIPLE, "default on Ascend")


def _cached(values: Values, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the KV cache that `model_config.implementation` uses."""
    is_native = values["model_config.implementation"] == ImplementationName.NATIVE
    return spec if is_native else spec.of_mindformers()


def _has_latent_keys(spec: ModelSpec) -> bool:
    return any(cache.value_width == 0 for cache in spec.caches)


def _max_block_size(values: Values, spec: ModelSpec) -> int:
    spec = _cached(values, spec)
    if _has_latent_keys(spec):
        return ASCEND_MAX_LATENT_BLOCK_SIZE
    return ASCEND_MAX_BLOCK_ELEMENTS // max(spec.head_dims)


def check_device(values: Values, spec: ModelSpec | None, mindformers: MindFormersFile | None) -> None:
    on_ascend = values[TARGET] == "Ascend"
    if not values.is_given(TARGET) and (npus := sorted(NPU_FOLDER.glob("davinci[0-9]*"))):
        values.notice(
            TARGET, f"CPU, although this machine has {len(npus)} NPUs ({npus[0]}): set Ascend to serve on them"
        )
    if on_ascend:
        _check_ascend(values, None if spec is None else _cached(values, spec))
        _check_infer_boost(values, mindformers)
    elif values[KERNELS] != "plain":
        hint = "for the operator library; device_config.kernels: plain takes any, many times slower"
        _check_multiple(values, spec, MULTIPLE, hint)
    if not on_ascend and values["device_config.enable_graph_kernel"]:
        text = "True has no effect: on a CPU MindSpore fuses only graphs of fixed shapes, and the number of rows varies"
        values.notice("device_config.enable_graph_kernel", text)
    for name in ("pa_config.num_blocks", "pa_config.num_swap_blocks"):
        if (values[name] or 0) * values[BLOCK_SIZE] > MAX_SLOTS:
            rule = f"times pa_config.block_size {values[BLOCK_SIZE]} must be at most {MAX_SLOTS} tokens"
            raise values.error(name, rule)
    if spec is not None:
        if spec.vocab_size > MAX_VOCAB_SIZE:
            rule = f"must name a model with a vocabulary of at most {MAX_VOCAB_SIZE}"
            raise values.error(MODEL_PATH, rule, spec.vocab_size)
        _check_primitives(values, spec)
    _check_exactness(values)
    _check_quantization(values)
    _check_kv_cache(values, spec)
    _check_states(values, spec)
    _notice_swap(values)
    if values[DISK_CACHE] is not None:
        _check_disk_cache(values, spec)


def _check_multiple(values: Values, spec: ModelSpec | None, head_multiple: int, hint: str) -> None:
    if values[BLOCK_SIZE] % MULTIPLE:
        raise values.error(BLOCK_SIZE, f"must be a multiple of {MULTIPLE} {hint}")
    for head_dim in spec.head_dims if spec is not None else ():
        if head_dim % head_multiple:
            rule = f"must name a model whose head_dim is a multiple of {head_multiple} {hint}"
            raise values.error(MODEL_PATH, rule, head_dim)


def _check_ascend(values: Values, spec: ModelSpec | None) -> None:
    if values[DTYPE] not in ASCEND_DTYPES:
        raise values.error(DTYPE, f"must be one of {', '.join(ASCEND_DTYPES)} on Ascend")
    _check_multiple(values, spec, ASCEND_HEAD_MULTIPLE, "on Ascend")
    if spec is None:
        return
    head_dim, is_latent = max(spec.head_dims), _has_latent_keys(spec)
    if head_dim > (most := ASCEND_MAX_LATENT_DIM if is_latent else ASCEND_MAX_HEAD_DIM):
        raise values.error(MODEL_PATH, f"must name a model whose head_dim is at most {most} on Ascend", head_dim)
    if is_latent and values[BLOCK_SIZE] > ASCEND_MAX_LATENT_BLOCK_SIZE:
        raise values.error(
            BLOCK_SIZE, f"must be at most {ASCEND_MAX_LATENT_BLOCK_SIZE} on Ascend with multi-head latent attention"
        )
    if not is_latent and head_dim * values[BLOCK_SIZE] > ASCEND_MAX_BLOCK_ELEMENTS:
        rule = f"times the model's head_dim {head_dim} must be at most {ASCEND_MAX_BLOCK_ELEMENTS} on Ascend"
        raise values.error(BLOCK_SIZE, rule)


def _check_infer_boost(values: Values, mindformers: MindFormersFile | None) -> None:
    """Check the keys that infer boost, a mode of MindSpore, requires on Ascend; PagedAttention needs it. A wrong value
    from a MindFormers YAML is replaced with a notice, because MindFormers' server replaces it too.
    """
    for name, needed in (("device_config.enable_graph_kernel", False), ("device_config.jit_level", "O0")):
        given, source = values[name], values.source(name)
        if given == needed:
            continue
        if mindformers is None or name not in mindformers.values or mindformers.values[name].where != source:
            rule = (
                f"must be {needed} with device_config.device_target: Ascend ({values.source(TARGET)}): PagedAttention "
                "requires infer boost, which supports only jit_level O0"
            )
            raise values.error(name, rule)
        values.notice(name, f"{given} is read as {needed}: Ascend serves with infer boost at level O0")
        values.set(name, needed, source)


def _check_primitives(values: Values, spec: ModelSpec) -> None:
    on_ascend = values[TARGET] == "Ascend"
    if not on_ascend and values[KERNELS] not in ("primitives", "plain"):
        return
    if values["model_config.implementation"] != ImplementationName.NATIVE:  # `check_implementation` has checked it
        return
    in_cells = unsupported_by_cells(spec.network)
    if in_cells is None and not on_ascend and values[KERNELS] == "plain":
        return
    lacks = unsupported_by_ascend(spec.network, values["model_config.max_generate_length"])
    if lacks is not None:
        have = "program has" if in_cells else "program and plain have"
        where = "on Ascend" if on_ascend else f"with device_config.kernels: {values[KERNELS]} ({have} it)"
        raise values.error(MODEL_PATH, f"must name a model without {lacks} {where}", spec.architecture)
    if not on_ascend:
        values.require(DTYPE, ASCEND_DTYPES, "with device_config.kernels: primitives")


def _check_exactness(values: Values) -> None:
    name, mixed = "device_config.exactness", "scheduler_config.enable_mixed_chunk"
    if values[name] != ExactnessName.FAST:
        return
    if values[TARGET] != "Ascend" and values[KERNELS] != "primitives":
        rule = f"must be exact with {KERNELS}: {values[KERNELS]} on a CPU: only the primitives have another attention"
        raise values.error(name, rule)
    if values[mixed]:
        values.notice(name, f"fast applies to steps of whole prompts only; {mixed}: False makes more of them")


def _check_quantization(values: Values) -> None:
    name = "quant_config.quantization"
    quantization = _quantization(values[name], values["quant_config.group_size"])
    if quantization is None or _runs_programs(values[TARGET], values[KERNELS]):
        return
    condition = f"{_where(values)}: program on a CPU has it"
    if values[TARGET] == "CPU" and values[KERNELS] == "plain":
        values.require(name, (None, QuantizationName.DEQUANTIZED), condition)
    if unsupported_quantization(quantization) is not None:
        values.require(name, (QuantizationName.W8A8, None, QuantizationName.DEQUANTIZED), condition)


def _check_kv_cache(values: Values, spec: ModelSpec | None) -> None:
    name, auto = "quant_config.kv_cache_dtype", KVCacheDtypeName.AUTO
    if values[name] == auto:
        return
    if not _runs_programs(values[TARGET], values[KERNELS]):
        values.require(name, (auto,), f"{_where(values)}: program on a CPU has it")
    if spec is not None and (lacks := unsupported_by_int8_cache(spec.network)) is not None:
        values.require(name, (auto,), f"for {spec.architecture}, which has {lacks}")


def _check_states(values: Values, spec: ModelSpec | None) -> None:
    name, running = "pa_config.num_state_slots", values["model_config.decode_batch_size"]
    if values[name] is None or spec is None:
        return
    if not spec.states:
        values.notice(name, f"{values[name]} has no effect: {spec.architecture} has no fixed-size states")
    elif values[name] < running:
        raise values.error(name, f"must be at least {running}, the value of `model_config.decode_batch_size`")


def _where(values: Values) -> str:
    return f"with {TARGET}: {values[TARGET]} and {KERNELS}: {values[KERNELS]}"


_FOR_DISK_CACHE: Final = (
    ("scheduler_config.prefix_caching", True, "blocks are found by the hashes of prefix caching"),
    ("cluster_config.engine", "local", "only WorkAgents of this machine use its disk"),
    ("cluster_config.tensor_parallel", 1, "each rank has a part of a block"),
    ("cluster_config.roles", None, "both need the transfer buffer"),
    ("model_config.mindir_path", None, "the KV cache inside an exported graph cannot be read"),
)
"""(key, the only value allowed with a disk cache, reason)."""


def _check_disk_cache(values: Values, spec: ModelSpec | None) -> None:
    for other, needed, why in _FOR_DISK_CACHE:
        if values[other] != needed:
            raise values.error(DISK_CACHE, f"must be null with `{other}: {values[other]}`: {why}")
    if spec is None:
        return
    if spec.states:
        raise values.error(DISK_CACHE, "must be null for a model with fixed-size states: only KV blocks are stored")
    if spec.layout.windows[0].num_tokens:
        rule = "must be null for a model whose layers all have a sliding window: its first blocks are freed early"
        raise values.error(DISK_CACHE, rule)
    if not spec.network.causal:
        raise values.error(DISK_CACHE, "must be null for a model that is not causal: its prompts share no blocks")
    grouped = spec.with_cache_groups(values["model_config.max_generate_length"])
    if groups_layers(values[TARGET], values[KERNELS], None) and len(grouped.layout.windows) > 1:
        effect = "layers with a sliding window keep all their blocks: a disk cache stores whole blocks"
        values.notice(DISK_CACHE, effect)


def _notice_swap(values: Values) -> None:
    mode, pool = "scheduler_config.preemption_mode", "pa_config.num_swap_blocks"
    if values[mode] != "recompute" and values[pool] == 0:
        values.notice(mode, f"{values[mode]} never swaps: {pool} is 0")
    if values[mode] == "recompute" and values[pool] > 0:
        values.notice(pool, f"{values[pool]} blocks are never used: {mode} is recompute")
