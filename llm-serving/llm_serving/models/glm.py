"""GLM-4: half of each head rotates, in interleaved pairs. Models of 2025 add norms after both sublayers. GLM-4.5 to 4.7
have experts, and rotate without interleaving.
"""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import NEXTN, attend, block_decoder, empty_network, gated, gated_mlp
from llm_serving.models.mixtures import mixture_of_experts, shared_experts_size, sigmoid_routing
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def glm(c: ConfigReader) -> Network:
    return _glm(c, ("", ""))


def glm4(c: ConfigReader) -> Network:
    return _glm(c, ("post_self_attn_layernorm", "post_mlp_layernorm"))


def _glm(c: ConfigReader, after: tuple[str, str]) -> Network:
    net, heads = empty_network(c, eps=1.5625e-07), attention_heads(c)
    rotary = rotary_embedding(c, heads, interleaved=True, fraction=0.5)
    attention = attend(net, heads, rotary, bias=c.boolean("attention_bias"))
    return block_decoder(net, c, attention, gated(net, c, gate_up=("gate_up_proj",)), after=after)


def glm4_moe(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, norms = rotary_embedding(c, heads, fraction=0.5), HEAD_NORMS if c.boolean("use_qk_norm") else None
    count, first = c.integer("n_routed_experts"), c.integer("first_k_dense_replace", 1, least=0)
    shared, routing = shared_experts_size(c, "n_shared_experts", 1), sigmoid_routing(c, (1, 1), 1.0)
    c.choice("hidden_act", ("silu",), "silu")

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index < first:
            return gated_mlp(net, x, at, c.integer("intermediate_size"))
        routed = mixture_of_experts(net, c, x, at, count, "moe_intermediate_size", routing)
        return net.add(routed, gated_mlp(net, x, at + "shared_experts.", shared))

    attention = attend(net, heads, rotary, norms=norms, bias=c.boolean("attention_bias"))
    return block_decoder(net, c, attention, feed_forward, mtp_names=NEXTN)
