"""The small models that `support.gguf_hybrids` writes as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from families import deepseek, gemma4, llama4, mamba, minicpm3, models, phi3, qwen_next
from families.model import Model
from families.weights import weights_of

LATER_NORM = {"mamba_rms_norm": True, "mamba_n_groups": 2}
WITHOUT_ROTARY = {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 2, "mamba_proj_bias": True}
DENSE = {**WITHOUT_ROTARY, "num_local_experts": 0, "tie_word_embeddings": False}
BIASES = {"mamba_conv_bias": True, "mamba_proj_bias": False}
"""llama.cpp ends without the first one, and refuses files with the second one."""
NEMOTRON3 = mamba.NEMOTRON3 | {"n_group": 1, "topk_group": 1, "hybrid_override_pattern": "ME*EME"}
LLAMA4 = {"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192, "interleave_moe_layer_step": 2}
LLAMA4 |= {"moe_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0], "rope_scaling": None}
"""What llama.cpp assumes of any Llama 4."""
UNSCALED = minicpm3.MINICPM3["rope_scaling"] | {"original_max_position_embeddings": 256}
"""MiniCPM 3 has divisors of frequencies, but no longer context than before."""
EQUAL_SCALES = {"rope_scaling": deepseek.V32["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0}}
"""Those of DeepSeek-V3. GGUF files have one multiplier for cosines and scores."""
INDEXER = {"index_head_dim": 64}
"""llama.cpp rotates indexer heads with a Hadamard matrix of at least 64 rows."""
SPARSITY = NormalDist().cdf(NormalDist().inv_cdf(0.95) * (104 / 103) ** 0.5)
"""llama.cpp computes a deviation from 104 activations with a divisor of 103, `transformers` with 104."""
GEMMA3N = {"activation_sparsity_pattern": [SPARSITY] * 5, "altup_active_idx": 0, "altup_num_inputs": 4}
GEMMA3N |= {"hidden_size_per_layer_input": 256, "intermediate_size": [104] * 5, "laurel_rank": 64}
GEMMA3N |= {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 200}
"""What llama.cpp assumes of any Gemma 3n: among others, that the first 20 layers have keys and values of their own."""
CASES: dict[str, Model] = {
    "granitehybrid": models.model("granite-hybrid"),
    "granitehybrid, dense": mamba._hybrid(DENSE),
    "falcon-h1": models.model("falcon-h1"),
    "falcon-h1, norms": mamba._falcon(LATER_NORM),
    "nemotron_h": models.model("nemotron-h"),
    "nemotron_h, biases": models.model("nemotron-h-biases"),
    "qwen3next": models.model("qwen3-next"),
    "qwen35": models.model("qwen3.5"),
    "qwen35, tied": models.model("qwen3.5-tied"),
    "qwen35moe": models.model("qwen3.5-moe"),
    "nemotron_h_moe": mamba._nemotron(mamba.NEMOTRON3 | {"n_group": 1, "topk_group": 1}),
    "nemotron_h_moe, latent": models.model("nemotron3-latent"),
    "gemma3n": models.model("gemma3n"),
    "gemma4": models.model("gemma4"),
    "gemma4, experts": models.model("gemma4-moe"),
    "llama4": llama4._llama4(LLAMA4),
    "minicpm3": minicpm3._minicpm3({"dim_model_base": 256, "scale_emb": 12, "rope_scaling": UNSCALED}),
    "phimoe": phi3._phimoe({"router_jitter_noise": 0.01}),
    "deepseek2, GLM-4.7-Flash": deepseek._deepseek(deepseek.FLASH | {"scoring_func": "sigmoid"}),
    "deepseek32": deepseek._deepseek(deepseek.V32 | EQUAL_SCALES | INDEXER),
    "glm-dsa": deepseek._deepseek(deepseek.GLM_5 | INDEXER),
    "gptneox": models.model("gpt-neox"),
    "gptneox, serial": models.model("gpt-neox-serial"),
}
"""Architecture, and what distinguishes the model after a comma -> model."""
COMPARED = {
    **CASES,
    "granitehybrid, dense": mamba._hybrid(DENSE | {"intermediate_size": 56, **BIASES}),
    "nemotron_h_moe": mamba._nemotron(NEMOTRON3),
    "nemotron_h_moe, latent": mamba._nemotron(NEMOTRON3 | {"moe_latent_size": 32}),
    "qwen3next": qwen_next._hybrid(qwen_next.QWEN3_NEXT | {"linear_value_head_dim": 16}, grouped=True),
    "qwen35": qwen_next._hybrid(qwen_next.QWEN3_5 | {"linear_value_head_dim": 16}),
    "qwen35, tied": qwen_next._hybrid(qwen_next.QWEN3_5 | {"linear_value_head_dim": 16, "tie_word_embeddings": True}),
    "qwen35moe": qwen_next._hybrid(qwen_next.QWEN3_5_MOE | {"linear_value_head_dim": 16}),
    "gemma3n": gemma4._gemma3n(GEMMA3N),
    "deepseek2, DeepSeek-V3": deepseek._deepseek(deepseek.V3 | EQUAL_SCALES),
}
"""Models with sizes that llama.cpp loads, where it supports the family."""


def case(name: str, models: Mapping[str, Model] | None = None) -> tuple[str, dict[str, Any], dict[str, np.ndarray]]:
    """Return architecture, configuration and tensors. The converter does not write the base of GPT-NeoX's rotation."""
    model, architecture = (models or CASES)[name], name.partition(",")[0]
    changes = {"rotary_emb_base": 10000} if architecture == "gptneox" else {}
    return architecture, {**model.config, **changes}, weights_of(name, model)
