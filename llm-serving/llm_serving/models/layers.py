"""Building blocks of networks for all model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal

from llm_serving.models.config_reader import ConfigReader
from llm_serving.network.builder import (
    PANEL_ROWS,
    Expert,
    ExpertRouting,
    ExpertStacks,
    Network,
    padded_order,
    repeated_order,
    shared_order,
)
from llm_serving.network.operations import Float32Array, Transform, Value, Weight
from llm_serving.network.rope import ROPE_SCALINGS, Rotary, Scaling

HEAD_MULTIPLE: Final = 16
"""Heads in a KV cache are padded to a multiple of this number of elements."""

MAX_WIDTH: Final = 2**20
"""Maximum elements of all heads in a row, and maximum columns of shared experts."""
MAX_EXPERT_COLUMNS: Final = 2**21
"""Maximum intermediate columns of all experts in a layer."""

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
SCORE_TOKENS: Final = "score_token_ids"
"""Configuration key: the token whose logit is the score of a reranker, and the token whose logit is subtracted."""
HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")
"""Usual names of the norms of queries and keys."""
QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

Norm = Callable[[Value, str], Value]
"""(hidden, tensor name prefix) -> normalised hidden."""

HeadNorm = Callable[[Value, str, list[int]], Value]
"""(queries or keys, tensor name prefix, order of the columns in the checkpoint) -> normalised heads."""

Layer = Callable[[Value, int, str], Value]
"""(hidden, layer index, tensor name prefix) -> hidden."""


@dataclass(frozen=True)
class Heads:
    """Numbers of query and KV heads, and elements of a head in the checkpoint (`own`) and padded (`dim`)."""

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
    """Read the rotary embedding from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`, which may
    differ for each `kind` of layer. `theta` and `fraction` are the defaults of the base and of the fraction of a head
    that rotates. `fraction_key` names the fraction in errors.
    """
    reader = rope_config(c)
    if kind and reader.has(kind):
        reader = reader.inner(kind)
    theta = reader.number("rope_theta", c.number("rope_theta", theta))
    fraction = reader.number("partial_rotary_factor", c.number("partial_rotary_factor", fraction))
    if fraction > 1 or (rotary_dim := int(heads.own * fraction)) < 2 or rotary_dim % 2:
        raise c.fail(fraction_key, f"must select an even number of the {heads.own} elements of a head for rotation")
    return Rotary(heads.dim, rotary_dim, theta, interleaved, rope_scaling(c, reader, rotary_dim), heads.own)


def rope_config(c: ConfigReader) -> ConfigReader:
    """Return `rope_parameters` or `rope_scaling`; empty if the configuration has neither."""
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
        raise reader.fail(key, f"must not be dynamic if only {rotary_dim} elements of a head rotate")
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
        return Scaling(
            kind=name, factor=factor, original=original, short=short, long=long, attention_factor=attention_factor
        )
    if not reader.has("factor"):
        raise reader.fail("factor", f"must be given for {name}")
    factor = reader.number("factor")
    if name == "llama3":
        low, high = reader.number("low_freq_factor", 1.0), reader.number("high_freq_factor", 4.0)
        if low >= high:
            raise reader.fail("low_freq_factor", f"must be less than `high_freq_factor` {high}")
        return Scaling(kind=name, factor=factor, original=original, low=low, high=high)
    if name == "yarn":
        return Scaling(
            kind=name,
            factor=factor,
            original=original,
            low=reader.number("beta_slow", 1.0),
            high=reader.number("beta_fast", 32.0),
            attention_factor=attention_factor,
            mscale=reader.number("mscale") if reader.has("mscale") else None,
            mscale_all_dim=reader.number("mscale_all_dim") if reader.has("mscale_all_dim") else None,
            truncate=reader.boolean("truncate", True),
        )
    return Scaling(kind=name, factor=factor, original=longest if name == "dynamic" else original)


def layer_kinds(c: ConfigReader, every: int) -> list[str]:
    """Return the kind of each layer: `layer_types`, else FULL for each `every`-th layer and SLIDING for the others."""
    count = c.integer("num_hidden_layers")
    usual = [SLIDING if (index + 1) % every else FULL for index in range(count)]
    return c.choices("layer_types", (FULL, SLIDING), count) or usual


def empty_network(
    c: ConfigReader,
    gamma_transform: Transform | None = None,
    *,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    causal: bool = True,
) -> Network:
    """Return an empty network with the sizes of a configuration. `eps`: default of `eps_key`."""
    sizes = c.integer("hidden_size"), c.integer("vocab_size")
    return Network(*sizes, c.number(eps_key, eps), gamma_transform, causal=causal)


def classifier_labels(c: ConfigReader) -> int:
    """Return the number of labels of a classifier, which must be 1: the score of a reranker."""
    labels = c.config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else c.integer("num_labels", 2)
    if count != 1:
        raise c.fail("id2label", f"must have one label, which is the score of a reranker; it has {count}")
    return count


def decoder(
    net: Network,
    c: ConfigReader,
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
    lm_head_transform: Transform | None = None,
    normalize: Norm | None = None,
) -> Network:
    """Add the token embedding, the layers, the final norm and the LM head to `net`, and return it.

    Args:
        table, head, layers, norm: Tensor name prefixes.
        tied: Default of `tie_word_embeddings`.
        table_scale, rounded_scale: As `scale` and `rounded_scale` of `Network.embedding`.
        scale, cap, lm_head_transform: As `scale`, `cap` and `transform` of `Network.lm_head`.
        normalize: The final norm; None: `Network.rms_norm`.
    """
    hidden = net.embedding(table, scale=table_scale, rounded_scale=rounded_scale)
    for index in range(c.integer("num_hidden_layers")):
        hidden = layer(hidden, index, f"{layers}.{index}.")
    if c.boolean("tie_word_embeddings", tied):
        net.allow_unused(f"{head}.weight")  # some exporters write a tied embedding twice
        head = table
    for further in range(c.integer("num_nextn_predict_layers", 0, least=0)):
        net.allow_unused(f"{layers}.{index + 1 + further}.")  # multi-token prediction, which is not used
    hidden = (normalize or net.rms_norm)(hidden, norm)
    if SCORE_TOKENS in c.config:
        return _token_scores(net, c, hidden, head)
    if any(name.endswith("ForSequenceClassification") for name in c.config.get("architectures") or ()):
        net.allow_unused("lm_head.")
        net.begin_head()
        count = classifier_labels(c)
        net.scores(net.linear(hidden, "score", count), count)
        return net
    net.lm_head(hidden, head, scale=scale, cap=cap, transform=lm_head_transform)
    return net


def _token_scores(net: Network, c: ConfigReader, hidden: Value, head: str) -> Network:
    """End a network with the logit of one token, less that of another if two are given."""
    ids = c.token_ids(SCORE_TOKENS)
    if not 1 <= len(ids) <= 2 or max(ids) >= net.vocab:
        raise c.fail(SCORE_TOKENS, f"must hold one or two tokens below `vocab_size` {net.vocab}")
    net.begin_head()
    difference = _difference if len(ids) == 2 else None
    net.scores(net.linear(hidden, head, net.vocab, rows=ids, transform=difference, width=1), 1)
    return net


def _difference(rows: Float32Array) -> Float32Array:
    return rows[:1] - rows[1:]


def pre_norm(
    net: Network,
    c: ConfigReader,
    attention: Layer,
    feed_forward: Layer,
    *,
    tied: bool = False,
    normalize: Norm | None = None,
) -> Network:
    """As `decoder`, with layers that normalise the input of attention and that of the feed-forward block. `attention`
    gets the tensor name prefix of its layer, `feed_forward` that prefix and `mlp.`.
    """
    norm = normalize or net.rms_norm

    def layer(hidden: Value, index: int, at: str) -> Value:
        hidden = net.add(hidden, attention(norm(hidden, at + "input_layernorm"), index, at))
        x = norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, feed_forward(x, index, at + "mlp."))

    return decoder(net, c, layer, tied=tied, normalize=norm)


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
    head_norm: HeadNorm | None = None,
    q_rotary: Rotary | None = None,
    grouped: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    slopes: Weight | None = None,
    sinks: bool = False,
) -> Value:
    """Add the QKV projection, norms of heads, rotary embedding, attention and the output projection.

    Args:
        x: Normalised rows.
        at: Tensor name prefix.
        rotary: None: attention without rotary embedding.
        names: Tensors of query, key and value, or the one tensor that stacks them.
        out: Tensor of the output projection.
        norms: Tensors of the query and key norms.
        whole_norms: Whether the norms extend over all heads of a row together; otherwise over each head.
        norms_after_rope: Whether the norms follow the rotary embedding.
        head_norm: Norm in place of `Network.rms_norm`.
        q_rotary: Rotary embedding of the queries, where it differs from that of the keys.
        grouped: Whether the stacked tensor has, group after group, query heads, key head and value head.
        scale: Factor of the scores; None: head_dim^-0.5.
        window, cap, slopes: As for `Network.attention`.
        sinks: Whether the heads have sinks (`Network.attention`).
    """
    q_rows, kv_rows = heads.q * heads.own, heads.kv * heads.own
    sizes = (q_rows, kv_rows, kv_rows) if len(names) == 3 else (q_rows + 2 * kv_rows,)
    rows = qkv_rows(heads, rotary, grouped)
    qkv = net.linear(x, [at + name for name in names], sizes, bias=bias, rows=rows)
    q, k, v = net.split(qkv, heads.q_width, heads.kv_width, heads.kv_width)

    def normalized(parts: Sequence[Value]) -> list[Value]:
        order = _padded(heads) if rotary is None else rotary.order()
        if head_norm is not None:
            named = zip(parts, norms or (), (heads.q, heads.kv), strict=True)
            return [head_norm(part, at + name, repeated_order(n, heads.own, order)) for part, name, n in named]
        if not whole_norms:
            shape: dict[str, Any] = {"group": heads.dim, "unpadded": heads.own, "rows": order}
            return [net.rms_norm(part, at + name, **shape) for part, name in zip(parts, norms or (), strict=True)]
        counts = zip(parts, norms or (), (heads.q, heads.kv), strict=True)
        return [
            net.rms_norm(part, at + name, unpadded=n * heads.own, rows=repeated_order(n, heads.own, order))
            for part, name, n in counts
        ]

    if norms is not None and not norms_after_rope:
        q, k = normalized((q, k))
    if rotary is not None:
        q, k = net.rope(q, q_rotary or rotary), net.rope(k, rotary)
    if norms is not None and norms_after_rope:
        q, k = normalized((q, k))
    # An offset of the keys moves all scores but that of a sink.
    may_move = norms is None and cap is None and not sinks and net.causal
    offset = _key_offset(net, qkv, heads, rotary) if bias and may_move else None
    of_heads = Weight((f"{at}self_attn.sinks",), (heads.q,), ((heads.q,),), dtype="float32") if sinks else None
    layer = net.store_kv(k, v, heads.kv, offset)
    scale = heads.own**-0.5 if scale is None else scale
    attended = net.attention(q, layer, scale=scale, window=window, cap=cap, slopes=slopes, sinks=of_heads)
    return net.linear(attended, at + out, net.hidden, bias=out_bias, columns=_out_columns(heads))


def _key_offset(net: Network, qkv: Value, heads: Heads, rotary: Rotary | None) -> Weight:
    """Return the mean of the keys' bias over many positions: the offset that an int8 cache subtracts from keys. Biases
    are often far larger than what varies between tokens, in pairs of elements that hardly rotate.
    """
    (product,) = (each for each in net.operations if qkv in each.outputs.values())
    bias = product.weights["bias"]
    rows = tuple(range(bias.shape[0])) if bias.rows is None else bias.rows
    of_keys = shared_order(rows[heads.q_width : heads.q_width + heads.kv_width])
    mean = None if rotary is None else rotary.mean_rotated
    return replace(bias, shape=(heads.kv_width,), rows=of_keys, transform=mean, dtype="float32")


@lru_cache(8)
def qkv_rows(heads: Heads, rotary: Rotary | None, grouped: bool) -> tuple[int, ...]:
    """Return the row order that puts queries, keys and values one after another, in the order of `Rotary`."""
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


@lru_cache(8)
def _out_columns(heads: Heads) -> tuple[int, ...]:
    return tuple(repeated_order(heads.q, heads.own, _padded(heads)))


def _padded(heads: Heads) -> list[int]:
    return padded_order(heads.own, HEAD_MULTIPLE)


def gated_mlp(
    net: Network,
    x: Value,
    at: str,
    inner: int,
    *,
    gate_up: Sequence[str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
    function: Literal["silu", "gelu_tanh", "gelu"] = "silu",
    bias: bool = False,
) -> Value:
    """Add down(function(gate) * up). A single name in `gate_up` is a tensor that stacks both, gate first."""
    sizes = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
    both = net.linear(x, [at + name for name in gate_up], sizes, bias=bias)
    return net.linear(net.gated_activation(both, function), at + down, net.hidden, bias=bias)


def plain_mlp(
    net: Network,
    x: Value,
    at: str,
    inner: int,
    names: tuple[str, str],
    function: Literal["silu", "gelu_tanh", "gelu"],
    *,
    bias: bool = True,
) -> Value:
    """Add second(function(first)), where `names` are first and second."""
    first, second = (at + name for name in names)
    inside = net.activation(net.linear(x, first, inner, bias=bias), function)
    return net.linear(inside, second, net.hidden, bias=bias)


def mixture_of_experts(
    net: Network,
    c: ConfigReader,
    x: Value,
    at: str,
    count: int,
    inner_key: str,
    routing: ExpertRouting,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    stacks: ExpertStacks | None = None,
    top_k_key: str = "num_experts_per_tok",
) -> Value:
    """Add a router and `count` experts, whose intermediate size is the configuration's value of `inner_key`.
    The names of `routing`, `parts`, `router` and `stacks` follow the prefix `at`. Without `stacks`, tensors that stack
    all experts, `parts` are the tensors of one expert, behind its number. Errors call `routing.top_k` `top_k_key`.
    """
    inner = c.integer(inner_key)
    if count % routing.groups:
        raise c.fail("n_routed_experts", f"must be a multiple of `n_group` {routing.groups}")
    if routing.top_groups > routing.groups:
        raise c.fail("topk_group", f"must be at most `n_group` {routing.groups}")
    if routing.top_k > count // routing.groups * routing.top_groups:
        share = "" if routing.groups == 1 else f" in {routing.top_groups} of {routing.groups} groups"
        raise c.fail(top_k_key, f"must be at most the number of experts{share}, of {count} in all")
    if net.hidden % PANEL_ROWS:
        raise c.fail("hidden_size", f"must be a multiple of {PANEL_ROWS} where there are experts")
    if count * inner > MAX_EXPERT_COLUMNS:
        raise c.fail(inner_key, f"must be at most {MAX_EXPERT_COLUMNS // count} for {count} experts")
    names: Sequence[Expert] | ExpertStacks
    if stacks is None:
        names = [Expert(*(f"{at}experts.{number}.{part}" for part in parts)) for number in range(count)]
    else:
        biases = tuple(at + name for name in stacks.biases)
        names = replace(stacks, gate_up=at + stacks.gate_up, down=at + stacks.down, biases=biases)
    if routing.correction is not None:
        routing = replace(routing, correction=at + routing.correction)
    return net.experts(x, at + router, routing, names, inner)


def shared_experts_size(c: ConfigReader, count_key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return the columns of all shared experts of a layer, which are one feed-forward block."""
    count, inner = c.integer(count_key, default, least=least), c.integer("moe_intermediate_size")
    if count * inner > MAX_WIDTH:
        raise c.fail(count_key, f"times `moe_intermediate_size` {inner} must be at most {MAX_WIDTH}")
    return count * inner


def sigmoid_routing(c: ConfigReader, groups: tuple[int, int], scale: float) -> ExpertRouting:
    """Return the routing of DeepSeek-V3 without auxiliary loss (section 2.1.2), whose correction is stored beside the
    router. `groups` and `scale` are the defaults of `n_group` and `topk_group`, and of `routed_scaling_factor`.
    """
    return ExpertRouting(
        c.integer("num_experts_per_tok"),
        score="sigmoid",
        normalise=c.boolean("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", scale),
        groups=c.integer("n_group", groups[0]),
        top_groups=c.integer("topk_group", groups[1]),
        correction="gate.e_score_correction_bias",
    )


def sliding_window(c: ConfigReader, default: int | None = None) -> int | None:
    """Return the tokens that a row attends to; None: all. `default` applies if the key is absent."""
    if c.has("sliding_window"):
        return c.integer("sliding_window")
    return default if c.is_absent("sliding_window") else None
