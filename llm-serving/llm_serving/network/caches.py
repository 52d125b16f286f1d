"""What a layer remembers of earlier tokens: keys and values of each token, or a state of fixed size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llm_serving.core.window import NO_WINDOW, LayerWindow

INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of each head of a token in an int8 KV cache (csrc/kv_layout.h)."""

STATE_ELEMENT_BYTES: Final = 4


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
    """The states of one operation, float32 [num_state_slots, *shape]. A state summarizes all earlier tokens of a
    request.
    """

    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return STATE_ELEMENT_BYTES * math.prod(self.shape)


MAX_GROUPS: Final = 8
"""Maximum number of groups of layers. Each group adds a block table to every request."""


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a network's layers, and the tensors that hold their keys and values.

    Layers that attend to the same tokens form one or more groups. Each group has as many layers as there are pairs of
    tensors. A block belongs to one group: it is one row of every pair of tensors, and each pair holds the keys and
    values of one layer of the group. So all groups take blocks from one pool, although a layer with a window needs
    fewer blocks than others.
    """

    windows: tuple[LayerWindow, ...]
    layer_tensors: tuple[tuple[int, int], ...]
    """(group, number of the pair of tensors) of each layer."""
    shapes: tuple[CacheShape, ...]

    def num_blocks(self, num_tables: int) -> int:
        """Return the number of blocks of groups that take as much memory as `num_tables` blocks of all layers."""
        return num_tables * len(self.layer_tensors) // len(self.shapes)


ONE_LAYER: Final = CacheLayout((LayerWindow(),), ((0, 0),), (CacheShape(1, 1, 1),))
"""The layout of an unknown model: one group, without a window."""


def ungrouped(shapes: Sequence[CacheShape], windows: Sequence[LayerWindow]) -> CacheLayout:
    """Return the layout of one group. `windows`: window of each layer. If one layer attends to all tokens, all blocks
    are kept.
    """
    widest = max(windows, key=_reach, default=LayerWindow())
    chunked = any(each.is_chunked for each in windows)
    layer_tensors = tuple((0, layer) for layer in range(len(shapes)))
    return CacheLayout((LayerWindow() if chunked else widest,), layer_tensors, tuple(shapes))


def grouped(shapes: Sequence[CacheShape], windows: Sequence[LayerWindow], max_model_len: int) -> CacheLayout:
    """Return the layout with which a request of `max_model_len` tokens needs least memory, with at most `MAX_GROUPS`.

    Groups with fewer layers waste less memory; larger groups need fewer tables. There is one group if the layers have
    different shapes, or if several groups save nothing.
    """
    seen = [each if 0 < each.num_tokens < max_model_len else LayerWindow() for each in windows]
    counts = Counter(sorted(seen, key=_reach, reverse=True))
    least = len(seen) * min(max_model_len, max(map(_reach, counts), default=0)), 1, 0
    if len(counts) > 1 and len(set(shapes)) == 1:
        for size in range(1, len(seen)):
            num_groups = {each: -(-count // size) for each, count in counts.items()}
            if sum(num_groups.values()) <= MAX_GROUPS:
                held = sum(number * min(max_model_len, _reach(each)) for each, number in num_groups.items())
                least = min(least, (size * held, sum(num_groups.values()), size))
    size = least[-1]
    if not size:
        return ungrouped(shapes, windows)
    groups: list[LayerWindow] = []
    layer_tensors: dict[int, tuple[int, int]] = {}
    for each in counts:
        layers = [layer for layer, window in enumerate(seen) if window == each]
        for number, layer in enumerate(layers):
            layer_tensors[layer] = len(groups) + number // size, number % size
        groups += [each] * -(-len(layers) // size)
    return CacheLayout(tuple(groups), tuple(layer_tensors[layer] for layer in range(len(seen))), tuple(shapes[:size]))


def _reach(window: LayerWindow) -> int:
    return window.num_tokens or NO_WINDOW
