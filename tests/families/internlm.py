"""InternLM2 and 2.5 (grouped fused query, key and value, and other tensor names) and InternLM3."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA, STRETCHED, llama_like
from families.model import FAR, NEAR, Model
from families.shapes import Shapes, attention, decoder, mlp, norms

OWN_CODE = {
    "AutoConfig": "configuration_internlm2.InternLM2Config",
    "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM",
}
LEFT_OUT = ("attention_bias", "attention_dropout", "mlp_bias")
INTERNLM2: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in LEFT_OUT} | {
    "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "attn_implementation": "eager",
    "auto_map": OWN_CODE, "bias": False, "hidden_size": 96, "num_attention_heads": 6, "pad_token_id": 2,
    "rope_theta": 1000000,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": NEAR, "rope_scaling": {"factor": 4.0, "type": "dynamic"},
}  # fmt: skip
INTERNLM3: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in LEFT_OUT} | {
    "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "attention_dropout": 0.0, "bias": False,
    "head_dim": 24, "pad_token_id": 2, "qkv_bias": False, "rope_theta": 50000000,
}  # fmt: skip


def _internlm2(changes: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    config = INTERNLM2 | changes

    def layer(_: int) -> Shapes:
        bias = config["bias"]
        return (
            attention(config, joined="wqkv", bias=bias, out_bias=bias, at="attention.", out="wo")
            | mlp(config, at="feed_forward.", names=("w1", "w3", "w2"))
            | norms(config, "attention_norm", "ffn_norm")
        )

    shapes = decoder(config, layer, table="model.tok_embeddings", head="output")
    return Model(config, shapes, matters=matters, **facts)


def _internlm3(changes: dict[str, Any], **facts: Any) -> Model:
    config = INTERNLM3 | changes
    named = config | {"attention_bias": config["qkv_bias"], "mlp_bias": config["bias"]}
    like = llama_like(named)
    return Model(config, like.shapes, **facts)


def models() -> dict[str, Model]:
    without: dict[str, Any] = {"rope_scaling": None}
    return {
        "internlm2": _internlm2({"bias": True}, {"rope_theta": 10000}),
        "internlm2.5": _internlm2(DYNAMIC, without, lengths=STRETCHED, served_length=FAR),
        "internlm3": _internlm3(
            DYNAMIC | {"rope_scaling": {"factor": 4.0, "rope_type": "dynamic"}},
            matters=(without,),
            lengths=STRETCHED,
            served_length=FAR,
        ),
        "internlm3-biases": _internlm3({"bias": True, "qkv_bias": True}),
    }
