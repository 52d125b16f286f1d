"""GPT-NeoX and Pythia: layer norms, a feed-forward block without a gate, and one tensor with query, key and value of
each head in turn. Attention and the feed-forward block usually read the same residual, each through its own norm.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, plain_mlp
from llm_serving.network.builder import Network

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
    names, out = ("attention.query_key_value",), "attention.dense"
    attention = attend(net, heads, rotary, names=names, out=out, grouped=True, bias=bias, out_bias=bias)
    return block_decoder(
        net,
        c,
        attention,
        lambda x, _, at: plain_mlp(net, x, at, inner, ("dense_h_to_4h", "dense_4h_to_h"), function),
        parallel=c.boolean("use_parallel_residual", True),
        table="gpt_neox.embed_in",
        head="embed_out",
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        normalize=partial(net.layer_norm, bias=True),
    )
