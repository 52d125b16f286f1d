"""StableLM: layer norms, RoPE on a quarter of each head, and in some models one norm for attention and MLP."""

from functools import partial

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def stablelm(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5, eps_key="layer_norm_eps"), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads, fraction=0.25), c.integer("intermediate_size")
    bias, parallel = c.boolean("use_qkv_bias"), c.boolean("use_parallel_residual")
    norms = ("self_attn.q_layernorm", "self_attn.k_layernorm") if c.boolean("qk_layernorm") else None
    if norms is not None and heads.own != heads.dim:
        raise c.fail("qk_layernorm", f"must be false for heads of {heads.own} elements, which is no multiple of 16")
    normalize = partial(net.layer_norm, bias=True)
    c.choice("hidden_act", ("silu",), "silu")

    def head_norm(x: Value, name: str, order: list[int]) -> Value:
        names = [f"{name}.norms.{head}" for head in range(x.width // heads.dim)]
        return net.layer_norm(x, names, group=heads.dim, rows=order)

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = normalize(hidden, at + "input_layernorm")
        attended = self_attention(net, x, at, heads, rotary, norms=norms, head_norm=head_norm, bias=bias)
        hidden = net.add(hidden, attended)
        x = x if parallel else normalize(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner))

    return decoder(net, c, layer, normalize=normalize)
