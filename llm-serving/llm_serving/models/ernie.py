"""ERNIE 4.5: rotary embeddings of adjacent pairs. Larger models have experts, chosen by softmax plus a correction."""

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated, gated_mlp
from llm_serving.models.mixtures import mixture_of_experts, shared_experts_size
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Value


def ernie4_5(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, bias = rotary_embedding(c, heads, interleaved=True, theta=500000.0), c.boolean("use_bias")
    dense = gated(net, c, bias=bias)
    experts = c.integer("moe_num_experts") if c.has("moe_num_experts") else 0

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not experts or not _has_experts(c, index):
            return dense(x, index, at)
        correction = "moe_statics.e_score_correction_bias"
        routing = ExpertRouting(c.integer("moe_k", 6), correction=correction, correction_rows=1)
        routed = mixture_of_experts(net, c, x, at, experts, "moe_intermediate_size", routing, top_k_key="moe_k")
        shared = shared_experts_size(c, "moe_num_shared_experts", 2, least=0)
        return net.add(routed, gated_mlp(net, x, at + "shared_experts.", shared, bias=bias)) if shared else routed

    net.allow_unused(*(f"model.mtp_{part}." for part in ("block", "emb_norm", "hidden_norm", "linear_proj")))
    attention = attend(net, heads, rotary, bias=bias, out_bias=bias)
    return block_decoder(net, c, attention, feed_forward, tied=True)


def _has_experts(c: ConfigReader, index: int) -> bool:
    last = c.integer("moe_layer_end_index", -1, least=-1)
    last = c.integer("num_hidden_layers") - 1 if last == -1 else last
    first, every = c.integer("moe_layer_start_index", 1, least=0), c.integer("moe_layer_interval", 1)
    return first <= index <= last and (index + 1) % every == 0
