"""The older layout of GLM-4 (`glm-4-9b-chat`), ChatGLM 3 and 2: GLM's network with other tensor and config names."""

from collections.abc import Mapping
from typing import Any, Final

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

ARCHITECTURE: Final = "ChatGLMModel"
ARCHITECTURES: Final = (ARCHITECTURE, "ChatGLMForConditionalGeneration")
_CONFIG_KEYS: Final[Mapping[str, str]] = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "add_qkv_bias": "attention_bias",
}
_MUST_BE: Final[Mapping[str, bool]] = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
}


def normalized_config(c: ConfigReader) -> dict[str, Any]:
    """Return the configuration with the usual keys of other families. Raise ModelError for an unsupported feature."""
    for key, value in _MUST_BE.items():
        if c.boolean(key, value) is not value:
            raise c.fail(key, f"must be {str(value).lower()}")
    shared = c.integer("multi_query_group_num", 1) if c.boolean("multi_query_attention") else None
    return {
        **c.config,
        **{ours: c.config[theirs] for theirs, ours in _CONFIG_KEYS.items() if c.has(theirs)},
        "architectures": [ARCHITECTURE],
        "num_key_value_heads": c.integer("num_attention_heads") if shared is None else shared,
        "rope_theta": 10000.0 * c.number("rope_ratio", 1.0),
    }


def chatglm(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary = rotary_embedding(c, heads, interleaved=True, fraction=0.5)
    inner, bias = c.integer("intermediate_size"), c.boolean("attention_bias")
    names, out = ("self_attention.query_key_value",), "self_attention.dense"

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, names=names, out=out, bias=bias))
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
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
