"""SmolLM3: Llama without rotary embeddings in some layers."""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def smollm3(c: ConfigReader) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads, theta=2e6), c.integer("intermediate_size")
    num_layers = c.integer("num_hidden_layers")
    every = c.integer("no_rope_layer_interval", 4)
    uses_rope = c.flags("no_rope_layers", num_layers) or [bool((index + 1) % every) for index in range(num_layers)]
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    if c.boolean("use_sliding_window"):
        raise c.fail("use_sliding_window", "must be false")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary if uses_rope[index] else None, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x)
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, bias=mlp_bias))

    return decoder(net, c, layer, tied=True)
