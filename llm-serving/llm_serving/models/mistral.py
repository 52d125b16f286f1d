"""Mistral and Mixtral, and Ministral 3, which scales queries up with their position."""

from dataclasses import replace

from llm_serving.models.attention import attention_heads, rope_config, rotary_embedding, self_attention, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp, pre_norm
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Value


def mistral(c: ConfigReader) -> Network:
    experts = c.integer("num_local_experts") if c.has("num_local_experts") else 0
    net, heads = empty_network(c, eps=1e-5 if experts else 1e-6), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads, theta=1e6 if experts else 10000.0), c.integer("intermediate_size")
    window = sliding_window(c, None if experts else 4096)
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, window=window))
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        if not experts:
            return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner))
        routing = ExpertRouting(c.integer("num_experts_per_tok"))
        x = mixture_of_experts(
            net, c, x, at + "block_sparse_moe.", experts, "intermediate_size", routing, parts=("w1", "w3", "w2")
        )
        return net.add(hidden, x)

    return decoder(net, c, layer)


def ministral3(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, inner, reader = rotary_embedding(c, heads, theta=1e6), c.integer("intermediate_size"), rope_config(c)
    q_rotary, window = rotary, sliding_window(c)
    if reader.has("llama_4_scaling_beta"):
        growth, first = reader.number("llama_4_scaling_beta"), reader.integer("original_max_position_embeddings")
        q_rotary = replace(rotary, growth=growth, growth_positions=first)
    c.choice("hidden_act", ("silu",), "silu")

    def attention(x: Value, _: int, at: str) -> Value:
        return self_attention(net, x, at, heads, rotary, q_rotary=q_rotary, window=window)

    def feed_forward(x: Value, _: int, at: str) -> Value:
        return gated_mlp(net, x, at, inner)

    return pre_norm(net, c, attention, feed_forward)
