"""MiniCPM 3: multi-head latent attention, and factors of embeddings, residuals and logits."""

from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.latent_attention import LatentAttention
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def minicpm3(c: ConfigReader) -> Network:
    net, count, heads = empty_network(c, eps=1e-5), c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    if not c.has("v_head_dim"):
        c = ConfigReader({**c.config, "v_head_dim": max(1, net.hidden // heads)}, c.where)
    attention, inner, bias = (
        LatentAttention(c, interleaved=False),
        c.integer("intermediate_size"),
        c.boolean("mlp_bias"),
    )
    if c.boolean("attention_bias"):
        raise c.fail("attention_bias", "must be false")
    depth = c.number("scale_depth", 1.4) if c.has("scale_depth") or c.is_absent("scale_depth") else count**0.5
    width = c.number("dim_model_base", 256.0)
    width = width if c.has("dim_model_base") or c.is_absent("dim_model_base") else float(net.hidden)
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, attention(net, x, index, at + "self_attn."), depth / count**0.5)
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, bias=bias), depth / count**0.5)

    return decoder(
        net, c, layer, tied=True, table_scale=c.number("scale_emb", 12.0), rounded_scale=True, scale=width / net.hidden
    )
