"""The memory of a layer for earlier tokens: keys and values of each token, or a state of fixed size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of each head of a token in an int8 KV cache (csrc/kv_layout.h)."""

STATE_ELEMENT_BYTES: Final = 4
"""Bytes of an element of a state, which is float32 with any model dtype."""


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a layer: keys and values, each [num_blocks, block_size, kv_heads, width]."""

    kv_heads: int
    key_width: int
    value_width: int

    def bytes_per_token(self, dtype_bytes: int, *, int8: bool = False) -> int:
        """Return the bytes of one token's keys and values; with `int8`, including a scale for each head."""
        widths = self.key_width + self.value_width
        return self.kv_heads * (widths + 2 * INT8_SCALE_BYTES if int8 else widths * dtype_bytes)


@dataclass(frozen=True)
class StateShape:
    """The states of one operation: float32 [num_state_slots, *shape]. A state summarizes all earlier tokens of one
    request.
    """

    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of one state."""
        return STATE_ELEMENT_BYTES * math.prod(self.shape)
