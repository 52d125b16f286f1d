"""The older layout of GLM-4 (`glm-4-9b-chat`), of ChatGLM 3 and 2: GLM's network with names and facts of its own."""

from collections.abc import Mapping
from typing import Any, Final

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

ARCHITECTURE: Final = "ChatGLMModel"
ARCHITECTURES: Final = (ARCHITECTURE, "ChatGLMForConditionalGeneration")
_FACTS: Final[Mapping[str, str]] = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "add_qkv_bias": "attention_bias",
}
"""Their name of a fact, and ours."""
_MUST_BE: Final[Mapping[str, bool]] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
}


def facts_of(c: Facts) -> dict[str, Any]:
    """The configuration with the facts under the names of other families.

    Raises:
        ModelError: It asks for what the network does not have.
    """
    for key, value in _MUST_BE.items():
        if c.boolean(key, value) is not value:
            raise c.fail(key, f"must be {str(value).lower()}")
    shared = c.integer("multi_query_group_num", 1) if c.boolean("multi_query_attention") else None
    return {
        **c.config,
        **{ours: c.config[theirs] for theirs, ours in _FACTS.items() if c.has(theirs)},
        "architectures": [ARCHITECTURE],
        "num_key_value_heads": c.integer("num_attention_heads") if shared is None else shared,
        "rope_theta": 10000.0 * c.number("rope_ratio", 1.0),
    }


def chatglm(c: Facts) -> Network:
    net, heads = network_of(c, eps=1e-5), heads_of(c)
    rotary = rotary_of(c, heads, interleaved=True, share=0.5)
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias")
    names, out = ("self_attention.query_key_value",), "self_attention.dense"

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, names=names, out=out, bias=bias))
        x = net.norm(hidden, at + "post_attention_layernorm")
        x = gated_mlp(net, x, at + "mlp.", inner, gate_up=("dense_h_to_4h",), down="dense_4h_to_h")
        return net.add(hidden, x)

    return decoder(
        net,
        c,
        layer,
        table="transformer.embedding.word_embeddings",
        head="transformer.output_layer",
        layers="transformer.encoder.layers",
        norm="transformer.encoder.final_layernorm",
    )
