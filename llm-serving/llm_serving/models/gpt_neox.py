"""GPT-NeoX and Pythia: layer norms, a feed-forward block without a gate, and one tensor with query, key and value of
each head in turn. Attention and the feed-forward block usually read the same residual, each through its own norm.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, plain_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

_FUNCTIONS: Final[Mapping[str, Literal["gelu", "gelu_tanh"]]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def gpt_neox(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5, eps_key="layer_norm_eps"), attention_heads(c)
    theta, fraction = c.number("rotary_emb_base", 10000.0), c.number("rotary_pct", 0.25)
    rotary = rotary_embedding(c, heads, theta=theta, fraction=fraction, fraction_key="rotary_pct")
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias", True)
    function = _FUNCTIONS[c.choice("hidden_act", tuple(_FUNCTIONS), "gelu")]
    parallel, normalize = c.boolean("use_parallel_residual", True), partial(net.layer_norm, bias=True)

    def layer(hidden: Value, _: int, at: str) -> Value:
        names, out = ("attention.query_key_value",), "attention.dense"
        x = normalize(hidden, at + "input_layernorm")
        attended = self_attention(
            net, x, at, heads, rotary, names=names, out=out, grouped=True, bias=bias, out_bias=bias
        )
        before = hidden
        hidden = net.add(hidden, attended)
        x = normalize(before if parallel else hidden, at + "post_attention_layernorm")
        return net.add(hidden, plain_mlp(net, x, at + "mlp.", inner, ("dense_h_to_4h", "dense_4h_to_h"), function))

    return decoder(
        net,
        c,
        layer,
        table="gpt_neox.embed_in",
        head="embed_out",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        normalize=normalize,
    )
