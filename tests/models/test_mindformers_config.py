from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from llm_serving.config.legacy import read_mindformers
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec

LLAMA = {
    "type": "LlamaConfig", "seq_length": 2048, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 200,
    "multiple_of": 16, "rms_norm_eps": "1.0e-5", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
QWEN3 = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "swiglu", "max_position_embeddings": 4096,
    "rms_norm_eps": "1.e-6", "rope_theta": 1000000.0, "attention_bias": False, "eos_token_id": 3, "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip
GLM4 = {
    "type": "ChatGLM2Config", "num_layers": 2, "padded_vocab_size": 200, "hidden_size": 64, "ffn_hidden_size": 96,
    "kv_channels": 16, "num_attention_heads": 4, "seq_length": 8192, "layernorm_epsilon": 1.5625e-07, "rope_ratio": 500,
    "rmsnorm": True, "add_bias_linear": False, "add_qkv_bias": True, "multi_query_attention": True,
    "multi_query_group_num": 2, "eos_token_id": [3, 4, 5], "pad_token_id": 3, "post_layer_norm": True,
}  # fmt: skip
LONGEST = {"ChatGLMModel": 8192, "Qwen3ForCausalLM": 4096, "Glm4ForCausalLM": 4096}
QWEN2 = {"qkv_has_bias": True, "n_kv_heads": 2, "intermediate_size": 96, "theta": 1000000.0}


@pytest.mark.parametrize(
    ("config", "network", "architecture"),
    [
        (LLAMA, "LlamaForCausalLM", "LlamaForCausalLM"),
        (LLAMA, "", "LlamaForCausalLM"),
        (LLAMA | QWEN2, "LlamaForCausalLM", "Qwen2ForCausalLM"),
        (LLAMA | QWEN2 | {"type": "Qwen2Config"}, "ParallelQwenForCausalLM", "Qwen2ForCausalLM"),
        (QWEN3, "", "Qwen3ForCausalLM"),
        ({**QWEN3, "type": "Qwen3Config", "architectures": None}, "", "Qwen3ForCausalLM"),
        (LLAMA | {"type": "InternLM2Config", "n_kv_heads": 2}, "InternLM2ForCausalLM", "InternLM2ForCausalLM"),
        (LLAMA, "InternLMForCausalLM", "LlamaForCausalLM"),
        (LLAMA, "Baichuan7BV2ForCausalLM", "BaichuanForCausalLM"),
        (LLAMA, "Baichuan13BV2ForCausalLM", "BaichuanForCausalLM"),
        (GLM4, "ChatGLM2ForConditionalGeneration", "ChatGLMModel"),
        (QWEN3 | {"architectures": ["Glm4ForCausalLM"], "attention_bias": True}, "", "Glm4ForCausalLM"),
    ],
)
def test_mindformers_config_maps_each_family(config: dict[str, Any], network: str, architecture: str) -> None:
    spec = ModelSpec.from_mindformers(config, network=network)
    assert spec.architecture == architecture
    assert (spec.vocab_size, len(spec.caches), spec.network.hidden) == (200, 2, 64)
    assert spec.max_position_embeddings == LONGEST.get(architecture, 2048)
    assert spec.num_parameters > 0


def test_mindformers_config_of_baichuan_13b_has_alibi() -> None:
    small, large = (ModelSpec.from_mindformers(LLAMA, network=f"Baichuan{size}BV2ForCausalLM") for size in (7, 13))
    assert small.network.rotaries and not large.network.rotaries


def test_mindformers_config_of_internlm_1_has_attention_biases() -> None:
    tensors = ModelSpec.from_mindformers(LLAMA, network="InternLMForCausalLM").tensors
    assert "model.layers.0.self_attn.o_proj.bias" in tensors


def test_mindformers_config_reads_the_network_class(tmp_path: Path) -> None:
    path = tmp_path / "predict.yaml"
    model = {"model_config": LLAMA, "arch": {"type": "Baichuan7BV2ForCausalLM"}}
    path.write_text(yaml.safe_dump({"model": model}))
    spec = read_mindformers(path).spec
    assert spec is not None and spec.architecture == "BaichuanForCausalLM"


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {
    "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 512, "mscale": 1.0,
    "mscale_all_dim": 0.8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "factor", "theta", "scaling", "longest"),
    [
        ("None", 4.0, 1e4, None, 2048),
        ("PI", 4.0, 1e4, {"rope_type": "linear", "factor": 4.0}, 512),
        ("linear", {"factor": 4.0}, 1e4, {"rope_type": "linear", "factor": 4.0}, 512),
        ("NTK", 4.0, 4e4, None, 2048),
        ("LLAMA3", LLAMA3, 1e4, {"rope_type": "llama3", **LLAMA3}, 2048),
        ("YARN", YARN, 1e4, {"rope_type": "yarn", **YARN}, 2048),
    ],
)
def test_mindformers_config_reads_rope_scaling(
    method: str, factor: object, theta: float, scaling: dict[str, Any] | None, longest: int
) -> None:
    config = LLAMA | {"extend_method": method, "scaling_factor": factor}
    spec = ModelSpec.from_mindformers(config, network="LlamaForCausalLM")
    scaled = {**spec.config, "rope_theta": theta, "rope_scaling": scaling}
    assert spec.network.rotaries == ModelSpec.from_hugging_face(scaled).network.rotaries
    assert spec.max_position_embeddings == longest  # the length that `factor` extends


@pytest.mark.parametrize(
    ("changes", "network", "message"),
    [
        ({"extend_method": "DYNAMIC_NTK"}, "", "`extend_method` must be None or PI or linear or NTK or YARN or LLAMA3"),
        ({"extend_method": "LLAMA3", "scaling_factor": 8.0}, "", "`scaling_factor` must be an object"),
        ({"extend_method": "PI", "scaling_factor": 0}, "", "`scaling_factor` must be a number from"),
        ({}, "DeepseekV3ForCausalLM", r"class must start with one of Baichuan, .*Given: 'DeepseekV3ForCausalLM'"),
        ({"type": "TelechatConfig"}, "", r"class must start with one of .*Given: 'TelechatConfig'"),
        ({"quantization_config": {"quant_method": "a8w4"}}, "", "a8w4"),
    ],
)
def test_mindformers_config_refuses_unsupported_networks(changes: dict[str, Any], network: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_mindformers(LLAMA | changes, network=network)


def test_mindformers_config_refuses_a_moe_section(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    content: dict[str, Any] = {"model": {"model_config": LLAMA}, "moe_config": {"expert_num": 1}}
    path.write_text(yaml.safe_dump(content))
    assert read_mindformers(path).spec is not None
    path.write_text(yaml.safe_dump(content | {"moe_config": {"expert_num": 8}}))
    with pytest.raises(ModelError, match=r"`moe_config.expert_num` must be 1: .* Given: 8"):
        read_mindformers(path)


@pytest.mark.parametrize(
    ("hidden", "changes", "intermediate"),
    [
        (4096, {}, 11008),
        (5120, {}, 13824),
        (8192, {"ffn_dim_multiplier": 1.3}, 28672),
        (8192, {"ffn_dim_multiplier": 1.3, "multiple_of": 4096}, 28672),
        (4096, {"ffn_dim_multiplier": 1.3, "multiple_of": 1024}, 14336),
    ],
)
def test_mindformers_config_uses_the_defaults_of_mindformers(
    hidden: int, changes: dict[str, Any], intermediate: int
) -> None:
    config = LLAMA | {"hidden_size": hidden, "num_heads": hidden // 128, "multiple_of": 256, "rms_norm_eps": None}
    spec = ModelSpec.from_mindformers(config | changes)
    assert (spec.config_value("intermediate_size"), spec.config_value("rms_norm_eps")) == (intermediate, 1e-5)
