"""OLMo 2 and 3: norms follow the sublayers, and the norms of query and key extend over all heads. OLMo 3 has sliding
windows in most layers. Only its other layers scale the rotary embedding.
"""

from dataclasses import replace

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import (
    FULL,
    SLIDING,
    SUBLAYER_NORMS,
    attend,
    block_decoder,
    empty_network,
    gated,
    layer_kinds,
    layer_windows,
)
from llm_serving.network.builder import Network
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
    rotary, window = [rotaries[kind] for kind in kinds], layer_windows(c, kinds, 4096)
    bias = c.boolean("attention_bias")
    attention = attend(net, heads, rotary, norms=HEAD_NORMS, whole_norms=True, bias=bias, out_bias=bias, window=window)
    return block_decoder(net, c, attention, gated(net, c), before=("", ""), after=SUBLAYER_NORMS)
