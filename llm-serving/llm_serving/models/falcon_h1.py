"""Falcon-H1: Mamba-2 and attention in parallel in each layer, and constant multipliers.

The multipliers need no operations of their own. A multiplier before an activation function is multiplied into the
weight before that function. Any other one is a factor of another operation, such as the addition to the residual.
"""

from typing import Literal

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network
from llm_serving.models.mamba import mamba_mixer, mamba_sizes
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.weights import RowFactors

PARTS = ("gate", "up", "down")
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def falcon_h1(c: ConfigReader) -> Network:
    net, heads, sizes = empty_network(c, eps=1e-5), attention_heads(c), mamba_sizes(c)
    rotary, inner = rotary_embedding(c, heads), c.integer("intermediate_size")
    for key in BIASES:
        if c.boolean(key):
            raise c.fail(key, "must be false: biases are not supported")
    c.choice("hidden_act", ("silu",), "silu")
    width, shared = sizes.heads * sizes.head_dim, sizes.groups * sizes.state_size
    of_parts = c.numbers("ssm_multipliers", 5) if c.has("ssm_multipliers") else (1.0,) * 5
    ssm_in = c.number("ssm_in_multiplier", 1.0)
    rows = zip((width, width, shared, shared, sizes.heads), of_parts, strict=True)
    projection = RowFactors(tuple((count, factor * ssm_in) for count, factor in rows))
    gate, down = c.numbers("mlp_multipliers", 2) if c.has("mlp_multipliers") else (1.0, 1.0)
    attention_in, ssm_out = c.number("attention_in_multiplier", 1.0), c.number("ssm_out_multiplier", 1.0)
    attention_out = attention_in * c.number("attention_out_multiplier", 1.0)
    scale = heads.own**-0.5 * attention_in**2 * c.number("key_multiplier", 1.0)
    norm: Literal["", "before", "after"] = "before" if c.boolean("mamba_norm_before_gate", True) else "after"
    norm = norm if c.boolean("mamba_rms_norm") else ""

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        mixed = mamba_mixer(net, x, at + "mamba.", sizes, norm=norm, transform=projection)
        attended = self_attention(net, x, at, heads, rotary, scale=scale)
        hidden = net.add(net.add(hidden, mixed, ssm_out), attended, attention_out)
        x, names = net.rms_norm(hidden, at + "pre_ff_layernorm"), [f"{at}feed_forward.{part}_proj" for part in PARTS]
        both = net.linear(x, names[:2], (inner, inner), transform=RowFactors(((inner, gate), (inner, 1.0))))
        return net.add(hidden, net.linear(net.gated_activation(both, "silu"), names[2], net.hidden), down)

    factors = c.number("embedding_multiplier", 1.0), c.number("lm_head_multiplier", 1.0)
    return decoder(net, c, layer, norm="model.final_layernorm", table_scale=factors[0], scale=factors[1])
