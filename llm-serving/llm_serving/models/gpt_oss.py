"""gpt-oss: attention with sinks and, in every second layer, a window. Every layer has experts with biases and a special
gate function. One tensor holds all experts of a layer; its rows of gate and up alternate.
"""

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, layer_kinds, layer_windows
from llm_serving.models.mixtures import routed_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting, ExpertStacks

_FIXED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def gpt_oss(c: ConfigReader) -> Network:
    net, heads, kinds = empty_network(c, eps=1e-5), attention_heads(c), layer_kinds(c, 2)
    rotary, count = rotary_embedding(c, heads, theta=150000.0), c.integer("num_local_experts", 128)
    bias, window = c.boolean("attention_bias", True), layer_windows(c, kinds, 128)
    top_k = c.integer("num_experts_per_tok", 4)
    routing = ExpertRouting(top_k, bias=True, function="clamped")
    biases = ("experts.gate_up_proj_bias", "experts.down_proj_bias")
    stacks = ExpertStacks(count, "experts.gate_up_proj", "experts.down_proj", biases, interleaved=True, transposed=True)
    for key, value in _FIXED.items():
        if c.number(key, value) != value:
            raise c.fail(key, f"must be {value}")
    feed_forward = routed_experts(net, c, count, "intermediate_size", routing, router="router", stacks=stacks)
    attention = attend(net, heads, rotary, bias=bias, out_bias=bias, window=window, sinks=True)
    return block_decoder(net, c, attention, feed_forward)
