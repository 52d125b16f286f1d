"""Baichuan2: fused query, key and value; normalised rows of the LM head. The 7B has RoPE, the 13B ALiBi.

The 13B has `model_max_length` and no `max_position_embeddings`; nothing else distinguishes the two.
"""

from __future__ import annotations

from typing import Any

from families.model import FAR, PUBLISHED, Model
from families.shapes import Shapes, attention, decoder, mlp, norms

BAICHUAN2: dict[str, Any] = {
    **{key: value for key, value in PUBLISHED.items() if key != "attention_dropout"},
    "architectures": ["BaichuanForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_baichuan.BaichuanConfig",
        "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
    },
    "model_type": "baichuan", "hidden_size": 72, "intermediate_size": 104, "model_max_length": FAR,
    "num_hidden_layers": 3, "pad_token_id": 0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip
SMALL = BAICHUAN2 | {"max_position_embeddings": FAR, "num_attention_heads": 3}
LARGE = BAICHUAN2 | {"gradient_checkpointing": False, "num_attention_heads": 6}


def _baichuan2(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    def layer(_: int) -> Shapes:
        return (
            attention(config, joined="W_pack")
            | mlp(config)
            | norms(config, "input_layernorm", "post_attention_layernorm")
        )

    return Model(config, decoder(config, layer), matters=matters)


def models() -> dict[str, Model]:
    return {
        "baichuan2-7b": _baichuan2(SMALL, {"max_position_embeddings": None}, {"rms_norm_eps": 0.05}),
        "baichuan2-13b": _baichuan2(LARGE, {"max_position_embeddings": FAR}),
    }
