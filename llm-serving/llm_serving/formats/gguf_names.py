"""The tensors of GGUF files under Hugging Face's names, for each architecture of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from llm_serving.formats.gguf_layouts import (
    Layout,
    flat,
    half_of_groups,
    of_each_head,
    parts_of_groups,
    rates,
    taps,
    untiled,
    untiled_columns,
    untiled_rates,
    untiled_taps,
)


class NamedLayout(NamedTuple):
    name: str
    layout: Layout


@dataclass(frozen=True)
class Naming:
    """The tensor names and layouts of one architecture.

    Attributes:
        more: Name in the file -> Hugging Face's name, for tensors in layers. It extends and overrides Llama's names
            (`OF_LAYER`). `*` stands for the index of an expert. `|` separates the names of matrices that the file
            stacks in one tensor. A tuple has a name and a layout for each tensor that is made from the file's tensor.
        whole: The same mapping for tensors outside layers.
        layers: Hugging Face's prefix of the names of tensors in layers.
        pairs, plus_one: Whether the file has the layout of this name, which `formats.gguf_weights` explains.
    """

    more: Mapping[str, str | tuple[NamedLayout, ...]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    pairs: bool = False
    plus_one: bool = False


LATENT_KEYS: Final = "attn_k_b"
WHOLE: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
_W: Final = ("w1", "w3", "w2")


def _gated(at: str, ending: str = "", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    return {f"ffn_{part}{ending}": at + name for part, name in zip(("gate", "up", "down"), names, strict=True)}


_QKV: Final = "self_attn.q_proj|self_attn.k_proj|self_attn.v_proj"
OF_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": _QKV,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **_gated("mlp."),
}
_EXPERTS: Final = {"ffn_gate_inp": "mlp.gate", **_gated("mlp.experts.*.", "_exps")}
_BLOCK_SPARSE: Final = {"ffn_gate_inp": "block_sparse_moe.gate", **_gated("block_sparse_moe.experts.*.", "_exps", _W)}
_LFM2: Final[Mapping[str, str | tuple[NamedLayout, ...]]] = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": (NamedLayout("conv.conv", taps),),
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    **_gated("feed_forward.", names=_W),
}
_CORRECTION: Final = "mlp.gate.e_score_correction_bias"
_ERNIE_CORRECTION: Final = "mlp.moe_statics.e_score_correction_bias"
_HUNYUAN: Final[Mapping[str, str]] = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_AFTER: Final[Mapping[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA: Final = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_LATENT: Final[Mapping[str, str]] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    LATENT_KEYS: "self_attn.kv_b_proj",
}
_LATENT_EXPERTS: Final[Mapping[str, str]] = {
    **_EXPERTS,
    **_gated("mlp.shared_experts.", "_shexp"),
    "exp_probs_b": _CORRECTION,
    **_LATENT,
}
_INDEXER: Final[Mapping[str, str]] = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_LAYER_INPUTS: Final[Mapping[str, str]] = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
"""Tensors of Gemma 3n and 4 for a layer's own embedding of the token: name in the file -> Hugging Face's name."""
_TABLES_OF_LAYERS: Final[Mapping[str, str]] = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _mamba(at: str) -> dict[str, str | tuple[NamedLayout, ...]]:
    """Return the names of a Mamba-2 mixer. The file stores some of its vectors as matrices of one column or row."""
    return {
        "ssm_in": f"{at}in_proj",
        "ssm_conv1d": (NamedLayout(f"{at}conv1d", taps),),
        "ssm_dt": f"{at}dt_bias",
        "ssm_a": (NamedLayout(f"{at}A_log", rates),),
        "ssm_d": (NamedLayout(f"{at}D", flat),),
        "ssm_norm": (NamedLayout(f"{at}norm", flat),),
        "ssm_out": f"{at}out_proj",
    }


_NEMOTRON: Final[Mapping[str, str | tuple[NamedLayout, ...]]] = {
    **_mamba("mixer."),
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_BACKBONE: Final[Mapping[str, str]] = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_DELTA: Final[Mapping[str, str | tuple[NamedLayout, ...]]] = {
    **_EXPERTS,
    **_gated("mlp.shared_expert.", "_shexp"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": (
        NamedLayout("linear_attn.in_proj_qkv", partial(parts_of_groups, parts=slice(0, 3))),
        NamedLayout("linear_attn.in_proj_z", partial(parts_of_groups, parts=slice(3, 4))),
    ),
    "ssm_ba": (
        NamedLayout("linear_attn.in_proj_b", partial(half_of_groups, half=0)),
        NamedLayout("linear_attn.in_proj_a", partial(half_of_groups, half=1)),
    ),
    "ssm_conv1d": (NamedLayout("linear_attn.conv1d", taps),),
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": (NamedLayout("linear_attn.A_log", rates),),
    "ssm_norm": (NamedLayout("linear_attn.norm", flat),),
    "ssm_out": "linear_attn.out_proj",
}
"""Tensors of Qwen3-Next: name in the file -> Hugging Face's name. `ssm_in` is a name in files of 2025."""
_TILED: Final[Mapping[str, str | tuple[NamedLayout, ...]]] = {
    **_DELTA,
    "attn_qkv": (NamedLayout("linear_attn.in_proj_qkv", untiled),),
    "attn_gate": (NamedLayout("linear_attn.in_proj_z", untiled),),
    "ssm_beta": (NamedLayout("linear_attn.in_proj_b", untiled),),
    "ssm_alpha": (NamedLayout("linear_attn.in_proj_a", untiled),),
    "ssm_conv1d": (NamedLayout("linear_attn.conv1d", untiled_taps),),
    "ssm_dt": (NamedLayout("linear_attn.dt_bias", untiled),),
    "ssm_a": (NamedLayout("linear_attn.A_log", untiled_rates),),
    "ssm_out": (NamedLayout("linear_attn.out_proj", untiled_columns),),
}
"""Tensors of Qwen3.5: like `_DELTA`, but with the value heads in a different order."""
_SHARED_MLP: Final = {**_gated("shared_mlp."), **_gated("shared_mlp.", "_shexp")}
_GRANITE_EXPERTS: Final = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_gated("block_sparse_moe.experts.*.", "_exps"),
}

NAMINGS: Final[Mapping[str, Naming]] = {
    "llama": Naming(_BLOCK_SPARSE, pairs=True),
    "mistral3": Naming(pairs=True),
    "granite": Naming(pairs=True),
    "granitemoe": Naming(_GRANITE_EXPERTS, pairs=True),
    "granitehybrid": Naming({**_mamba("mamba."), **_GRANITE_EXPERTS, **_SHARED_MLP}, pairs=True),
    "falcon-h1": Naming(
        {
            **_mamba("mamba."),
            "ffn_norm": (NamedLayout("pre_ff_layernorm.weight", flat),),  # the name in the file has no ".weight"
            **_gated("feed_forward."),
        },
        whole={"output_norm": "model.final_layernorm"},
    ),
    "nemotron_h": Naming(_NEMOTRON, whole=_BACKBONE, layers="backbone.layers", pairs=True),
    "nemotron_h_moe": Naming(
        {
            **_NEMOTRON,
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b": "mixer.gate.e_score_correction_bias",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
            **{f"ffn_{part}_exps": f"mixer.experts.*.{part}_proj" for part in ("up", "down")},
            **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
        },
        whole=_BACKBONE,
        layers="backbone.layers",
        pairs=True,
    ),
    "qwen3next": Naming(_DELTA, plus_one=True),
    "qwen35": Naming(_TILED, plus_one=True),
    "qwen35moe": Naming(_TILED, plus_one=True),
    "gptneox": Naming(
        {
            "attn_qkv": (NamedLayout("attention.query_key_value", of_each_head),),
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        whole={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        layers="gpt_neox.layers",
    ),
    "bert": Naming(
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        whole={
            "token_embd": "embeddings.word_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "token_types": "embeddings.token_type_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "cls": "pooler.dense",
            "cls.output": "classifier",
        },
        layers="encoder.layer",
    ),
    "modern-bert": Naming(
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        whole={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
            "cls": "head.dense",
            "cls.norm": "head.norm",
            "cls.output": "classifier",
        },
        layers="layers",
    ),
    "smollm3": Naming(pairs=True),
    "internlm2": Naming(pairs=True),
    "baichuan": Naming(pairs=True),
    "qwen2": Naming(),
    "qwen3": Naming(),
    "qwen2moe": Naming(
        {**_EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_gated("mlp.shared_expert.", "_shexp")},
    ),
    "qwen3moe": Naming(_EXPERTS),
    "gemma": Naming(plus_one=True),
    "gemma2": Naming(_GEMMA, plus_one=True),
    "gemma3": Naming(_GEMMA, plus_one=True),
    "gemma3n": Naming(
        {
            **_GEMMA,
            **_LAYER_INPUTS,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        whole={
            **_TABLES_OF_LAYERS,
            "altup_proj": "model.altup_projections.*",
            "altup_unembd_proj": "model.altup_unembed_projections.*",
        },
    ),
    "gemma4": Naming(
        {
            **_GEMMA,
            **_LAYER_INPUTS,
            "layer_output_scale": "layer_scalar",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": "experts.*.gate_proj|experts.*.up_proj",
            **_gated("experts.*.", "_exps"),
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        whole=_TABLES_OF_LAYERS,
    ),
    "phimoe": Naming(_BLOCK_SPARSE),
    "minicpm3": Naming(_LATENT),
    "llama4": Naming(
        {
            "ffn_gate_inp": "feed_forward.router",
            **_gated("feed_forward."),
            **_gated("feed_forward.experts.*.", "_exps"),
            **_gated("feed_forward.shared_expert.", "_shexp"),
        }
    ),
    "seed_oss": Naming({"post_attention_norm": "post_attention_layernorm"}),
    "olmo2": Naming(_AFTER),
    "lfm2": Naming(_LFM2),
    "lfm2moe": Naming(
        {
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b": "feed_forward.expert_bias",
            **_gated("feed_forward.experts.*.", "_exps", _W),
        }
    ),
    "exaone4": Naming(_AFTER),
    "ernie4_5": Naming(),
    "ernie4_5-moe": Naming({**_EXPERTS, **_gated("mlp.shared_experts.", "_shexp"), "exp_probs_b": _ERNIE_CORRECTION}),
    "hunyuan-dense": Naming(_HUNYUAN),
    "hunyuan-moe": Naming(
        {**_HUNYUAN, **_EXPERTS, **_gated("mlp.shared_mlp.", "_shexp"), "ffn_gate_inp": "mlp.gate.wg"}
    ),
    "minimax-m2": Naming({**_BLOCK_SPARSE, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}),
    "gpt-oss": Naming(
        {
            **_EXPERTS,
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
        }
    ),
    "command-r": Naming(),
    "cohere2": Naming(),
    "stablelm": Naming(),
    "starcoder2": Naming({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "phi3": Naming({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "chatglm": Naming({"ffn_up": "mlp.gate_up_proj"}),
    "glm4": Naming(
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        }
    ),
    "glm4moe": Naming(
        {
            **_EXPERTS,
            **_gated("mlp.shared_experts.", "_shexp"),
            "exp_probs_b": _CORRECTION,
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    "deepseek2": Naming(_LATENT_EXPERTS),
    "deepseek32": Naming({**_LATENT_EXPERTS, **_INDEXER}),
    "glm-dsa": Naming({**_LATENT_EXPERTS, **_INDEXER}),
}
