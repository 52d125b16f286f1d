"""StableLM: layer norms, RoPE on a quarter of each head, and in some models one norm for attention and MLP."""

from functools import partial

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def stablelm(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5, eps_key="layer_norm_eps"), attention_heads(c)
    bias, parallel = c.boolean("use_qkv_bias"), c.boolean("use_parallel_residual")
    norms = ("self_attn.q_layernorm", "self_attn.k_layernorm") if c.boolean("qk_layernorm") else None
    if norms is not None and heads.own != heads.dim:
        raise c.fail("qk_layernorm", f"must be false for heads of {heads.own} elements, which is no multiple of 16")

    def head_norm(x: Value, name: str, order: list[int]) -> Value:
        names = [f"{name}.norms.{head}" for head in range(x.width // heads.dim)]
        return net.layer_norm(x, names, group=heads.dim, rows=order)

    attention = attend(
        net, heads, rotary_embedding(c, heads, fraction=0.25), norms=norms, head_norm=head_norm, bias=bias
    )
    before = ("input_layernorm", "input_layernorm" if parallel else "post_attention_layernorm")
    return block_decoder(net, c, attention, gated(net, c), before=before, normalize=partial(net.layer_norm, bias=True))
