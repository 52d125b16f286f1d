"""Causal self-attention over the paged KV cache."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.linear import Linear

_MASK_SIZE = 128
_FLOAT16_MASKED = -10000.0


class PagedSelfAttention(nn.Cell):
    """x [T, H] -> [T, H]; writes keys and values of its rows to their slots, then reads whole contexts by block table.

    Prompts, chunks of prompts and decode rows mix freely: a row sees what is in the cache up to itself.

    Args:
        backend: Makes the operations.
        spec: The model.
        qkv: H -> (num_attention_heads + 2 * num_key_value_heads) * head_dim: query, key, value.
        out: num_attention_heads * head_dim -> H.
        kv_cache: Key and value cache of this layer, from `Backend.kv_cache`.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        qkv: Linear,
        out: Linear,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
    ) -> None:
        super().__init__()
        heads = (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim)
        self.qkv = qkv
        self.split = backend.split((spec.q_size, spec.kv_size, spec.kv_size))
        self.rotary = backend.rotary(*heads)
        self.store_kv = backend.store_kv()
        self.attention = backend.attention(*heads, spec.head_dim**-0.5)
        self.whole_prompts = False
        self.out = out
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
        q, k, v = self.split(self.qkv(x))
        q, k = self.rotary(q, k, cos, sin)
        stored = self.store_kv(k, v, self.key_cache, self.value_cache, slot_mapping)
        # A row attends to the keys of its own step too: they must be in the cache first.
        q = ops.depend(q, stored)
        if self.whole_prompts:
            x = self.prompt_attention(q, k, v, self.prompt_mask, ops.cast(query_lens, ms.int64))
        else:
            x = self.attention(q, self.key_cache, self.value_cache, block_tables, query_lens, context_lens)
        return self.out(x)

    def use_whole_prompts(self, prompt_attention: nn.Cell, dtype: Any) -> None:
        """Lets the graph compiled next serve steps of whole prompts only, none of whose tokens is cached.

        Keys and values then come straight from the products of the step, by FlashAttention.

        Args:
            prompt_attention: From `AscendBackend.prompt_attention`.
            dtype: MindSpore dtype of the activations.
        """
        self.prompt_attention = prompt_attention
        self.prompt_mask = _prompt_mask(dtype)
        self.whole_prompts = True


def _prompt_mask(dtype: Any) -> ms.Tensor:
    """What FlashAttentionScore in layout TH lays along the diagonal: [128, 128], set above it.

    The device multiplies a bfloat16 mask by a large negative number itself and adds a float16 mask as it is.
    """
    above = np.triu(np.ones((_MASK_SIZE, _MASK_SIZE), np.float32), 1)
    return ms.Tensor(above if dtype == ms.bfloat16 else above * _FLOAT16_MASKED).astype(dtype)
