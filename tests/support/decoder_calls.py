"""A small Llama, computed by calling the operators of the library one after the other."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.kernel_calls import Typed, call, empty, integers, linear, packed, scalar, typed
from support.kernels_cache import Cache, filled, rows

VOCAB, POSITIONS = 70, 96
NUM_HEADS, NUM_KV_HEADS = 4, 2
# Neither width fills whole registers or panels. With this many inner features, rows of gate and up are the widest if
# head_dim is 16, and rows of query, key and value if it is 48.
HIDDEN, INNER = 45, 100
# Both widths fill panels, so that gate and up are computed in one pass; bfloat16 is read in several passes, the last of
# which has half a tile.
WIDE_HIDDEN, WIDE_INNER = 304, 1072
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """Weights [N, K], packed, and vectors [N] of a layer; biases are None if the layer has none."""

    gain: Typed
    mlp_gain: Typed
    qkv_bias: Typed | None
    out_bias: Typed | None
    gate_up_bias: Typed | None
    down_bias: Typed | None
    qkv: Typed
    out: Typed
    gate_up: Typed
    down: Typed


@dataclass(frozen=True)
class Decoder:
    """Token embedding [V, H] (packed if it is also the LM head), cosines and sines [POSITIONS, D], norm weight [H], LM
    head [V, H].
    """

    table: Typed
    cos: Typed
    sin: Typed
    gain: Typed
    head: Typed
    layers: list[Layer]


@dataclass(frozen=True)
class Step:
    """The tokens of a step, and the requests and positions they belong to."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]
    samples: list[int]

    def part(self, request: int, first: int, last: int) -> "Step":
        """Return rows `first` to `last` of one request as a step of their own, in which every row samples."""
        start = sum(self.query_lens[:request])
        index = slice(start + first, start + last)
        context_len = self.context_lens[request] - self.query_lens[request] + last
        return Step(
            self.token_ids[index],
            self.positions[index],
            self.slots[index],
            [self.tables[request]],
            [last - first],
            [context_len],
            list(range(last - first)),
        )


def create_layer(
    dtype: str,
    head_dim: int,
    *,
    attention_bias: bool,
    mlp_bias: bool,
    hidden: int = HIDDEN,
    inner: int = INNER,
    seed: int = 1,
) -> Layer:
    vectors, weights = _drawn(dtype, head_dim, attention_bias, mlp_bias, hidden, inner, seed)
    return Layer(*vectors, *map(packed, weights))


@functools.cache  # shared by all instruction sets
def _drawn(
    dtype: str, head_dim: int, attention_bias: bool, mlp_bias: bool, hidden: int, inner: int, seed: int
) -> tuple[list[Typed | None], list[Typed]]:
    """Return the vectors of a layer, and its weights before they are packed."""
    rng = np.random.default_rng(seed)
    q_width = NUM_HEADS * head_dim
    qkv_width = q_width + 2 * NUM_KV_HEADS * head_dim

    def vector(size: int, present: bool = True) -> Typed | None:
        return typed(rng.standard_normal(size), dtype) if present else None

    def weight(n: int, k: int) -> Typed:
        return typed(rng.standard_normal((n, k)) / np.sqrt(k), dtype)

    gains = (typed(rng.standard_normal(hidden), dtype) for _ in range(2))
    attention_biases = (vector(size, attention_bias) for size in (qkv_width, hidden))
    mlp_biases = (vector(size, mlp_bias) for size in (2 * inner, hidden))
    shapes = (qkv_width, hidden), (hidden, q_width), (2 * inner, hidden), (hidden, inner)
    return [*gains, *attention_biases, *mlp_biases], [weight(*shape) for shape in shapes]


def create_decoder(
    dtype: str,
    head_dim: int,
    *,
    num_layers: int = 3,
    tied: bool = False,
    hidden: int = HIDDEN,
    positions: int = POSITIONS,
    **of_layers: Any,
) -> Decoder:
    rng = np.random.default_rng(4)
    table, head = (rows(rng, VOCAB, hidden, dtype) for _ in range(2))
    cos, sin = (rows(rng, positions, head_dim, dtype) for _ in range(2))
    gain = typed(rng.standard_normal(hidden), dtype)
    head = packed(table if tied else head)
    layers = [create_layer(dtype, head_dim, hidden=hidden, **of_layers, seed=1 + i) for i in range(num_layers)]
    return Decoder(head if tied else table, cos, sin, gain, head, layers)


def mixed_step(dtype: str, head_dim: int) -> tuple[Step, list[Cache]]:
    """Return a step of a whole prompt, a decode row and a chunk; caches contain the tokens before it.

    One key of the chunk is not stored. Rows sample in an order other than their own, one of them twice.
    """
    tables, query_lens, context_lens = [[3, 1, 4, 7, 5], [9, 2, 6], [8, 0]], [70, 1, 9], [70, 33, 20]
    step, caches = step_of(dtype, head_dim, tables, query_lens, context_lens)
    step.slots[75] = -1
    return replace(step, samples=[79, 70, 3, 70]), caches


def step_of(
    dtype: str, head_dim: int, tables: list[list[int]], query_lens: list[int], context_lens: list[int]
) -> tuple[Step, list[Cache]]:
    """Return a step in which every row samples."""
    rng = np.random.default_rng(2)
    caches = [Cache(dtype, num_kv_heads=NUM_KV_HEADS, head_dim=head_dim) for _ in range(3)]
    slots: list[int] = []
    positions: list[int] = []
    for table, query_len, context_len in zip(tables, query_lens, context_lens, strict=True):
        for cache in caches:
            filled(rng, cache, table, context_len - query_len)
        slots += caches[0].slots(table, context_len - query_len, context_len)
        positions += range(context_len - query_len, context_len)
    count = sum(query_lens)
    token_ids = rng.integers(0, VOCAB, count).tolist()
    return Step(token_ids, positions, slots, tables, query_lens, context_lens, list(range(count))), caches


def by_operators(decoder: Decoder, step: Step, caches: list[Cache]) -> Typed:
    """Return the logits of every row."""
    dtype = decoder.gain.dtype

    def looked_up(table: Typed, indices: list[int]) -> Typed:
        y = empty((len(indices), table.array.shape[1]), dtype)
        call("Gather", table, integers(indices), scalar(0, "int64"), scalar(0, "int64"), y)
        return y

    hidden = looked_up(decoder.table, step.token_ids)
    rotation = looked_up(decoder.cos, step.positions), looked_up(decoder.sin, step.positions)
    for layer, cache in zip(decoder.layers, caches, strict=True):
        hidden = _layer_by_operators(layer, hidden, *rotation, step, cache)
    normed = empty(hidden.array.shape, dtype)
    rstd = empty((len(hidden.array), 1), "float32")
    call("RmsNorm", hidden, decoder.gain, scalar(EPS, "float32"), normed, rstd)
    return linear(normed, decoder.head, "float32")


def _layer_by_operators(layer: Layer, hidden: Typed, cos: Typed, sin: Typed, step: Step, cache: Cache) -> Typed:
    dtype, count = hidden.dtype, len(hidden.array)
    eps, rstd = scalar(EPS, "float32"), empty((count, 1), "float32")
    normed, middle, result = (empty(hidden.array.shape, dtype) for _ in range(3))

    def multiplied(x: Typed, weight: Typed, bias: Typed | None) -> Typed:
        product = linear(x, weight)
        if bias is not None:
            repeated = Typed(np.tile(bias.array, (count, 1)), dtype)
            call("AddExt", product, repeated, scalar(1, "int64"), product)
        return product

    call("RmsNorm", hidden, layer.gain, eps, normed, rstd)
    qkv = multiplied(normed, layer.qkv, layer.qkv_bias)
    ends = np.cumsum([NUM_HEADS, NUM_KV_HEADS]) * cache.head_dim
    q, k, v = (Typed(np.ascontiguousarray(part), dtype) for part in np.split(qkv.array, ends, axis=1))
    rotated_q, rotated_k = empty(q.array.shape, dtype), empty(k.array.shape, dtype)
    call("ApplyRotaryPosEmb", q, k, cos, sin, integers([1]), scalar(2, "int64"), rotated_q, rotated_k)
    cache.store(rotated_k, v, step.slots)
    attended = cache.attend(rotated_q, step.tables, step.query_lens, step.context_lens)
    change = multiplied(attended, layer.out, layer.out_bias)
    call("AddRmsNorm", change, hidden, layer.mlp_gain, eps, normed, rstd, middle)
    gate_up = multiplied(normed, layer.gate_up, layer.gate_up_bias)
    gated = empty((count, layer.down.array.shape[1]), dtype)
    call("Swiglu", gate_up, scalar(-1, "int64"), gated)
    change = multiplied(gated, layer.down, layer.down_bias)
    call("AddExt", change, middle, scalar(1, "int64"), result)
    return result


def same_bits(caches: list[Cache], expected: list[Cache]) -> bool:
    pairs = zip(caches, expected, strict=True)
    return all(np.array_equal(a.key.bits, b.key.bits) and np.array_equal(a.value.bits, b.value.bits) for a, b in pairs)
