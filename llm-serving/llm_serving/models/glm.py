"""GLM-4: half of each head turns, in neighbouring pairs. The models of 2025 have norms behind both halves as well."""

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def glm(c: Facts) -> Network:
    return _glm(c, "", "")


def glm4(c: Facts) -> Network:
    return _glm(c, "post_self_attn_layernorm", "post_mlp_layernorm")


def _glm(c: Facts, attention_norm: str, mlp_norm: str) -> Network:
    net, heads = network_of(c, eps=1.5625e-07), heads_of(c)
    rotary = rotary_of(c, heads, interleaved=True, share=0.5)
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def behind(x: Value, name: str, at: str) -> Value:
        return net.norm(x, at + name) if name else x

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, bias=bias)
        hidden = net.add(hidden, behind(x, attention_norm, at))
        x = net.norm(hidden, at + "post_attention_layernorm")
        x = gated_mlp(net, x, at + "mlp.", inner, gate_up=("gate_up_proj",))
        return net.add(hidden, behind(x, mlp_norm, at))

    return decoder(net, c, layer)
