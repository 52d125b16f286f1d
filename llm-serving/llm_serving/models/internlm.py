"""InternLM2: Llama with query, key and value in one tensor, interleaved by KV head. InternLM3: Llama with the
configuration keys `qkv_bias` (biases of query, key and value) and `bias` (of attention output and MLP).
"""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.models.llama import llama_like
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def internlm2(c: ConfigReader) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, inner, bias = rotary_embedding(c, heads), c.integer("intermediate_size"), c.boolean("bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "attention_norm")
        names, out = ("attention.wqkv",), "attention.wo"
        x = self_attention(net, x, at, heads, rotary, names=names, out=out, grouped=True, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x)
        x = net.rms_norm(hidden, at + "ffn_norm")
        return net.add(hidden, gated_mlp(net, x, at + "feed_forward.", inner, gate_up=("w1", "w3"), down="w2"))

    return decoder(net, c, layer, table="model.tok_embeddings", head="output")


def internlm3(c: ConfigReader) -> Network:
    bias = c.boolean("bias")
    return llama_like(c, c.boolean("qkv_bias"), bias, bias)
