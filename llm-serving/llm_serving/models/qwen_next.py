"""Qwen3-Next and Qwen3.5: three of four layers use the gated delta rule, the others attention with an output gate."""

from functools import lru_cache, partial

from llm_serving.models.attention import (
    HEAD_MULTIPLE,
    HEAD_NORMS,
    MAX_WIDTH,
    QKV,
    Heads,
    attention_heads,
    rotary_embedding,
)
from llm_serving.models.config_reader import TEXT_CONFIG, ConfigReader
from llm_serving.models.gemma import plus_one
from llm_serving.models.layers import FULL, MTP, block_decoder, empty_network
from llm_serving.models.qwen import feed_forward
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertStacks
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary
from llm_serving.network.states import MAX_TAPS, causal_conv, delta_rule
from llm_serving.network.weights import padded_order, parts_order, repeated_order

LINEAR = "linear_attention"
SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def qwen3_next(c: ConfigReader) -> Network:
    separate = c.boolean("separate_projections")  # as in GGUF files
    return _hybrid(c, SEPARATE if separate else ("in_proj_qkvz", "in_proj_ba"), stacked=False)


def qwen3_5(c: ConfigReader) -> Network:
    return _hybrid(c, SEPARATE, stacked=c.has("num_experts"))


def _hybrid(c: ConfigReader, names: tuple[str, ...], *, stacked: bool) -> Network:
    net, heads = empty_network(c, plus_one), attention_heads(c)
    rotary, bias = rotary_embedding(c, heads, fraction=0.25), c.boolean("attention_bias")
    count, every = c.integer("num_hidden_layers"), c.integer("full_attention_interval", 4)
    usual = [LINEAR if (index + 1) % every else FULL for index in range(count)]
    kinds = c.choices("layer_types", (FULL, LINEAR), count) or usual
    experts = c.integer("num_experts", 0, least=0)
    stacks = ExpertStacks(experts, "experts.gate_up_proj", "experts.down_proj") if stacked else None
    c.choice("hidden_act", ("silu",), "silu")

    def mixer(x: Value, index: int, at: str) -> Value:
        if index >= count or kinds[index] == FULL:  # the layer for multi-token prediction has attention
            return _gated_attention(net, x, at, heads, rotary, bias=bias)
        return _delta_net(net, c, x, at + "linear_attn.", names)

    net.allow_unused("mtp.", "model.visual.")  # the MTP network reads the first; images are not supported
    at = "model.language_model" if c.has(TEXT_CONFIG) else "model"
    experts_or_mlp = partial(feed_forward, net, c, experts, stacks=stacks, normalise=True)
    return block_decoder(
        net,
        c,
        mixer,
        experts_or_mlp,
        table=f"{at}.embed_tokens",
        layers=f"{at}.layers",
        norm=f"{at}.norm",
        mtp_names=MTP,
    )


def _gated_attention(net: Network, x: Value, at: str, heads: Heads, rotary: Rotary, *, bias: bool) -> Value:
    """Add attention with head norms and an output gate. The query tensor holds each head's gate after its query."""
    kv_rows = heads.kv * heads.own
    sizes, names = (2 * heads.q * heads.own, kv_rows, kv_rows), [at + name for name in QKV]
    rows = _gated_rows(heads, tuple(rotary.order()))
    widths = heads.q_width, heads.kv_width, heads.kv_width, heads.q_width
    q, k, v, gate = net.split(net.linear(x, names, sizes, bias=bias, rows=rows), *widths)
    q, k = (
        net.rope(net.rms_norm(part, at + name, group=heads.dim, unpadded=heads.own, rows=rotary.order()), rotary)
        for part, name in zip((q, k), HEAD_NORMS, strict=True)
    )
    attended = net.attention(q, net.store_kv(k, v, heads.kv), scale=heads.own**-0.5)
    columns = repeated_order(heads.q, heads.own, padded_order(heads.own, HEAD_MULTIPLE))
    gated = net.multiply(attended, gate, "sigmoid")
    return net.linear(gated, at + "self_attn.o_proj", net.hidden, bias=bias, columns=columns)


@lru_cache(8)
def _gated_rows(heads: Heads, rotated: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row order [queries, keys, values, gates] of the stacked weight. `rotated`: order within a head."""
    own, plain = heads.own, padded_order(heads.own, HEAD_MULTIPLE)
    q, k = [2 * own * head for head in range(heads.q)], [own * (2 * heads.q + head) for head in range(heads.kv)]
    v, gate = [start + own * heads.kv for start in k], [start + own for start in q]
    parts = ((q, rotated), (k, rotated), (v, plain), (gate, plain))
    return tuple(-1 if i < 0 else start + i for starts, order in parts for start in starts for i in order)


def _delta_net(net: Network, c: ConfigReader, x: Value, at: str, names: tuple[str, ...]) -> Value:
    key_heads, heads = c.integer("linear_num_key_heads", 16), c.integer("linear_num_value_heads", 32)
    key_dim, dim = c.integer("linear_key_head_dim", 128), c.integer("linear_value_head_dim", 128)
    taps = c.integer("linear_conv_kernel_dim", 4, least=2)
    if heads % key_heads:
        raise c.fail("linear_num_value_heads", f"must be a multiple of `linear_num_key_heads` {key_heads}")
    keys, values = key_heads * key_dim, heads * dim
    if max(keys, values) > MAX_WIDTH:
        raise c.fail("linear_num_value_heads", f"must give at most {MAX_WIDTH} elements per token to keys or values")
    if taps > MAX_TAPS:
        raise c.fail("linear_conv_kernel_dim", f"must be at most {MAX_TAPS}")
    widths = 2 * keys + values, values, heads, heads
    sizes = widths if len(names) == 4 else (sum(widths[:2]), 2 * heads)
    rows = None if len(names) == 4 else _grouped_rows(key_heads, key_dim, heads // key_heads, dim)
    mixed, z, b, a = net.split(net.linear(x, [at + name for name in names], sizes, rows=rows), *widths)
    mixed = causal_conv(net, mixed, at + "conv1d", taps, function="silu")
    q, k, v = net.split(mixed, keys, keys, values)
    scale, rates, bias = key_dim**-0.5, at + "A_log", at + "dt_bias"
    y = delta_rule(net, q, k, v, a, b, key_heads=key_heads, scale=scale, rates=rates, bias=bias)
    y = net.rms_norm(y, at + "norm", group=dim, as_stored=True)
    return net.linear(net.multiply(y, z, "silu"), at + "out_proj", net.hidden)


@lru_cache(8)
def _grouped_rows(key_heads: int, key_dim: int, ratio: int, dim: int) -> tuple[int, ...]:
    """Return the row order of a projection that is stored for each key head in turn. The result has the rows of q of
    all heads, then k, v, the output gate z, and the inputs b and a of the delta rule's gates.
    """
    first = (key_dim, key_dim, ratio * dim, ratio * dim)
    return (*parts_order(0, key_heads, first), *parts_order(key_heads * sum(first), key_heads, (ratio, ratio)))
