"""A small configuration of each family, and random weights of any name and shape."""

import zlib

import numpy as np

_COMMON = {
    "hidden_size": 64,
    "vocab_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
_ROPE = {"rope_theta": 500.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

CONFIGS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, biases, tied": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, odd heads and odd inner": ("LlamaForCausalLM", {"head_dim": 20, "intermediate_size": 90}),
    "llama3": (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
    "llama, yarn": ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2, experts": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 5, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1], **_EXPERTS},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, experts": ("Qwen3MoeForCausalLM", {"num_experts": 5, **_EXPERTS}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 7, "partial_rotary_factor": 0.5}),
    "internlm2": ("InternLM2ForCausalLM", {"bias": True}),
    "internlm3": ("InternLM3ForCausalLM", {"qkv_bias": True}),
    "baichuan2, 7B": ("BaichuanForCausalLM", {"num_key_value_heads": 4}),
    "baichuan2, 13B": ("BaichuanForCausalLM", {"num_key_value_heads": 4, "max_position_embeddings": None}),
    "glm": ("GlmForCausalLM", {"attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", {"attention_bias": True}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 7,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 24, "sliding_window": 7, "sliding_window_pattern": 2}),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "deepseek2": (
        "DeepseekV2ForCausalLM",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            **_EXPERTS,
            **_LATENT,
            "norm_topk_prob": False,
        },
    ),
    "deepseek3": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "q_lora_rank": 24}
        | _EXPERTS
        | _LATENT
        | {"first_k_dense_replace": 1},
    ),
    "deepseek3.2": (
        "DeepseekV32ForCausalLM",
        {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "q_lora_rank": 24}
        | _EXPERTS
        | _LATENT
        | {"first_k_dense_replace": 1, "index_head_dim": 16, "index_n_heads": 9, "index_topk": 21},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "intermediate_size": 40},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"head_dim": 20}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 7, "logit_scale": 0.5}),
    "ernie, experts": ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 48}),
    "hunyuan, experts": ("HunYuanMoEV1ForCausalLM", {"num_experts": 5, "moe_topk": 2}),
    "minimax": ("MiniMaxM2ForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 16}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5, "rope_theta": None, "rotary_emb_base": 500}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 7}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {"full_attention_interval": 2, "num_experts": 5, "shared_expert_intermediate_size": 32, **_EXPERTS, **_DELTA},
    ),
    "nemotron-h": ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-", **_MAMBA}),
    "nemotron-h, experts": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "ME*", "n_routed_experts": 5, "moe_shared_expert_intermediate_size": 32}
        | {"moe_latent_size": 32, **_EXPERTS, **_MAMBA},
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 12, "mamba_rms_norm": False}
        | {"ssm_multipliers": [0.7, 0.9, 1.2, 0.8, 1.1], "mlp_multipliers": [0.7, 0.8]},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": 21, "floor_scale": 8, "no_rope_layers": [1, 0, 1], "moe_layers": [0, 1]}
        | {"num_local_experts": 5, "intermediate_size_mlp": 64},
    ),
    "phimoe": (
        "PhimoeForCausalLM",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
        | {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.7, 0.0, 0.0], "laurel_rank": 8}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 90},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 7}
        | {"global_head_dim": 48, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    "gemma4, inputs of layers": (
        "Gemma4ForCausalLM",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 7}
        | {"global_head_dim": 48, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 1},
    ),
}
"""(architecture, changes to the common configuration) by name."""


def config_of(name: str) -> dict:
    """Return a complete `config.json`."""
    architecture, facts = CONFIGS[name]
    return {"architectures": [architecture], **_COMMON, **_ROPE, **facts}


class RandomTensors:
    """Random tensors by name; equal names and shapes give equal values. Norm weights are about 1, products keep their
    scale.
    """

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.normal(size=shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif len(shape) > 1 and "embed" not in name:
            values *= 1.5 / np.sqrt(shape[1])
        return values.astype(np.float32)
