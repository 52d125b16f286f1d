"""Families with layer norms: Cohere 1 and 2, StableLM, StarCoder 2 and GPT-NeoX."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA
from families.model import CROSSING, LONG, NEAR, SHORT, Model
from families.shapes import Shapes, attention, decoder, linear, mlp, norms

_COMMON: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "rope_scaling")}
COHERE: dict[str, Any] = _COMMON | {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5, "logit_scale": 0.7,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_qk_norm": False,
}  # fmt: skip
COHERE2: dict[str, Any] = COHERE | {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "rope_theta": 50000.0, "sliding_window": NEAR,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
STABLELM: dict[str, Any] = _COMMON | {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25, "qk_layernorm": False, "use_parallel_residual": False, "use_qkv_bias": True,
}  # fmt: skip
STARCODER2: dict[str, Any] = _COMMON | {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5, "sliding_window": NEAR, "tie_word_embeddings": True, "use_bias": True,
}  # fmt: skip
NEOX: dict[str, Any] = {
    key: value for key, value in _COMMON.items() if key not in ("attention_bias", "num_key_value_heads", "rope_theta")
} | {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5,
    "num_attention_heads": 2, "rotary_emb_base": 500, "rotary_pct": 0.5, "use_parallel_residual": True,
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")


def _with_biases(config: dict[str, Any], *names: str) -> Shapes:
    return norms(config, *names) | {f"{name}.bias": (config["hidden_size"],) for name in names}


def _cohere(config: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    def layer(_: int) -> Shapes:
        bias, size = config["attention_bias"], config["hidden_size"] // config["num_attention_heads"]
        attended = attention(config, bias=bias, out_bias=bias)
        if config["use_qk_norm"]:
            attended["self_attn.q_norm.weight"] = (config["num_attention_heads"], size)
            attended["self_attn.k_norm.weight"] = (config["num_key_value_heads"], size)
        return attended | mlp(config) | norms(config, "input_layernorm")

    return Model(config, decoder(config, layer), matters=({"logit_scale": 1.0}, *matters), **facts)


def _stablelm(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    names = NORMS[:1] if config["use_parallel_residual"] else NORMS

    def layer(_: int) -> Shapes:
        attended = attention(config, bias=config["use_qkv_bias"])
        counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for kind, count in counts.items() if config["qk_layernorm"] else ():
            size = config["hidden_size"] // config["num_attention_heads"]
            attended |= {f"self_attn.{kind}_layernorm.norms.{head}.weight": (size,) for head in range(count)}
        return attended | mlp(config) | _with_biases(config, *names)

    return Model(config, decoder(config, layer) | _with_biases(config, "model.norm"), matters=matters, bias_spread=0.1)


def _starcoder2(config: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    bias, hidden, inner = config["use_bias"], config["hidden_size"], config["intermediate_size"]

    def layer(_: int) -> Shapes:
        plain = linear("mlp.c_fc", inner, hidden, bias) | linear("mlp.c_proj", hidden, inner, bias)
        return attention(config, bias=bias, out_bias=bias) | plain | _with_biases(config, *NORMS)

    return Model(
        config, decoder(config, layer) | _with_biases(config, "model.norm"), matters=matters, bias_spread=0.1, **facts
    )


def _neox(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"gpt_neox.embed_in.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = attention(config, bias=True, out_bias=True, joined="query_key_value", at="attention.", out="dense")
        layer |= linear("mlp.dense_h_to_4h", inner, hidden, True) | linear("mlp.dense_4h_to_h", hidden, inner, True)
        layer |= _with_biases(config, *NORMS)
        shapes |= {f"gpt_neox.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= _with_biases(config, "gpt_neox.final_layer_norm") | {"embed_out.weight": (config["vocab_size"], hidden)}
    return Model(config, shapes, matters=matters, bias_spread=0.1)


def models() -> dict[str, Model]:
    beyond = (SHORT, CROSSING, LONG)
    return {
        "cohere": _cohere(COHERE, {"rope_theta": 10000.0}),
        "cohere-norms": _cohere(COHERE | {"use_qk_norm": True, "tie_word_embeddings": False}),
        "cohere2": _cohere(COHERE2, {"sliding_window": 63}, lengths=beyond),
        "stablelm": _stablelm(STABLELM, {"partial_rotary_factor": 0.5}, {"layer_norm_eps": 0.05}),
        "stablelm-parallel": _stablelm(
            STABLELM | {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False}
        ),
        "starcoder2": _starcoder2(STARCODER2, {"sliding_window": None}, lengths=beyond),
        "starcoder2-plain": _starcoder2(STARCODER2 | {"use_bias": False, "sliding_window": None}),
        "gpt-neox": _neox(NEOX, {"rotary_pct": 0.25}, {"use_parallel_residual": False}),
        "gpt-neox-serial": _neox(NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0}),
    }
