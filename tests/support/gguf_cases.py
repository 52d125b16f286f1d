"""A configuration of each architecture that `support.gguf_families` writes."""

import json

from llm_serving.models.weight_reader import check_folder
from support.family_configs import config_of
from support.graph_model import GraphModel, backend
from support.model_factories import write_safetensors

_SCALE = {"query_pre_attn_scalar": 32}
CASES = {
    "llama": ("llama", "llama", {}),
    "llama, biases, tied": ("llama", "llama, biases, tied", {}),
    "llama, odd heads": ("llama", "llama, odd heads and odd inner", {}),
    "mixtral": ("llama", "mixtral", {}),
    "internlm3": ("llama", "internlm3", {}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen2moe": ("qwen2moe", "qwen2, experts", {"norm_topk_prob": False, "moe_intermediate_size": 64}),
    "qwen3": ("qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", "qwen3, experts", {"moe_intermediate_size": 64}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", _SCALE),
    "gemma3": ("gemma3", "gemma3", _SCALE),
    "phi3": ("phi3", "phi3", {}),
    "phi3, no window": ("phi3", "phi3", {"sliding_window": None, "partial_rotary_factor": 1.0}),
    "internlm2": ("internlm2", "internlm2", {"bias": False}),
    "baichuan, 7B": ("baichuan", "baichuan2, 7B", {}),
    "baichuan, 13B": (
        "baichuan",
        "baichuan2, 13B",
        {"num_hidden_layers": 40, "model_max_length": 256, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16},
    ),
    "chatglm": ("chatglm", "glm", {}),
    "glm4": ("glm4", "glm4", {}),
    "granite": ("granite", "granite", {}),
    "smollm3": ("smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}),
    "seed_oss": (
        "seed_oss",
        "llama",
        {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False},
    ),
    "olmo2": ("olmo2", "llama", {"architectures": ["Olmo2ForCausalLM"]}),
    "olmo3": (
        "olmo2",
        "llama",
        {
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "lfm2": ("lfm2", "lfm2", {"norm_eps": 1e-5, "conv_L_cache": 3, "head_dim": 32, "tie_word_embeddings": True}),
    "lfm2moe": (
        "lfm2moe",
        "lfm2",
        {
            "architectures": ["Lfm2MoeForCausalLM"],
            "norm_eps": 1e-5,
            "conv_L_cache": 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
        },
    ),
    "exaone4": ("exaone4", "llama", {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None}),
    "exaone4, windows": (
        "exaone4",
        "llama",
        {
            "architectures": ["Exaone4ForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "mistral3",
        "llama",
        {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "granitemoe": (
        "granitemoe",
        "granite",
        {
            "architectures": ["GraniteMoeForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "separate_experts": True,
        },
    ),
    "minimax-m2": (
        "minimax-m2",
        "llama",
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
        },
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "llama",
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "llama",
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2},
    ),
    "gpt-oss": (
        "gpt-oss",
        "llama",
        {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "attention_bias": True,
            "separate_experts": True,
        },
    ),
    "glm4moe": (
        "glm4moe",
        "llama",
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "ernie4_5": ("ernie4_5", "llama", {"architectures": ["Ernie4_5ForCausalLM"], "tie_word_embeddings": True}),
    "hunyuan": ("hunyuan-dense", "llama", {"architectures": ["HunYuanDenseV1ForCausalLM"]}),
    "cohere": ("command-r", "llama", {"architectures": ["CohereForCausalLM"], "logit_scale": 0.5}),
    "cohere2": (
        "cohere2",
        "llama",
        {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 7, "num_hidden_layers": 4, "logit_scale": 0.5},
    ),
    "stablelm": (
        "stablelm",
        "llama",
        {
            "architectures": ["StableLmForCausalLM"],
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2": ("starcoder2", "llama", {"architectures": ["Starcoder2ForCausalLM"], "use_bias": True}),
    "deepseek3": (
        "deepseek2",
        "deepseek2",
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek2": ("deepseek2", "deepseek2", {"moe_intermediate_size": 64}),
    "deepseek2, groups": (
        "deepseek2",
        "deepseek2",
        {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""(architecture, name in `family_configs.CONFIGS`, changes) by name."""


def case(name):
    architecture, known, changes = CASES[name]
    config = {**config_of(known), "vocab_size": 96, **changes}
    if name.startswith("baichuan, 13B"):
        config["num_key_value_heads"] = 2
    return architecture, config


def written_folder(folder, config, values):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", values)
    return folder


def logits(model):
    return GraphModel(check_folder(model), model, backend("cpu", "float32")).logits((list(range(3, 23)), 0, [4, 9, 2]))
