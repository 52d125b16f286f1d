"""ModernBERT: an encoder with rotary embeddings, gated MLPs, and layers with local or global attention."""

from llm_serving.core.enums import PoolingMode
from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import FULL, SLIDING, classifier_labels, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def modernbert(c: ConfigReader) -> Network:
    net = empty_network(c, eps=1e-5, eps_key="norm_eps", causal=False)
    net.lm_head(_hidden_states(net, c), "embeddings.tok_embeddings")
    net.allow_unused("head.", "decoder.", "classifier.")
    return net


def modernbert_classifier(c: ConfigReader) -> Network:
    net, count = empty_network(c, eps=1e-5, eps_key="norm_eps", causal=False), classifier_labels(c)
    hidden = _hidden_states(net, c)
    c.choice("classifier_activation", ("gelu",), "gelu")
    c.choice("classifier_pooling", (PoolingMode.FIRST, PoolingMode.MEAN), PoolingMode.FIRST)
    net.begin_head()
    x = net.activation(net.linear(hidden, "head.dense", net.hidden, bias=c.boolean("classifier_bias")), "gelu")
    x = net.layer_norm(x, "head.norm", bias=c.boolean("norm_bias"))
    net.scores(net.linear(x, "classifier", count, bias=True), count)
    return net


def _hidden_states(net: Network, c: ConfigReader) -> Value:
    heads, inner = attention_heads(c), c.integer("intermediate_size")
    rotaries = {
        kind: rotary_embedding(c, heads, kind=kind, theta=c.number(key, usual))
        for kind, key, usual in ((FULL, "global_rope_theta", 160_000.0), (SLIDING, "local_rope_theta", 10_000.0))
    }
    window = c.integer("local_attention", 128) // 2 + 1
    c.choice("hidden_activation", ("gelu",), "gelu")
    norm_bias, bias = c.boolean("norm_bias"), c.boolean("attention_bias")
    every, count = c.integer("global_attn_every_n_layers", 3), c.integer("num_hidden_layers")
    usual = [SLIDING if index % every else FULL for index in range(count)]
    kinds = c.choices("layer_types", (FULL, SLIDING), count) or usual

    def layer(hidden: Value, index: int) -> Value:
        at, kind = f"layers.{index}.", kinds[index]
        x = hidden if index == 0 else net.layer_norm(hidden, at + "attn_norm", bias=norm_bias)
        attended = self_attention(
            net,
            x,
            at,
            heads,
            rotaries[kind],
            names=("attn.Wqkv",),
            out="attn.Wo",
            bias=bias,
            out_bias=bias,
            window=window if kind == SLIDING else None,
        )
        hidden = net.add(hidden, attended)
        x = net.layer_norm(hidden, at + "mlp_norm", bias=norm_bias)
        mlp_bias = c.boolean("mlp_bias")
        return net.add(
            hidden, gated_mlp(net, x, at + "mlp.", inner, gate_up=("Wi",), down="Wo", function="gelu", bias=mlp_bias)
        )

    hidden = net.layer_norm(net.embedding("embeddings.tok_embeddings"), "embeddings.norm", bias=norm_bias)
    for index in range(count):
        hidden = layer(hidden, index)
    return net.layer_norm(hidden, "final_norm", bias=norm_bias)
