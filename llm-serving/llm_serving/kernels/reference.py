"""What the kernels must compute, in NumPy: the definition of correct.

Arguments are exact values (bfloat16 and float16 widened to float), results float64. A kernel may differ by the rounding
of its sums and of its result; the tests derive by how much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


def linear(x: Floats, weight: Floats) -> Doubles:
    """[M, K] x [N, K] -> [M, N]"""
    product: Doubles = _double(x) @ _double(weight).T
    return product


def embedding(token_ids: Integers, table: Floats) -> Doubles:
    """[T], [V, H] -> [T, H]"""
    rows: Doubles = _double(table)[token_ids]
    return rows


def rms_norm(x: Floats, gamma: Floats, eps: float) -> Doubles:
    """B. Zhang and R. Sennrich, Root Mean Square Layer Normalization (2019): [T, H], [H] -> [T, H]"""
    values = _double(x)
    normed: Doubles = values / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + eps) * _double(gamma)
    return normed


def rotary(x: Floats, cos: Floats, sin: Floats) -> Doubles:
    """[T, heads*D] rotated by [T, D] tables: element i of a head turns with element i + D/2.

    J. Su et al., RoFormer (2021), in the rotate-half convention of Llama checkpoints.
    """
    head_dim = cos.shape[1]
    heads = _double(x).reshape(len(x), -1, head_dim)
    turned = np.concatenate([-heads[..., head_dim // 2 :], heads[..., : head_dim // 2]], axis=-1)
    rotated = heads * _double(cos)[:, None] + turned * _double(sin)[:, None]
    result: Doubles = rotated.reshape(x.shape)
    return result


def swiglu(gate_up: Floats) -> Doubles:
    """N. Shazeer, GLU Variants Improve Transformer (2020): [T, 2*I] -> [T, I]"""
    gate, up = np.split(_double(gate_up), 2, axis=-1)
    with np.errstate(over="ignore"):
        gated: Doubles = gate / (1 + np.exp(-gate)) * up
    return gated


def store_kv(k: Floats, v: Floats, key_cache: Floats, value_cache: Floats, slot_mapping: Integers) -> None:
    """Write rows [T, num_kv_heads*D] into caches [num_blocks, block_size, num_kv_heads, D] in place; -1 skips."""
    kept = slot_mapping >= 0
    for rows, cache in ((k, key_cache), (v, value_cache)):
        slots = cache.reshape(-1, cache.shape[2] * cache.shape[3])
        slots[slot_mapping[kept]] = rows[kept]


def attention(
    q: Floats,
    key_cache: Floats,
    value_cache: Floats,
    block_tables: Integers,
    query_lens: Integers,
    context_lens: Integers,
    scale: float,
) -> Doubles:
    """Causal attention of packed rows over a paged cache.

    Args:
        q: [T, num_heads*D]; request b owns `query_lens[b]` consecutive rows.
        key_cache: [num_blocks, block_size, num_kv_heads, D].
        value_cache: As `key_cache`.
        block_tables: [B, W].
        query_lens: [B].
        context_lens: [B], these rows included.
        scale: Factor of the scores.

    Returns:
        [T, num_heads*D]
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    queries = _double(q).reshape(len(q), num_kv_heads, -1, head_dim)
    result = np.zeros_like(queries)
    row = 0
    for table, num_queries, context in zip(block_tables, query_lens, context_lens, strict=True):
        keys = _double(key_cache)[table].reshape(-1, num_kv_heads, head_dim)[:context]
        values = _double(value_cache)[table].reshape(-1, num_kv_heads, head_dim)[:context]
        for seen in range(context - num_queries + 1, context + 1):
            scores = np.einsum("hgd,jhd->hgj", queries[row], keys[:seen]) * scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            result[row] = np.einsum("hgj,jhd->hgd", weights, values[:seen])
            row += 1
    return result.reshape(q.shape)


def _double(array: Floats) -> Doubles:
    return np.asarray(array, dtype=np.float64)
