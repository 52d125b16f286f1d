"""The older layout of GLM-4 (`glm-4-9b-chat`), ChatGLM 3 and 2: GLM's network with other tensor and config names."""

from collections.abc import Mapping
from typing import Any, Final

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network

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
    names, out = ("self_attention.query_key_value",), "self_attention.dense"
    attention = attend(net, heads, rotary, names=names, out=out, bias=c.boolean("attention_bias"))
    inner, gate_up, down = c.integer("intermediate_size"), ("dense_h_to_4h",), "dense_4h_to_h"
    return block_decoder(
        net,
        c,
        attention,
        lambda x, _, at: gated_mlp(net, x, at, inner, gate_up=gate_up, down=down),
        table="transformer.embedding.word_embeddings",
        head="transformer.output_layer",
        layers="transformer.encoder.layers",
        norm="transformer.encoder.final_layernorm",
    )
