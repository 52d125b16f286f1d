"""Operations of a decoder made of several of a device's own, for devices that have no single one for them."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops


class RotateAndStore(nn.Cell):
    """(qkv, cos, sin, key_cache, value_cache, slot_mapping) -> q, k, v: q and k rotated, k and v in the cache.

    What depends on q runs after the write: a row attends to the keys of its own step too.

    Args:
        split: (qkv) -> q, k, v
        rotary: (q, k, cos, sin) -> (q, k) rotated
        store_kv: (k, v, key_cache, value_cache, slot_mapping) -> a tensor to depend on
    """

    def __init__(self, split: nn.Cell, rotary: nn.Cell, store_kv: nn.Cell) -> None:
        super().__init__()
        self.split = split
        self.rotary = rotary
        self.store_kv = store_kv

    def construct(
        self,
        qkv: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        slot_mapping: ms.Tensor,
    ) -> tuple[ms.Tensor, ms.Tensor, ms.Tensor]:
        q, k, v = self.split(qkv)
        q, k = self.rotary(q, k, cos, sin)
        stored = self.store_kv(k, v, key_cache, value_cache, slot_mapping)
        return ops.depend(q, stored), k, v


class AttentionOfQkv(nn.Cell):
    """`Backend.attention`.

    Args:
        rotate_and_store: As above.
        paged_attention: (q, key_cache, value_cache, block_tables, query_lens, context_lens) -> [T, num_heads*D]
    """

    def __init__(self, rotate_and_store: RotateAndStore, paged_attention: nn.Cell) -> None:
        super().__init__()
        self.rotate_and_store = rotate_and_store
        self.paged_attention = paged_attention

    def construct(
        self,
        qkv: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        q, _, _ = self.rotate_and_store(qkv, cos, sin, key_cache, value_cache, slot_mapping)
        return self.paged_attention(q, key_cache, value_cache, block_tables, query_lens, context_lens)
