"""GLM-4: half of each head rotates, in interleaved pairs. Models of 2025 add norms after both sublayers. GLM-4.5 to 4.7
have experts, and rotate without interleaving.
"""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import NEXTN, decoder, empty_network, gated_mlp, pre_norm
from llm_serving.models.mixtures import mixture_of_experts, shared_experts_size, sigmoid_routing
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def glm(c: ConfigReader) -> Network:
    return _glm(c, "", "")


def glm4(c: ConfigReader) -> Network:
    return _glm(c, "post_self_attn_layernorm", "post_mlp_layernorm")


def _glm(c: ConfigReader, attention_norm: str, mlp_norm: str) -> Network:
    net, heads = empty_network(c, eps=1.5625e-07), attention_heads(c)
    rotary = rotary_embedding(c, heads, interleaved=True, fraction=0.5)
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def behind(x: Value, name: str, at: str) -> Value:
        return net.rms_norm(x, at + name) if name else x

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, bias=bias)
        hidden = net.add(hidden, behind(x, attention_norm, at))
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        x = gated_mlp(net, x, at + "mlp.", inner, gate_up=("gate_up_proj",))
        return net.add(hidden, behind(x, mlp_norm, at))

    return decoder(net, c, layer)


def glm4_moe(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, bias = rotary_embedding(c, heads, fraction=0.5), c.boolean("attention_bias")
    norms = HEAD_NORMS if c.boolean("use_qk_norm") else None
    count, first = c.integer("n_routed_experts"), c.integer("first_k_dense_replace", 1, least=0)
    shared, routing = shared_experts_size(c, "n_shared_experts", 1), sigmoid_routing(c, (1, 1), 1.0)
    c.choice("hidden_act", ("silu",), "silu")

    def attention(x: Value, _: int, at: str) -> Value:
        return self_attention(net, x, at, heads, rotary, norms=norms, bias=bias)

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index < first:
            return gated_mlp(net, x, at, c.integer("intermediate_size"))
        routed = mixture_of_experts(net, c, x, at, count, "moe_intermediate_size", routing)
        return net.add(routed, gated_mlp(net, x, at + "shared_experts.", shared))

    return pre_norm(net, c, attention, feed_forward, mtp_names=NEXTN)
