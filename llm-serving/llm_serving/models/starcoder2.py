"""StarCoder 2: layer norms, biases everywhere, and a feed-forward block without a gate."""

from functools import partial

from llm_serving.models.attention import attention_heads, rotary_embedding, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, plain_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def starcoder2(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5, eps_key="norm_epsilon"), attention_heads(c)
    inner, bias = c.integer("intermediate_size"), c.boolean("use_bias", True)
    c.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")

    def feed_forward(x: Value, _: int, at: str) -> Value:
        return plain_mlp(net, x, at, inner, ("c_fc", "c_proj"), "gelu_tanh", bias=bias)

    rotary, normalize = rotary_embedding(c, heads), partial(net.layer_norm, bias=True)
    attention = attend(net, heads, rotary, bias=bias, out_bias=bias, window=sliding_window(c))
    return block_decoder(net, c, attention, feed_forward, tied=True, normalize=normalize)
