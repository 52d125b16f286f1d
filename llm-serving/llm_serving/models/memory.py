"""Memory that a WorkAgent needs besides its KV cache, computed from the model and the batch limits."""

from __future__ import annotations

from typing import Final

from llm_serving.core.step import DRAFT_WINDOW, MAX_DRAFT_REQUESTS, MAX_PROPOSED_TOKENS, blocks_per_draft_request
from llm_serving.formats.gguf import Gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import Quantization, bytes_saved, can_multiply, keeps_blocks, schemes_of_stored

PROCESS_BYTES: Final = 600_000_000
"""Bytes of a WorkAgent without the model: interpreter, MindSpore with its graphs, step buffers."""
IDLE_BYTES: Final = 250_000_000
"""Resident bytes of a WorkAgent on a CPU before its first step, without the weights."""
FREE_MEMORY_FRACTION: Final = 0.5
"""Fraction of a host's free memory that all its WorkAgents together use if `max_device_memory` is null."""
FREE_NPU_MEMORY_FRACTION: Final = 0.9
"""Fraction of an NPU's free memory that a WorkAgent uses if `max_device_memory` is null. CANN takes the rest."""
NPU_SIZES_GB: Final = 32, 64
CANN_BYTES: Final = 3 * 2**30
"""Estimated bytes that CANN occupies on an NPU before a model is loaded. Not measured on a device."""
NPU_RESERVE: Final = 2**30
"""Bytes that stay free on an NPU even with `max_device_memory`, because MindSpore's limit must be below the total."""
MASK_BYTES: Final = 1 + 4 + 4 + 2
"""Peak bytes per element of an NPU's attention mask: a bool, two float32 and the model dtype."""
NUM_DRAWING_VALUES: Final = 16
"""Estimated number of float32 values that an NPU keeps at a time for each logit while it draws tokens. Not measured."""
LOGITS_BYTES: Final = 2**25
"""Maximum bytes of prompt logits that one step computes at a time."""
MIN_SPARE_SLOTS: Final = 8
SPARE_STATE_BYTES: Final = 2**30
KEPT_STATES: Final = 2 * MAX_DRAFT_REQUESTS * DRAFT_WINDOW
"""Number of tokens whose hidden states are kept for an MTP layer: twice as many as the layer reads at a time."""
MAX_SLOTS: Final = 2**31 - 1


def readable_size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def num_state_slots(state_bytes: int, max_running: int, given: int | None = None) -> int:
    """Return the number of recurrent-state slots: `given`, or one for each running request plus spare slots."""
    if not state_bytes:
        return 0
    return given or max_running + max(MIN_SPARE_SLOTS, min(max_running, SPARE_STATE_BYTES // state_bytes))


def num_mask_keys(device_target: str, max_model_len: int) -> int:
    """Return the number of columns of a step's attention mask [tokens, keys]. It is 0 on a CPU, which needs no mask."""
    return max_model_len if device_target == "Ascend" else 0


def working_bytes(
    spec: ModelSpec, dtype_bytes: int, max_num_batched_tokens: int, max_num_seqs: int, num_keys: int = 0
) -> int:
    """Return the bytes of temporary memory for the largest step or for loading the largest weight, whichever is larger.

    For each token a step holds the inputs and outputs of the widest operation. For each sampled row it holds the logits
    and the sampler's copies of them. It also holds one piece (LOGITS_BYTES) of the prompt logits, with as many copies.
    On an NPU there are also an attention mask with `num_keys` columns and further values of the sampler for each logit.
    Loading holds a weight as stored and a second copy, because its tensors may be stacked. Weights that are quantized
    in the folder also need memory for float32 values.
    """
    token = dtype_bytes * 2 * spec.max_row_elements + MASK_BYTES * num_keys
    row = 4 * (NUM_DRAWING_VALUES if num_keys else 3) * spec.vocab_size
    piece = 3 * min(max(LOGITS_BYTES, 4 * spec.vocab_size), max_num_batched_tokens * 4 * spec.vocab_size)
    on_its_way = 2 * dtype_bytes if spec.scheme is None else 3 * 4
    return max(max_num_batched_tokens * token + max_num_seqs * row + piece, on_its_way * spec.max_weight_elements)


def weight_bytes(spec: ModelSpec, dtype_bytes: int, quantization: Quantization | None) -> int:
    """Return the bytes of the loaded weights. GGUF blocks keep their size if `quantization` is None or `blocks_a16`."""
    elements = spec.num_weight_elements
    if keeps_blocks(quantization) and isinstance(spec.scheme, Gguf) and spec.scheme.block_elements <= elements:
        return (elements - spec.scheme.block_elements) * dtype_bytes + spec.scheme.block_bytes
    stored = spec.scheme.form if spec.scheme is not None else None
    schemes = () if quantization is None else schemes_of_stored(quantization.name)
    if stored is not None and schemes and not any(can_multiply(each, stored) for each in schemes):
        return elements * dtype_bytes
    in_8_bits = frozenset() if spec.scheme is None else spec.scheme.in_8_bits
    return elements * dtype_bytes - bytes_saved(spec.network, quantization, dtype_bytes, stored, in_8_bits)


def mtp_bytes(spec: ModelSpec, dtype_bytes: int, block_size: int, quantization: Quantization | None) -> int:
    layer = spec.mtp()
    if layer is None:
        return 0
    states = KEPT_STATES * spec.network.hidden * dtype_bytes
    return draft_model_bytes(layer, dtype_bytes, block_size, quantization) + states


def draft_model_bytes(
    spec: ModelSpec, dtype_bytes: int, block_size: int, quantization: Quantization | None = None
) -> int:
    tokens = MAX_DRAFT_REQUESTS * blocks_per_draft_request(block_size) * block_size
    step = working_bytes(spec, dtype_bytes, MAX_PROPOSED_TOKENS, MAX_DRAFT_REQUESTS)
    return weight_bytes(spec, dtype_bytes, quantization) + tokens * spec.kv_bytes_per_token(dtype_bytes) + step


def kv_cache_bytes_left(
    limit: int,
    spec: ModelSpec,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    quantization: Quantization | None = None,
    num_keys: int = 0,
) -> int:
    """Return the bytes of `limit` that remain for the KV cache. It is negative if even the model does not fit."""
    weights = weight_bytes(spec, dtype_bytes, quantization)
    working = working_bytes(spec, dtype_bytes, max_num_batched_tokens, max_num_seqs, num_keys)
    return limit - weights - PROCESS_BYTES - working
