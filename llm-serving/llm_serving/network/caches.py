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
    """The KV cache of a layer: keys and values, each [num_blocks, block_size, kv_heads, width]. If `value_width` is 0,
    the keys contain the values, as in latent attention.
    """

    kv_heads: int
    key_width: int
    value_width: int

    @property
    def num_elements(self) -> int:
        return self.kv_heads * (self.key_width + self.value_width)

    def num_parts_for(self, other: CacheShape) -> int:
        """Return how many layers of shape `other` exactly fill the memory of a layer of this shape, or 0."""
        parts, rest = divmod(self.kv_heads * self.key_width, other.kv_heads * other.key_width)
        fits = not rest and self.kv_heads * self.value_width == parts * other.kv_heads * other.value_width
        return parts if fits else 0

    def bytes_per_token(self, dtype_bytes: int, *, int8: bool = False) -> int:
        widths = self.key_width + self.value_width
        return self.kv_heads * (widths + 2 * INT8_SCALE_BYTES if int8 else widths * dtype_bytes)


@dataclass(frozen=True)
class StateShape:
    """States of one operation, float32 [num_state_slots, *shape]. A state summarizes a request's earlier tokens."""

    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return STATE_ELEMENT_BYTES * math.prod(self.shape)


MAX_GROUPS: Final = 8
"""Maximum number of groups of layers. Each group adds a block table to every request."""


@dataclass(frozen=True)
class CacheView:
    """A part of the memory of a key tensor and of its value tensor, as the KV cache of a layer with smaller blocks."""

    tensors: int
    part: int
    """Index of the part. All parts of a row of the pair have the same size."""
    shape: CacheShape


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a network's layers, and the tensors that hold their keys and values.

    The layers of a group attend to the same tokens and share a block table. All groups share the tensors: each pair of
    key and value tensors has one row for every block. The row holds the keys and values of one layer, or of several
    smaller layers, of the group that uses the block. So all groups take blocks from one pool, although groups with a
    window need fewer blocks than others.
    """

    windows: tuple[LayerWindow, ...]
    """Window of each group, the largest one first."""
    layer_tensors: tuple[tuple[int, int], ...]
    """(group, cache) of each layer. A cache is an index into the pairs of tensors and, after them, the views."""
    shapes: tuple[CacheShape, ...]
    views: tuple[CacheView, ...] = ()
    group_parts: tuple[int, ...] = ()
    """Number of parts of a row in the caches of each group. An empty tuple means 1 for all groups."""

    @property
    def max_parts(self) -> int:
        return max(self.group_parts, default=1)

    def num_blocks(self, num_tables: int) -> int:
        """Return how many blocks of this layout fit into a given memory. `num_tables`: size of this memory, in blocks
        that each hold the keys and values of all layers.
        """
        caches = [*self.shapes, *(view.shape for view in self.views)]
        of_layers = sum(caches[number].num_elements for _, number in self.layer_tensors)
        return num_tables * of_layers // sum(shape.num_elements for shape in self.shapes)


ONE_LAYER: Final = CacheLayout((LayerWindow(),), ((0, 0),), (CacheShape(1, 1, 1),))
"""The layout of an unknown model: one group, without a window."""


def ungrouped(shapes: Sequence[CacheShape], windows: Sequence[LayerWindow]) -> CacheLayout:
    """Return a layout with one group. Its window is the layers' widest, or none if a layer attends within chunks."""
    widest = max(windows, key=_reach, default=LayerWindow())
    chunked = any(each.is_chunked for each in windows)
    layer_tensors = tuple((0, layer) for layer in range(len(shapes)))
    return CacheLayout((LayerWindow() if chunked else widest,), layer_tensors, tuple(shapes))


def grouped(shapes: Sequence[CacheShape], windows: Sequence[LayerWindow], max_model_len: int) -> CacheLayout:
    """Return the layout of up to `MAX_GROUPS` groups with the least memory for requests of `max_model_len` tokens."""
    largest = max(shapes, key=lambda each: each.num_elements, default=ONE_LAYER.shapes[0])
    seen = [each if 0 < each.num_tokens < max_model_len else LayerWindow() for each in windows]
    kinds = sorted(zip(seen, shapes, strict=True), key=lambda kind: (-_reach(kind[0]), -kind[1].num_elements))
    counts, parts = Counter(kinds), {shape: largest.num_parts_for(shape) for shape in shapes}
    widest = max(map(_reach, seen), default=0)
    least = sum(each.num_elements for each in shapes) * min(max_model_len, widest), 1, 0
    if len(set(seen)) > 1 and all(parts.values()):
        for size in range(1, len(seen)):
            num_groups = {
                (window, shape): -(-count // (size * parts[shape])) for (window, shape), count in counts.items()
            }
            if sum(num_groups.values()) <= MAX_GROUPS:
                held = sum(number * min(max_model_len, _reach(window)) for (window, _), number in num_groups.items())
                least = min(least, (size * largest.num_elements * held, sum(num_groups.values()), size))
    size = least[-1]
    if not size:
        return ungrouped(shapes, windows)
    groups: list[tuple[LayerWindow, int]] = []
    views: dict[CacheView, int] = {}
    layer_tensors: dict[int, tuple[int, int]] = {}
    for window, shape in counts:
        layers = [layer for layer, kind in enumerate(zip(seen, shapes, strict=True)) if kind == (window, shape)]
        for number, layer in enumerate(layers):
            group, place = divmod(number, size * parts[shape])
            tensors, part = divmod(place, parts[shape])
            if shape != largest:
                tensors = size + views.setdefault(CacheView(tensors, part, shape), len(views))
            layer_tensors[layer] = len(groups) + group, tensors
        groups += [(window, parts[shape])] * -(-len(layers) // (size * parts[shape]))
    return CacheLayout(
        tuple(window for window, _ in groups),
        tuple(layer_tensors[layer] for layer in range(len(seen))),
        (largest,) * size,
        tuple(views),
        tuple(part for _, part in groups),
    )


def _reach(window: LayerWindow) -> int:
    return window.num_tokens or NO_WINDOW
