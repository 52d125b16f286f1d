"""MiniCPM 3: multi-head latent attention, and factors of embeddings, residuals and logits."""

from functools import partial

from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.latent_attention import LatentAttention
from llm_serving.models.layers import block_decoder, empty_network, gated
from llm_serving.network.builder import Network


def minicpm3(c: ConfigReader) -> Network:
    net, count, heads = empty_network(c, eps=1e-5), c.integer("num_hidden_layers"), c.integer("num_attention_heads")
    if not c.has("v_head_dim"):
        c = ConfigReader({**c.config, "v_head_dim": max(1, net.hidden // heads)}, c.where)
    attention = partial(LatentAttention(c, interleaved=False), net)
    if c.boolean("attention_bias"):
        raise c.fail("attention_bias", "must be false")
    depth = c.number("scale_depth", 1.4) if c.has("scale_depth") or c.is_absent("scale_depth") else count**0.5
    width = c.number("dim_model_base", 256.0)
    width = width if c.has("dim_model_base") or c.is_absent("dim_model_base") else float(net.hidden)
    return block_decoder(
        net,
        c,
        attention,
        gated(net, c, bias=c.boolean("mlp_bias")),
        factor=depth / count**0.5,
        table_scale=c.number("scale_emb", 12.0),
        rounded_scale=True,
        scale=width / net.hidden,
        tied=True,
    )
