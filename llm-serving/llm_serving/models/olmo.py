"""OLMo 2 and 3: norms follow the sublayers, and the norms of query and key extend over all heads. OLMo 3 has sliding
windows in most layers. Only its other layers scale the rotary embedding.
"""

from dataclasses import replace

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import FULL, SLIDING, decoder, empty_network, gated_mlp, layer_kinds
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary


def olmo2(c: ConfigReader) -> Network:
    return _olmo(c, [FULL] * c.integer("num_hidden_layers"), {FULL: rotary_embedding(c, attention_heads(c))})


def olmo3(c: ConfigReader) -> Network:
    heads = attention_heads(c)
    full, sliding = (rotary_embedding(c, heads, kind=kind, theta=500000.0) for kind in (FULL, SLIDING))
    if not c.has("rope_parameters"):
        sliding = replace(sliding, scaling=None)
    return _olmo(c, layer_kinds(c, 4), {FULL: full, SLIDING: sliding})


def _olmo(c: ConfigReader, kinds: list[str], rotaries: dict[str, Rotary]) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, index: int, at: str) -> Value:
        window = c.integer("sliding_window", 4096) if kinds[index] == SLIDING else None
        rotary = rotaries[kinds[index]]
        x = self_attention(
            net, hidden, at, heads, rotary, norms=HEAD_NORMS, whole_norms=True, bias=bias, out_bias=bias, window=window
        )
        hidden = net.add(hidden, net.rms_norm(x, at + "post_attention_layernorm"))
        x = gated_mlp(net, hidden, at + "mlp.", inner)
        return net.add(hidden, net.rms_norm(x, at + "post_feedforward_layernorm"))

    return decoder(net, c, layer)
