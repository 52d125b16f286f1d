"""GLM-4: half of each head rotates, in interleaved pairs. Models of 2025 add norms after both sublayers. GLM-4.5 to 4.7
have experts, and rotate without interleaving.
"""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import NEXTN, attend, block_decoder, empty_network, gated
from llm_serving.models.mixtures import routed_and_shared_experts, shared_experts_size, sigmoid_routing
from llm_serving.network.builder import Network


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
    first, shared = c.integer("first_k_dense_replace", 1, least=0), shared_experts_size(c, "n_shared_experts", 1)
    feed_forward = routed_and_shared_experts(net, c, sigmoid_routing(c, (1, 1), 1.0), first, shared)
    attention = attend(net, heads, rotary, norms=norms, bias=c.boolean("attention_bias"))
    return block_decoder(net, c, attention, feed_forward, mtp_names=NEXTN)
