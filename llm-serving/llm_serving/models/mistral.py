"""Mistral and Mixtral, and Ministral 3, which scales queries up with their position."""

from dataclasses import replace

from llm_serving.models.attention import attention_heads, rope_config, rotary_embedding, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.models.mixtures import BLOCK_SPARSE, routed_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting


def mistral(c: ConfigReader) -> Network:
    experts = c.integer("num_local_experts") if c.has("num_local_experts") else 0
    net, heads = empty_network(c, eps=1e-5 if experts else 1e-6), attention_heads(c)
    rotary = rotary_embedding(c, heads, theta=1e6 if experts else 10000.0)
    attention = attend(net, heads, rotary, window=sliding_window(c, None if experts else 4096))
    if not experts:
        return block_decoder(net, c, attention, gated(net, c))
    c.choice("hidden_act", ("silu",), "silu")
    routing = ExpertRouting(c.integer("num_experts_per_tok"))
    feed_forward = routed_experts(net, c, experts, "intermediate_size", routing, parts=BLOCK_SPARSE)
    return block_decoder(net, c, attention, feed_forward, prefix="block_sparse_moe.")


def ministral3(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, reader = rotary_embedding(c, heads, theta=1e6), rope_config(c)
    q_rotary = rotary
    if reader.has("llama_4_scaling_beta"):
        growth, first = reader.number("llama_4_scaling_beta"), reader.integer("original_max_position_embeddings")
        q_rotary = replace(rotary, growth=growth, growth_positions=first)
    attention = attend(net, heads, rotary, q_rotary=q_rotary, window=sliding_window(c))
    return block_decoder(net, c, attention, gated(net, c))
