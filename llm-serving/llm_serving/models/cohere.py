"""Cohere's Command R (Cohere 1) and Command R7B (Cohere 2).

The attention and the feed-forward block read the same layer norm, and both results are added to the residual. In Cohere
1 all layers have a rotary embedding of adjacent pairs. In Cohere 2 only layers with a sliding window have one.
"""

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import FULL, attend, block_decoder, empty_network, gated, layer_kinds, layer_windows
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def cohere(c: ConfigReader) -> Network:
    return _cohere(c, [""] * c.integer("num_hidden_layers"), 500000.0)


def cohere2(c: ConfigReader) -> Network:
    return _cohere(c, layer_kinds(c, c.integer("sliding_window_pattern", 4)), 10000.0)


def _cohere(c: ConfigReader, kinds: list[str], theta: float) -> Network:
    """Build the network. `kinds`: of each layer SLIDING, FULL or, in Cohere 1, "" (rotary embedding, no window)."""
    net, heads = empty_network(c, eps=1e-5, eps_key="layer_norm_eps"), attention_heads(c)
    rotary, window = rotary_embedding(c, heads, interleaved=True, theta=theta), layer_windows(c, kinds, 4096)
    bias, norms = c.boolean("attention_bias"), HEAD_NORMS if c.boolean("use_qk_norm") else None
    if norms is not None and heads.own != heads.dim:
        raise c.fail("use_qk_norm", f"must be false for heads of {heads.own} elements, which is no multiple of 16")

    def head_norm(x: Value, name: str, order: list[int]) -> Value:
        return net.layer_norm(x, name, group=heads.dim, rows=order, stored_shape=(x.width // heads.dim, heads.dim))

    rotaries = [None if kind == FULL else rotary for kind in kinds]
    attention = attend(net, heads, rotaries, norms=norms, head_norm=head_norm, bias=bias, out_bias=bias, window=window)
    scale, before = c.number("logit_scale", 0.0625), ("input_layernorm",) * 2
    feed_forward = gated(net, c)
    return block_decoder(
        net, c, attention, feed_forward, before=before, tied=True, scale=scale, normalize=net.layer_norm
    )
