"""gpt-oss: attention sinks, windows in every second layer, and experts with biases, stacked in tensors.

The matrices of experts are stored in 4 bits (MXFP4): two values of a byte, the lower half first, and a power of two for
each 32 inputs. `transformers` reads them dequantized.
"""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import attention, decoder, linear, norms

GPT_OSS: dict[str, Any] = {
    **PUBLISHED, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "head_dim": 16, "hidden_size": 64, "initial_context_length": NEAR, "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 2,
    "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": NEAR,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 32, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip


def _gpt_oss(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    hidden, inner, count = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        routed = linear("mlp.router", count, hidden, True) | {
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
        attended = attention(config, bias=True, out_bias=True) | {"self_attn.sinks": (config["num_attention_heads"],)}
        return attended | routed | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), lengths=(SHORT, CROSSING, LONG), matters=matters)


def models() -> dict[str, Model]:
    return {
        "gpt-oss": _gpt_oss(
            GPT_OSS,
            {"sliding_window": 31},
            {"rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": True}},
            {"num_experts_per_tok": 2},
        )
    }
