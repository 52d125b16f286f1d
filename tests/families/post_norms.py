"""OLMo 2 and 3, and EXAONE 4: norms follow the sublayers. Windows and rotary embeddings differ between layers."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA
from families.model import CROSSING, LONG, NEAR, SHORT, Model
from families.shapes import attention, decoder, mlp, norms

OLMO2: dict[str, Any] = LLAMA | {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_key_value_heads": 4, "rope_theta": 500000,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NEAR, "attention_factor": 1.2}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
OLMO3 = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "layer_types": KINDS, "num_key_value_heads": 2,
    "rope_scaling": YARN, "sliding_window": NEAR,
}  # fmt: skip
EXAONE4: dict[str, Any] = LLAMA | {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 32, "layer_types": KINDS,
    "rope_theta": 1000000, "sliding_window": NEAR, "sliding_window_pattern": "LLG", "tie_word_embeddings": True,
}  # fmt: skip
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
LENGTHS = (SHORT, CROSSING, LONG)


def _post_norms(config: dict[str, Any], *matters: dict[str, Any], whole: bool = True, **facts: Any) -> Model:
    bias = config["attention_bias"]

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        attended = attention(config, bias=bias, out_bias=bias, head_norms=not whole, whole_norms=whole)
        return attended | mlp(config) | norms(config, *BEHIND)

    return Model(config, decoder(config, layer), matters=matters, **facts)


def models() -> dict[str, Model]:
    shifted = {"layer_types": KINDS[1:] + KINDS[:1]}
    return {
        "olmo2": _post_norms(OLMO2, {"rms_norm_eps": 0.05}),
        "olmo2-odd": _post_norms(OLMO2 | {"attention_bias": True, "hidden_size": 80, "num_key_value_heads": 2}),
        "olmo3": _post_norms(OLMO3, {"rope_scaling": None}, {"sliding_window": 63}, shifted, lengths=LENGTHS),
        "exaone4": _post_norms(EXAONE4, {"sliding_window": 63}, shifted, whole=False, lengths=LENGTHS),
        "exaone4-full": _post_norms(
            EXAONE4 | {"layer_types": ["full_attention"] * 3, "sliding_window": None, "sliding_window_pattern": None},
            {"rope_theta": 10000.0},
            whole=False,
        ),
    }
