"""Qwen2 and Qwen2.5 (biases of query, key and value alone) and Qwen3 (norms of heads)."""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import attention, decoder, mlp, norms

QWEN2: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 72,
    "intermediate_size": 104, "max_position_embeddings": FAR, "max_window_layers": 3, "num_attention_heads": 6,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 16, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 200,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": NEAR, "type": "yarn"}
QWEN3: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 32,
    "hidden_size": 64, "intermediate_size": 104, "max_position_embeddings": FAR, "max_window_layers": 3,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 200,
}  # fmt: skip
CHAT_ENDS = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 1], "pad_token_id": 1, "top_k": 20}


def _qwen(config: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    attend: dict[str, bool] = {"bias": True}
    if config["model_type"] == "qwen3":
        attend = {"bias": config["attention_bias"], "out_bias": config["attention_bias"], "head_norms": True}

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        return attention(config, **attend) | mlp(config) | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), matters=matters, **facts)


def models() -> dict[str, Model]:
    beyond = (SHORT, CROSSING, LONG)
    window = {"use_sliding_window": True, "sliding_window": NEAR, "max_window_layers": 1}
    return {
        "qwen2": _qwen(QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, generation=CHAT_ENDS),
        "qwen2-tied": _qwen(QWEN2 | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        "qwen2-window": _qwen(
            QWEN2 | window,
            {"use_sliding_window": False},
            {"max_window_layers": 2},
            {"sliding_window": NEAR - 1},
            lengths=beyond,
        ),
        "qwen2.5-yarn": _qwen(
            QWEN2 | {"rope_scaling": YARN, "max_position_embeddings": NEAR}, {"rope_scaling": None}, lengths=beyond
        ),
        "qwen3": _qwen(QWEN3, {"rms_norm_eps": 0.05}, generation=CHAT_ENDS),
        "qwen3-tied": _qwen(QWEN3 | {"tie_word_embeddings": True, "head_dim": 16, "hidden_size": 48}),
        "qwen3-biases": _qwen(QWEN3 | {"attention_bias": True}),
        "qwen3-yarn": _qwen(
            QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NEAR}},
            {"rope_scaling": None},
            lengths=beyond,
        ),
        "qwen3-new-form": _qwen(_new_form(QWEN3), {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    }


def _new_form(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it: the rotary embedding in one table, kinds of layers listed, `dtype`."""
    left_out = ("rope_scaling", "rope_theta", "torch_dtype", "transformers_version")
    return {key: value for key, value in config.items() if key not in left_out} | {
        "dtype": "bfloat16", "layer_types": ["full_attention"] * config["num_hidden_layers"], "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "transformers_version": "5.1.0",
    }  # fmt: skip
