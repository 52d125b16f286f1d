"""LFM2: most layers are gated short convolutions in place of attention. LFM2-MoE has experts in all but some layers."""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import CONVOLUTION, FULL, Layer, block_decoder, empty_network, gated_mlp
from llm_serving.models.mixtures import BLOCK_SPARSE, mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Value
from llm_serving.network.states import MAX_TAPS, causal_conv


def lfm2(c: ConfigReader) -> Network:
    net, inner = empty_network(c, eps=1e-5, eps_key="norm_eps"), _inner(c)

    def feed_forward(x: Value, _: int, at: str) -> Value:
        return gated_mlp(net, x, at, inner, gate_up=BLOCK_SPARSE[:2], down=BLOCK_SPARSE[2])

    return _lfm2(net, c, feed_forward)


def lfm2_moe(c: ConfigReader) -> Network:
    net, num_dense = empty_network(c, eps=1e-5, eps_key="norm_eps"), c.integer("num_dense_layers", 2, least=0)
    routing = ExpertRouting(
        c.integer("num_experts_per_tok"),
        score="sigmoid",
        normalise=c.boolean("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", 1.0),
        correction="expert_bias" if c.boolean("use_expert_bias", True) else None,
    )

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index < num_dense:
            return gated_mlp(net, x, at, c.integer("intermediate_size"), gate_up=BLOCK_SPARSE[:2], down=BLOCK_SPARSE[2])
        count = c.integer("num_experts")
        return mixture_of_experts(net, c, x, at, count, "moe_intermediate_size", routing, parts=BLOCK_SPARSE)

    return _lfm2(net, c, feed_forward)


def _lfm2(net: Network, c: ConfigReader, feed_forward: Layer) -> Network:
    heads, count = attention_heads(c), c.integer("num_hidden_layers")
    rotary, taps, bias = rotary_embedding(c, heads, theta=1e6), c.integer("conv_L_cache", 3), c.boolean("conv_bias")
    if not 2 <= taps <= MAX_TAPS:
        raise c.fail("conv_L_cache", f"must be from 2 to {MAX_TAPS}")
    attends = c.integers("full_attn_idxs") if c.has("full_attn_idxs") else range(count)
    kinds = c.choices("layer_types", (FULL, CONVOLUTION), count) or [
        FULL if i in attends else CONVOLUTION for i in range(count)
    ]

    def short_convolution(x: Value, at: str) -> Value:
        product = net.linear(x, at + "in_proj", 3 * net.hidden, bias=bias)
        first, second, value = net.split(product, *[net.hidden] * 3)
        mixed = causal_conv(net, net.multiply(value, first), at + "conv", taps, bias=bias)
        return net.linear(net.multiply(mixed, second), at + "out_proj", net.hidden, bias=bias)

    def operator(x: Value, index: int, at: str) -> Value:
        if kinds[index] == CONVOLUTION:
            return short_convolution(x, at + "conv.")
        norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
        return self_attention(net, x, at, heads, rotary, norms=norms, out="self_attn.out_proj")

    return block_decoder(
        net,
        c,
        operator,
        feed_forward,
        before=("operator_norm", "ffn_norm"),
        prefix="feed_forward.",
        norm="model.embedding_norm",
        tied=c.boolean("tie_embedding", True),
    )


def _inner(c: ConfigReader) -> int:
    inner = c.integer("block_ff_dim", c.integer("intermediate_size", 12288))
    if not c.boolean("block_auto_adjust_ff_dim", True):
        return inner
    multiple = c.integer("block_multiple_of", 256)
    inner = int(c.number("block_ffn_dim_multiplier", 1.0) * (2 * inner // 3))
    return -(-inner // multiple) * multiple
