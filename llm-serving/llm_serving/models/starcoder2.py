"""StarCoder 2: layer norms, biases everywhere, and a feed-forward block without a gate."""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import empty_network, plain_mlp, pre_norm
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def starcoder2(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5, eps_key="norm_epsilon"), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads), c.integer("intermediate_size")
    bias, window = c.boolean("use_bias", True), sliding_window(c)
    c.choice("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")

    def attention(x: Value, _: int, at: str) -> Value:
        return self_attention(net, x, at, heads, rotary, bias=bias, out_bias=bias, window=window)

    def feed_forward(x: Value, _: int, at: str) -> Value:
        return plain_mlp(net, x, at, inner, ("c_fc", "c_proj"), "gelu_tanh", bias=bias)

    def normalize(x: Value, name: str) -> Value:
        return net.layer_norm(x, name, bias=True)

    return pre_norm(net, c, attention, feed_forward, tied=True, normalize=normalize)
