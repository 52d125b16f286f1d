"""What a WorkAgent needs of memory beside its key/value cache, told from the model and the limits alone."""

from __future__ import annotations

from typing import Final

from llm_serving.core.step import MAX_CONTINUATIONS, MAX_PROPOSED_TOKENS, blocks_of_continuation
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import Quantization, spared_bytes

PROCESS_BYTES: Final = 600_000_000
"""What a WorkAgent takes beside the model: the interpreter, MindSpore and its graphs, the buffers of steps."""
SHARE_OF_FREE_MEMORY: Final = 0.5
"""What one host's WorkAgents take of its free memory together when `max_device_memory` is not given."""
SHARE_OF_FREE_NPU_MEMORY: Final = 0.9
"""What a WorkAgent takes of the free memory of its NPU when `max_device_memory` is not given. The rest is for CANN's
workspaces and for gaps between allocations."""
NPU_RESERVE: Final = 2**30
"""Bytes that stay free on an NPU whatever `max_device_memory` allows: MindSpore refuses a limit that comes to all."""
MASK_BYTES: Final = 1 + 4 + 4 + 2
"""Bytes for each element of the attention mask of an NPU while it is made: bool, two of float32, the model dtype."""
LOGITS_BYTES: Final = 2**25
"""Of the logits that are made at once of tokens whose log-probabilities are wanted: no step makes more of them."""
MAX_SLOTS: Final = 2**31 - 1
"""Tokens of a cache: slot numbers are int32."""


def readable_size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def num_mask_keys(device_target: str, max_model_len: int) -> int:
    """Return the columns of the attention mask of a step: only the graph for an NPU makes one, [tokens, keys]."""
    return max_model_len if device_target == "Ascend" else 0


def working_bytes(
    spec: ModelSpec, dtype_bytes: int, max_num_batched_tokens: int, max_num_seqs: int, num_keys: int = 0
) -> int:
    """Most that is needed at once for a while: by the largest step, or before it by one weight on its way.

    A step holds a few of the widest values for each token, the logits of every row with what sampling makes of them,
    and a piece of those of a prompt, in the same way. A weight is there as stored, and once more where several are
    stacked; one that was quantised as float32, with its codes beside it.

    Args:
        spec: The model.
        dtype_bytes: Bytes of a number that is computed with.
        max_num_batched_tokens: Most tokens of a step.
        max_num_seqs: Most requests of a step.
        num_keys: Columns of the attention mask, from `num_mask_keys`.
    """
    token = dtype_bytes * 2 * spec.widest_row + MASK_BYTES * num_keys
    row = 4 * 3 * spec.vocab_size
    piece = 3 * min(max(LOGITS_BYTES, 4 * spec.vocab_size), max_num_batched_tokens * 4 * spec.vocab_size)
    on_its_way = 2 * dtype_bytes if spec.scheme is None else 3 * 4
    return max(max_num_batched_tokens * token + max_num_seqs * row + piece, on_its_way * spec.largest_weight)


def weight_bytes(spec: ModelSpec, dtype_bytes: int, quantization: Quantization | None) -> int:
    """Of all weights, as they are served."""
    return spec.num_held * dtype_bytes - spared_bytes(spec.network, quantization, dtype_bytes)


def draft_model_bytes(spec: ModelSpec, dtype_bytes: int, block_size: int) -> int:
    """Of a draft model: weights, cache and its largest step."""
    tokens = MAX_CONTINUATIONS * blocks_of_continuation(block_size) * block_size
    step = working_bytes(spec, dtype_bytes, MAX_PROPOSED_TOKENS, MAX_CONTINUATIONS)
    return weight_bytes(spec, dtype_bytes, None) + tokens * spec.kv_bytes_per_token(dtype_bytes) + step


def bytes_for_cache(
    limit: int,
    spec: ModelSpec,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    quantization: Quantization | None = None,
    num_keys: int = 0,
) -> int:
    """What is left of `limit` for keys and values; negative where the model alone does not fit."""
    weights = weight_bytes(spec, dtype_bytes, quantization)
    working = working_bytes(spec, dtype_bytes, max_num_batched_tokens, max_num_seqs, num_keys)
    return limit - weights - PROCESS_BYTES - working
