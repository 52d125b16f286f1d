"""A KV cache of the kernel library, filled and read through the operators."""

from dataclasses import dataclass

import numpy as np
from llm_serving.kernels import library
from support.kernel_calls import Array, Typed, call, empty, integers, scalar, status_of, typed
from support.kernels import reference

SCALE = 0.2
TRAPEZOIDAL = 1
"""Mode in which PagedAttention is causal without a mask."""


@dataclass
class Cache:
    """A cache of the library, and the same content computed by the reference."""

    dtype: str
    num_blocks: int = 24
    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 32

    def __post_init__(self) -> None:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        self.key, self.value = (typed(np.zeros(shape), self.dtype), typed(np.zeros(shape), self.dtype))
        self.expected_key, self.expected_value = np.zeros(shape), np.zeros(shape)

    def slots(self, blocks: list[int], first: int, last: int) -> list[int]:
        return [blocks[i // self.block_size] * self.block_size + i % self.block_size for i in range(first, last)]

    def store(self, k: Typed, v: Typed, slots: list[int]) -> None:
        call("ReshapeAndCache", k, v, self.key, self.value, integers(slots), empty(k.array.shape, self.dtype))
        reference.store_kv(k.values, v.values, self.expected_key, self.expected_value, np.array(slots, dtype=np.int64))

    def attend(
        self,
        q: Typed,
        tables: list[list[int]],
        query_lens: list[int],
        context_lens: list[int],
        mask: Typed | None = None,
    ) -> Typed:
        """Call PagedAttention with a mask, by default a causal one."""
        y = empty(q.array.shape, self.dtype)
        if mask is None:
            mask = typed(causal_mask(query_lens, context_lens, max(context_lens)), self.dtype)
        assert self.status(q, tables, query_lens, context_lens, y, mask=mask) == 0, library.last_error()
        return y

    def status(
        self,
        q: Typed,
        tables: list[list[int]],
        query_lens: list[int] | None,
        context_lens: list[int],
        y: Typed,
        *,
        mask: Typed | None = None,
        mode: int = 0,
    ) -> int:
        num_heads = q.array.shape[1] // self.head_dim
        modes = [scalar(value, "int64") for value in (0, mode, 0)]
        return status_of(
            "PagedAttention",
            *(q, self.key, self.value, padded(tables), integers(context_lens), None, None, mask),
            *(None if query_lens is None else integers(query_lens), None),
            *(scalar(num_heads, "int64"), scalar(SCALE, "float32"), scalar(self.num_kv_heads, "int64"), *modes, y),
        )


def causal_mask(query_lens: list[int], context_lens: list[int], width: int) -> Array:
    """Return a mask [rows, width] that is -10,000 for keys after a row's own."""
    lens = zip(query_lens, context_lens, strict=True)
    positions = np.concatenate([np.arange(context - queries, context) for queries, context in lens])
    return np.where(np.arange(width) > positions[:, None], -10000.0, 0.0)


def padded(tables: list[list[int]]) -> Typed:
    width = max(map(len, tables))
    return integers([table + [0] * (width - len(table)) for table in tables])


def rows(rng: np.random.Generator, count: int, width: int, dtype: str) -> Typed:
    return typed(rng.standard_normal((count, width)), dtype)


def filled(rng: np.random.Generator, cache: Cache, blocks: list[int], length: int) -> None:
    width = cache.num_kv_heads * cache.head_dim
    k, v = rows(rng, length, width, cache.dtype), rows(rng, length, width, cache.dtype)
    cache.store(k, v, cache.slots(blocks, 0, length))
