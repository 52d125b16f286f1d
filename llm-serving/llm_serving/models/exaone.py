"""EXAONE 4: norms follow the sublayers. Models with sliding windows have rotary embeddings only in those layers."""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding, self_attention, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import SLIDING, decoder, empty_network, gated_mlp, layer_kinds
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def exaone4(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, inner, window = rotary_embedding(c, heads), c.integer("intermediate_size"), sliding_window(c, 4096)
    # Beside `layer_types`, `sliding_window_pattern` may be a text such as "LLLG".
    every = c.integer("sliding_window_pattern", 4) if window and not c.has("layer_types") else 1
    kinds = layer_kinds(c, every)
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, index: int, at: str) -> Value:
        slides = kinds[index] == SLIDING
        rotates = rotary if slides or window is None else None
        x = self_attention(net, hidden, at, heads, rotates, norms=HEAD_NORMS, window=window if slides else None)
        hidden = net.add(hidden, net.rms_norm(x, at + "post_attention_layernorm"))
        x = gated_mlp(net, hidden, at + "mlp.", inner)
        return net.add(hidden, net.rms_norm(x, at + "post_feedforward_layernorm"))

    return decoder(net, c, layer)
