"""EXAONE 4: norms follow the sublayers. Models with sliding windows have rotary embeddings only in those layers."""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import SLIDING, SUBLAYER_NORMS, attend, block_decoder, empty_network, gated, layer_kinds
from llm_serving.network.builder import Network


def exaone4(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, window = rotary_embedding(c, heads), sliding_window(c, 4096)
    # Beside `layer_types`, `sliding_window_pattern` may be a text such as "LLLG".
    every = c.integer("sliding_window_pattern", 4) if window and not c.has("layer_types") else 1
    slides = [kind == SLIDING for kind in layer_kinds(c, every)]
    rotaries = [rotary if each or window is None else None for each in slides]
    attention = attend(net, heads, rotaries, norms=HEAD_NORMS, window=[window if each else None for each in slides])
    return block_decoder(net, c, attention, gated(net, c), before=("", ""), after=SUBLAYER_NORMS)
