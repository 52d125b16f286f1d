"""Attention of all model families: heads, rotary embedding and projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import Network
from llm_serving.network.key_bias import without_bias
from llm_serving.network.operations import Operation, Value, Weight
from llm_serving.network.rope import ROPE_SCALINGS, Rotary, Scaling
from llm_serving.network.weights import padded_order, repeated_order, shared_order

HEAD_MULTIPLE: Final = 16
"""Heads in a KV cache are padded to a multiple of this number of elements."""
MAX_WIDTH: Final = 2**20
HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
HeadNorm = Callable[[Value, str, list[int]], Value]
"""(queries or keys, tensor name prefix, column order in the checkpoint) -> normalised heads."""


@dataclass(frozen=True)
class Heads:
    """The numbers of query and KV heads, and the size of a head: `own` in the checkpoint, `dim` with padding."""

    q: int
    kv: int
    own: int

    @property
    def dim(self) -> int:
        return -(-self.own // HEAD_MULTIPLE) * HEAD_MULTIPLE

    @property
    def q_width(self) -> int:
        return self.q * self.dim

    @property
    def kv_width(self) -> int:
        return self.kv * self.dim


def attention_heads(c: ConfigReader) -> Heads:
    q = c.integer("num_attention_heads")
    kv = c.integer("num_key_value_heads", q)
    if q % kv:
        raise c.fail("num_attention_heads", f"must be a multiple of `num_key_value_heads` {kv}")
    own = c.integer("head_dim", max(1, c.integer("hidden_size") // q))
    if own < 2 or own % 2:
        raise c.fail("head_dim", f"must be even for rotary embeddings, is {own}")
    if q * own > MAX_WIDTH:
        raise c.fail("num_attention_heads", f"times `head_dim` {own} must be at most {MAX_WIDTH}")
    return Heads(q, kv, own)


def rotary_embedding(
    c: ConfigReader,
    heads: Heads,
    *,
    interleaved: bool = False,
    kind: str = "",
    theta: float = 10000.0,
    fraction: float = 1.0,
    fraction_key: str = "partial_rotary_factor",
) -> Rotary:
    """Read the rotary embedding from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`.

    `kind`: kind of layer, for which `rope_parameters` may have an entry. `theta`, `fraction`: defaults of the base and
    of the fraction of a head's elements that rotate. `fraction_key`: key that an error about the fraction names.
    """
    reader = rope_config(c)
    if kind and reader.has(kind):
        reader = reader.inner(kind)
    theta = reader.number("rope_theta", c.number("rope_theta", theta))
    fraction = reader.number("partial_rotary_factor", c.number("partial_rotary_factor", fraction))
    if fraction > 1 or (rotary_dim := int(heads.own * fraction)) < 2 or rotary_dim % 2:
        raise c.fail(fraction_key, f"must select an even number of the {heads.own} elements of a head for rotation")
    return Rotary(heads.dim, rotary_dim, theta, interleaved, rope_scaling(c, reader, rotary_dim), heads.own)


def fraction_of(rotary_dim: int, size: int) -> float:
    """Return `rotary_dim` / `size`, rounded up, so that `int(fraction * size)` is `rotary_dim` again."""
    return 1.0 if rotary_dim == size else math.nextafter(rotary_dim / size, math.inf)


def rope_config(c: ConfigReader) -> ConfigReader:
    key = "rope_parameters" if c.has("rope_parameters") else "rope_scaling"
    return c.inner(key) if c.has(key) else ConfigReader({}, c.where)


def rope_scaling(c: ConfigReader, reader: ConfigReader, rotary_dim: int) -> Scaling | None:
    key = "rope_type" if reader.has("rope_type") else "type"
    name = reader.choice(key, ("default", *ROPE_SCALINGS, "mrope", "su"), "default")
    if name == "mrope":
        raise reader.fail(key, f"must be one of default, {', '.join(ROPE_SCALINGS)}")
    if name == "default":
        return None
    if name == "dynamic" and rotary_dim < 4:
        raise reader.fail(key, f"must not be dynamic: it needs at least 4 rotated elements per head, not {rotary_dim}")
    name = "longrope" if name == "su" else name
    longest = c.integer("max_position_embeddings", 2048)
    trained = {"llama3": 8192}.get(name, longest)
    original = reader.integer(
        "original_max_position_embeddings", c.integer("original_max_position_embeddings", trained)
    )
    attention_factor = reader.number("attention_factor") if reader.has("attention_factor") else None
    if name == "longrope":
        half = rotary_dim // 2
        short, long = reader.numbers("short_factor", half), reader.numbers("long_factor", half)
        factor = reader.number("factor", longest / original)
        return Scaling(name, factor, original, short=short, long=long, attention_factor=attention_factor)
    if not reader.has("factor"):
        raise reader.fail("factor", f"must be given for {name}")
    factor = reader.number("factor")
    if name == "llama3":
        low, high = reader.number("low_freq_factor", 1.0), reader.number("high_freq_factor", 4.0)
        if low >= high:
            raise reader.fail("low_freq_factor", f"must be less than `high_freq_factor` {high}")
        return Scaling(name, factor, original, low=low, high=high)
    if name == "yarn":
        return Scaling(
            name,
            factor,
            original,
            low=reader.number("beta_slow", 1.0),
            high=reader.number("beta_fast", 32.0),
            attention_factor=attention_factor,
            mscale=reader.number("mscale") if reader.has("mscale") else None,
            mscale_all_dim=reader.number("mscale_all_dim") if reader.has("mscale_all_dim") else None,
            truncate=reader.boolean("truncate", True),
        )
    return Scaling(name, factor, longest if name == "dynamic" else original)


def self_attention(
    net: Network,
    x: Value,
    at: str,
    heads: Heads,
    rotary: Rotary | None,
    *,
    names: Sequence[str] = QKV,
    out: str = "self_attn.o_proj",
    norms: tuple[str, str] | None = None,
    whole_norms: bool = False,
    norms_after_rope: bool = False,
    unweighted_norms: bool = False,
    head_norm: HeadNorm | None = None,
    q_rotary: Rotary | None = None,
    grouped: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    scale: float | None = None,
    window: int | None = None,
    chunk: int = 0,
    cap: float | None = None,
    slopes: Weight | None = None,
    sinks: bool = False,
) -> Value:
    """Add the QKV projection, norms of heads, rotary embedding, attention and the output projection.

    Args:
        q_rotary: Rotary embedding of the queries, if it differs from that of the keys.
        names: Tensor names of query, key and value, or the name of one tensor that stacks all three.
        out: Tensor name of the output projection.
        norms: Tensor names of the query norm and the key norm.
        whole_norms: Whether these norms extend over all heads of a row; otherwise each head is normalised by itself.
        norms_after_rope: Whether the norms follow the rotary embedding.
        head_norm: Norm in place of `Network.rms_norm`.
        unweighted_norms: Whether heads are normalised without weights after the rotary embedding.
        grouped: Whether the stacked tensor has, for each KV head in turn, its query heads, its key and its value.
        scale: Factor of the scores. None means own^-0.5, with the head size `Heads.own` of the checkpoint.
        window, chunk, cap, slopes, sinks: See `Network.attention`.
    """
    q_rows, kv_rows = heads.q * heads.own, heads.kv * heads.own
    sizes = (q_rows, kv_rows, kv_rows) if len(names) == 3 else (q_rows + 2 * kv_rows,)
    rows = qkv_rows(heads, rotary, grouped)
    qkv = net.linear(x, [at + name for name in names], sizes, bias=bias, rows=rows)
    product = net.operations[-1]
    q, k, v = net.split(qkv, heads.q_width, heads.kv_width, heads.kv_width)

    def normalized(parts: Sequence[Value]) -> list[Value]:
        order = _padded(heads) if rotary is None else rotary.order()
        named = zip(parts, norms or (), (heads.q, heads.kv), strict=True)
        if head_norm is not None:
            return [head_norm(part, at + name, repeated_order(n, heads.own, order)) for part, name, n in named]
        if not whole_norms:
            shape: dict[str, Any] = {"group": heads.dim, "unpadded": heads.own, "rows": order}
            return [net.rms_norm(part, at + name, **shape) for part, name, _ in named]
        return [
            net.rms_norm(part, at + name, unpadded=n * heads.own, rows=repeated_order(n, heads.own, order))
            for part, name, n in named
        ]

    if norms is not None and not norms_after_rope:
        q, k = normalized((q, k))
    if (of_queries := q_rotary or rotary) is not None:
        q = net.rope(q, of_queries)
    # Subtracting an offset from all keys shifts all scores of a query equally, except the score of a sink.
    moves_keys = bias and norms is None and not unweighted_norms and cap is None and not sinks and net.causal
    if rotary is not None:
        k = net.rope(k, rotary, _key_offset(product, k, rotary) if moves_keys else None)
    elif moves_keys:
        net.operations[net.operations.index(product)], _ = without_bias(product, k)
    if norms is not None and norms_after_rope:
        q, k = normalized((q, k))
    if unweighted_norms:
        q, k = (net.rms_norm(part, None, group=heads.dim, unpadded=heads.own) for part in (q, k))
    of_heads = Weight((f"{at}self_attn.sinks",), (heads.q,), ((heads.q,),), dtype="float32") if sinks else None
    layer = net.store_kv(k, v, heads.kv)
    scale = heads.own**-0.5 if scale is None else scale
    attended = net.attention(q, layer, scale=scale, window=window, chunk=chunk, cap=cap, slopes=slopes, sinks=of_heads)
    return net.linear(attended, at + out, net.hidden, bias=out_bias, columns=output_columns(heads))


def _key_offset(product: Operation, k: Value, rotary: Rotary) -> Weight:
    """Return the offset that `rope` subtracts from keys: the mean over positions of their rotated bias."""
    _, bias = without_bias(product, k)
    return replace(bias, transform=rotary.mean_rotated, dtype="float32")


@lru_cache(8)
def qkv_rows(heads: Heads, rotary: Rotary | None, grouped: bool) -> tuple[int, ...]:
    """Return, for each row of the QKV weight, its row in the checkpoint, or -1 for zeros. Heads of queries and keys are
    in `Rotary.order`. `grouped`: the checkpoint stores queries, keys and values of each KV head together.
    """
    order = _padded(heads) if rotary is None else rotary.order()
    group = heads.q // heads.kv
    if grouped:
        q = [head // group * (group + 2) + head % group for head in range(heads.q)]
        k = [each * (group + 2) + group for each in range(heads.kv)]
        v = [at + 1 for at in k]
    else:
        q = list(range(heads.q))
        k = list(range(heads.q, heads.q + heads.kv))
        v = list(range(heads.q + heads.kv, heads.q + 2 * heads.kv))
    rotated = [-1 if i < 0 else head * heads.own + i for head in (*q, *k) for i in order]
    return (*rotated, *(-1 if i < 0 else head * heads.own + i for head in v for i in _padded(heads)))


def output_columns(heads: Heads, order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return, for each column of the output projection, its column in the checkpoint, or -1 for zeros. `order`: for
    each element of a head, its index in the stored head. Without it, the stored order stays, and zeros pad each head.
    """
    return shared_order(tuple(repeated_order(heads.q, heads.own, order or _padded(heads))))


def _padded(heads: Heads) -> list[int]:
    return padded_order(heads.own, HEAD_MULTIPLE)


def sliding_window(c: ConfigReader, default: int | None = None) -> int | None:
    if c.has("sliding_window"):
        return c.integer("sliding_window")
    return default if c.is_absent("sliding_window") else None
