"""What several families are made of. A family calls these with its own facts; nothing here knows a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from llm_serving.models.model_config import Facts
from llm_serving.network.builder import PANEL, Expert, Network, Routing, blocks, filled
from llm_serving.network.operations import Change, Value, Weight
from llm_serving.network.rope import SCALINGS, Rotary, Scaling

HEAD_MULTIPLE: Final = 16
"""Elements in whose multiples the heads of a cache are stored; others are filled up with zeros."""

MAX_WIDTH: Final = 2**20
"""Elements that all heads of a row have together."""
MAX_EXPERT_COLUMNS: Final = 2**21
"""Columns that all experts of a layer have together."""

QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

Layer = Callable[[Value, int, str], Value]
"""(hidden, number of the layer, prefix of its names) -> hidden"""


@dataclass(frozen=True)
class Heads:
    """Heads of queries, of keys and values, and elements of one: as stored and as computed."""

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


def heads_of(c: Facts) -> Heads:
    """The heads of a configuration of the usual kind."""
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


def rotary_of(
    c: Facts, heads: Heads, *, interleaved: bool = False, kind: str = "", theta: float = 10000.0, share: float = 1.0
) -> Rotary:
    """The rotary embedding of a configuration of the usual kind.

    `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that hold both, perhaps once for each kind of layer.

    Args:
        c: The configuration.
        heads: Of attention.
        interleaved: As `Rotary.interleaved`.
        kind: Of layer, where each has parameters of its own.
        theta, share: Where the configuration has none: the base, and the share of a head that turns.
    """
    facts = rope_facts(c)
    if kind and facts.has(kind):
        facts = facts.inner(kind)
    theta = facts.number("rope_theta", c.number("rope_theta", theta))
    share = facts.number("partial_rotary_factor", c.number("partial_rotary_factor", share))
    turning = int(heads.own * share)
    if share > 1 or turning < 2 or turning % 2:
        raise c.fail("partial_rotary_factor", f"must leave an even number of the {heads.own} elements of a head")
    return Rotary(heads.dim, turning, theta, interleaved, scaling_of(c, facts, turning), heads.own)


def rope_facts(c: Facts) -> Facts:
    """Of the newer `rope_parameters` or of `rope_scaling`; none where the configuration has neither."""
    key = "rope_parameters" if c.has("rope_parameters") else "rope_scaling"
    return c.inner(key) if c.has(key) else Facts({}, c.where)


def scaling_of(c: Facts, facts: Facts, turning: int) -> Scaling | None:
    """How a rotation is stretched.

    Args:
        c: The configuration.
        facts: Its `rope_scaling` or `rope_parameters`.
        turning: Elements of a head that turn.
    """
    key = "rope_type" if facts.has("rope_type") else "type"
    name = facts.choice(key, ("default", *SCALINGS, "mrope", "su"), "default")
    if name == "mrope":
        raise facts.fail(key, f"must be one of default, {', '.join(SCALINGS)}")
    if name == "default":
        return None
    if name == "dynamic" and turning < 4:
        raise facts.fail(key, f"must be another where only {turning} elements of a head turn")
    name = "longrope" if name == "su" else name
    longest = c.integer("max_position_embeddings", 2048)
    trained = {"llama3": 8192}.get(name, longest)
    original = facts.integer("original_max_position_embeddings", c.integer("original_max_position_embeddings", trained))
    attention_factor = facts.number("attention_factor") if facts.has("attention_factor") else None
    if name == "longrope":
        half = turning // 2
        short, long = facts.numbers("short_factor", half), facts.numbers("long_factor", half)
        factor = facts.number("factor", longest / original)
        return Scaling(
            kind=name, factor=factor, original=original, short=short, long=long, attention_factor=attention_factor
        )
    if not facts.has("factor"):
        raise facts.fail("factor", f"must be given for {name}")
    factor = facts.number("factor")
    if name == "llama3":
        low, high = facts.number("low_freq_factor", 1.0), facts.number("high_freq_factor", 4.0)
        if low >= high:
            raise facts.fail("low_freq_factor", f"must be less than `high_freq_factor` {high}")
        return Scaling(kind=name, factor=factor, original=original, low=low, high=high)
    if name == "yarn":
        return Scaling(
            kind=name,
            factor=factor,
            original=original,
            low=facts.number("beta_slow", 1.0),
            high=facts.number("beta_fast", 32.0),
            attention_factor=attention_factor,
            mscale=facts.number("mscale") if facts.has("mscale") else None,
            mscale_all_dim=facts.number("mscale_all_dim") if facts.has("mscale_all_dim") else None,
            truncate=facts.boolean("truncate", True),
        )
    return Scaling(kind=name, factor=factor, original=longest if name == "dynamic" else original)


def network_of(c: Facts, change_gain: Change | None = None, *, eps: float = 1e-6) -> Network:
    """An empty network of a configuration's sizes; `eps` of norms, where it has none."""
    sizes = c.integer("hidden_size"), c.integer("vocab_size")
    return Network(*sizes, c.number("rms_norm_eps", eps), change_gain)


def decoder(
    net: Network,
    c: Facts,
    layer: Layer,
    *,
    table: str = "model.embed_tokens",
    head: str = "lm_head",
    layers: str = "model.layers",
    norm: str = "model.norm",
    tied: bool = False,
    table_scale: float = 1.0,
    rounded_scale: bool = False,
    scale: float = 1.0,
    cap: float | None = None,
    change_head: Change | None = None,
) -> Network:
    """Table, layers, norm and head; names are of the tensors.

    Args:
        net: Gets the operations, and is returned.
        c: The configuration.
        layer: Makes a layer.
        table, head, layers, norm: Names.
        tied: The head is the table, unless `tie_word_embeddings` says otherwise.
        table_scale, rounded_scale: As `scale` and `rounded_scale` of `Network.gather`.
        scale, cap, change_head: As `scale`, `cap` and `change` of `Network.output`.
    """
    hidden = net.gather(table, scale=table_scale, rounded_scale=rounded_scale)
    for index in range(c.integer("num_hidden_layers")):
        hidden = layer(hidden, index, f"{layers}.{index}.")
    if c.boolean("tie_word_embeddings", tied):
        net.may_have(f"{head}.weight")  # some exporters write the table twice
        head = table
    net.output(net.norm(hidden, norm), head, scale=scale, cap=cap, change=change_head)
    return net


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
    grouped: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    slopes: Weight | None = None,
) -> Value:
    """Queries, keys and values, their rotation, attention and what brings it back.

    Args:
        net: Gets the operations.
        x: Normed rows.
        at: Prefix of names.
        heads: Of attention.
        rotary: None where nothing turns.
        names: Of query, key and value, or of the one tensor that has them stacked.
        out: Name of the product behind attention.
        norms: Names of the norms of query and key heads.
        grouped: The stacked tensor has each key head behind the query heads that share it, its value head behind that.
        bias, out_bias: Of the products before and behind attention.
        scale: Of the scores; None is one over the root of a head's elements.
        window, cap, slopes: As of `Network.attend`.
    """
    q_rows, kv_rows = heads.q * heads.own, heads.kv * heads.own
    sizes = (q_rows, kv_rows, kv_rows) if len(names) == 3 else (q_rows + 2 * kv_rows,)
    rows = qkv_rows(heads, rotary, grouped)
    qkv = net.linear(x, [at + name for name in names], sizes, bias=bias, rows=rows)
    q, k, v = net.split(qkv, heads.q_width, heads.kv_width, heads.kv_width)
    if norms is not None:
        order = _filled(heads) if rotary is None else rotary.order()
        q, k = (
            net.norm(part, at + name, group=heads.dim, own=heads.own, rows=order)
            for part, name in zip((q, k), norms, strict=True)
        )
    if rotary is not None:
        q, k = net.rotate(q, rotary), net.rotate(k, rotary)
    layer = net.store(k, v, heads.kv)
    scale = heads.own**-0.5 if scale is None else scale
    attended = net.attend(q, layer, scale=scale, window=window, cap=cap, slopes=slopes)
    return net.linear(attended, at + out, net.hidden, bias=out_bias, columns=_out_columns(heads))


@lru_cache(8)
def qkv_rows(heads: Heads, rotary: Rotary | None, grouped: bool) -> tuple[int, ...]:
    """The rows of a stack in which queries, keys and values follow one another, heads as rotation wants them."""
    order = _filled(heads) if rotary is None else rotary.order()
    group = heads.q // heads.kv
    if grouped:
        q = [head // group * (group + 2) + head % group for head in range(heads.q)]
        k = [each * (group + 2) + group for each in range(heads.kv)]
        v = [at + 1 for at in k]
    else:
        q = list(range(heads.q))
        k = list(range(heads.q, heads.q + heads.kv))
        v = list(range(heads.q + heads.kv, heads.q + 2 * heads.kv))
    turned = [-1 if i < 0 else head * heads.own + i for head in (*q, *k) for i in order]
    return (*turned, *(-1 if i < 0 else head * heads.own + i for head in v for i in _filled(heads)))


@lru_cache(8)
def _out_columns(heads: Heads) -> tuple[int, ...]:
    return tuple(blocks(heads.q, heads.own, _filled(heads)))


def _filled(heads: Heads) -> list[int]:
    """The elements of a head as stored, then zeros."""
    return filled(heads.own, HEAD_MULTIPLE)


def gated_mlp(
    net: Network,
    x: Value,
    at: str,
    inner: int,
    *,
    gate_up: Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    function: Literal["silu", "gelu_tanh"] = "silu",
    bias: bool = False,
) -> Value:
    """down(function(gate) * up); with one name in `gate_up` that tensor has both stacked, gate first."""
    sizes = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
    both = net.linear(x, [at + name for name in gate_up], sizes, bias=bias)
    return net.linear(net.activate(both, function), at + down, net.hidden, bias=bias)


def mixture(
    net: Network,
    c: Facts,
    x: Value,
    at: str,
    count: int,
    inner_key: str,
    routing: Routing,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """`count` experts, stored one by one.

    Args:
        net: Gets the operations.
        c: The configuration.
        x: Normed rows.
        at: Prefix of names.
        count: Experts.
        inner_key: Of the fact that says how wide one is.
        routing: How they are chosen.
        parts: Names of gate, up and down.
    """
    inner = c.integer(inner_key)
    if routing.top_k > count // routing.groups * routing.top_groups:
        share = "" if routing.groups == 1 else f" in {routing.top_groups} of {routing.groups} groups"
        raise c.fail("num_experts_per_tok", f"must be at most the number of experts{share}, of {count} in all")
    if net.hidden % PANEL:
        raise c.fail("hidden_size", f"must be a multiple of {PANEL} where there are experts")
    if count * inner > MAX_EXPERT_COLUMNS:
        raise c.fail(inner_key, f"times {count} experts must be at most {MAX_EXPERT_COLUMNS}")
    names = [Expert(*(f"{at}experts.{number}.{part}" for part in parts)) for number in range(count)]
    return net.experts(x, f"{at}gate", routing, names, inner)


def window_of(c: Facts, default: int | None = None) -> int | None:
    """Tokens that a row sees, None for all; `default` where the configuration says nothing."""
    if c.has("sliding_window"):
        return c.integer("sliding_window")
    return default if c.leaves_out("sliding_window") else None
