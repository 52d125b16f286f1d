"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.linear import Linear


class PagedSelfAttention(nn.Cell):
    """x [T, H] -> [T, num_attention_heads * head_dim], before the projection back to H.

    Writes keys and values of its rows to their slots, then reads whole contexts by block table. Prompts, chunks of
    prompts and decode rows mix freely: a row sees what is in the cache up to itself.

    Args:
        backend: Makes the operations.
        spec: The model.
        qkv: H -> (num_attention_heads + 2 * num_key_value_heads) * head_dim: query, key, value.
        kv_cache: Key and value cache of this layer, from `Backend.kv_cache`.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        qkv: Linear,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.attention = backend.attention(*head_sizes(spec))
        self.key_cache, self.value_cache = kv_cache

    def construct(
        self,
        x: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        caches = self.key_cache, self.value_cache
        step = slot_mapping, block_tables, query_lens, context_lens
        return self.attention(self.qkv(x), cos, sin, *caches, *step)


def head_sizes(spec: ModelSpec) -> tuple[int, int, int, float]:
    """What attention of a backend is made for: num_heads, num_kv_heads, head_dim, scale of the scores."""
    return spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.head_dim**-0.5
