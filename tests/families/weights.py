"""Random weights with which a fault shows.

A gain of one, a bias of zero, scores that are nearly equal or an embedding that alone decides the next token would hide
mistakes. So gains and biases are spread, queries and keys are large enough for attention to choose, and routers to
prefer. Where the head is the table, gains of either sign before it keep a token from calling for itself. All values are
bfloat16 exactly: a folder holds the same model in each of the three types.
"""

import math

import numpy as np
from families.drawn import bell, from_bfloat16, to_bfloat16
from families.model import Model

SMALLEST = 2.0**-16
"""Below it float16 has fewer bits than bfloat16."""

CHOOSING = (
    "q_proj",
    "k_proj",
    "qkv_proj",
    "query_key_value",
    "wqkv",
    "W_pack",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
HEAD_NORMS = tuple(
    f"{name}.weight" for name in ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
)


def weights_of(key: str, model: Model) -> dict[str, np.ndarray]:
    """Name -> float32 values of every tensor; `key` and the tensor's name alone choose them."""
    return {name: _tensor(f"{key}/{name}", name, shape, model) for name, shape in model.shapes.items()}


def _tensor(key: str, name: str, shape: tuple[int, ...], model: Model) -> np.ndarray:
    centre, spread = _gain_or_bias(name, model) if len(shape) == 1 else (0.0, _spread(name, shape, model))
    values = centre + spread * bell(key, shape)
    return from_bfloat16(to_bfloat16(np.where(np.abs(values) < SMALLEST, 0.0, values)))


def _gain_or_bias(name: str, model: Model) -> tuple[float, float]:
    if name.endswith(".bias"):
        return 0.0, model.bias_spread
    if name in ("model.norm.weight", "model.embedding_norm.weight") and model.tied:
        return -model.norm_offset, 1.2
    if name.endswith("linear_attn.norm.weight"):  # stored as it is used
        return 1.0, 0.3
    if name.endswith((".A_log", ".dt_bias")) and "linear_attn" not in name:  # so that states remember many tokens
        return -1.0, 0.6
    centre = model.head_norm if name.endswith(HEAD_NORMS) else 1.0
    return centre - model.norm_offset, 0.3


def _spread(name: str, shape: tuple[int, ...], model: Model) -> float:
    part = name.split(".")[-2]
    if part in ("embed_tokens", "tok_embeddings", "embed_in", "embeddings"):
        return 0.15 if model.tied else 1.0
    factor = 1.2
    if part in ("lm_head", "output", "embed_out"):
        factor = 1.5
    elif part in ("gate", "shared_expert_gate", "wg", "layer"):
        factor = 2.5
    elif part == "proj":  # Gemma 4's router, whose input is divided by the root of the hidden size
        factor = 20.0
    elif part in CHOOSING:
        factor = 1.35
    return factor / math.sqrt(shape[-1])
