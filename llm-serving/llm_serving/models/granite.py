"""Granite: Llama with multipliers for embeddings, attention scores, residuals and logits. Granite 3 MoE has experts."""

from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import (
    attention_heads,
    decoder,
    empty_network,
    gated_mlp,
    mixture_of_experts,
    rotary_embedding,
    self_attention,
)
from llm_serving.network.builder import ExpertRouting, ExpertStacks, Network
from llm_serving.network.operations import Value


def granite(c: ConfigReader) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads), c.integer("intermediate_size")
    scale, factor = c.number("attention_multiplier", 1.0), c.number("residual_multiplier", 1.0)
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    experts = c.integer("num_local_experts") if c.has("num_local_experts") else 0
    c.choice("hidden_act", ("silu",), "silu")

    def feed_forward(x: Value, at: str) -> Value:
        if not experts:
            return gated_mlp(net, x, at + "mlp.", inner, bias=mlp_bias)
        routing = ExpertRouting(c.integer("num_experts_per_tok", 2))
        stacks = ExpertStacks(experts, "input_linear.weight", "output_linear.weight")
        apart = c.boolean("separate_experts")  # as in GGUF files
        at = at + "block_sparse_moe."
        return mixture_of_experts(
            net,
            c,
            x,
            at,
            experts,
            "intermediate_size",
            routing,
            router="router.layer",
            stacks=None if apart else stacks,
        )

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, scale=scale, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x, factor)
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, feed_forward(x, at), factor)

    table_scale, logits_scale = c.number("embedding_multiplier", 1.0), 1 / c.number("logits_scaling", 1.0)
    return decoder(net, c, layer, table_scale=table_scale, scale=logits_scale)
