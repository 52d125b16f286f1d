"""Checks of `model_config.implementation: mindformers`."""

import json

import pytest
from families import models
from llm_serving.config import load_config
from llm_serving.errors import ConfigError

GIVEN = "model_config.implementation=mindformers"
LEGACY = "model_config.implementation=mindformers-legacy"


def test_implementation_defaults_to_native():
    assert load_config(None, []).model.implementation == "native"


@pytest.mark.parametrize("given", [GIVEN, LEGACY])
def test_mindformers_sets_kernels_to_primitives(given):
    assert load_config(None, [given]).device.kernels == "primitives"
    assert load_config(None, []).device.kernels == "auto"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "device_config.kernels=program",
            "`device_config.kernels` must be auto or primitives with model_config.impl",
        ),
        (
            "device_config.kernels=plain",
            "`device_config.kernels` must be auto or primitives with model_config.impleme",
        ),
        (
            "device_config.exactness=fast",
            "`device_config.exactness` must be exact with model_config.implementation: ",
        ),
        (
            "quant_config.quantization=w8a8",
            "`quant_config.quantization` must be null with model_config.implementatio",
        ),
        (
            "quant_config.kv_cache_dtype=int8",
            "`quant_config.kv_cache_dtype` must be auto with model_config.implementation: min",
        ),
        (
            "model_config.model_dtype=float32",
            "`model_config.model_dtype` must be bfloat16 or float16 with model_confi",
        ),
        (
            "model_config.mindir_path=.",
            "`model_config.mindir_path` must be null with model_config.implementation: min",
        ),
        (
            "model_config.implementation=torch",
            "`model_config.implementation` must be one of native, mindformers, mindformers-legacy",
        ),
    ],
)
def test_settings_that_mindformers_does_not_support_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, [GIVEN, change])
    assert message in str(error.value)


def test_model_without_a_mindformers_class_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["MistralForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}'
    )
    with pytest.raises(
        ConfigError,
        match="must be native for this model: MistralForCausalLM has",
    ):
        load_config(None, [GIVEN], tmp_path)


@pytest.mark.parametrize("device", ["CPU", "Ascend"])
def test_a_choice_of_experts_that_only_mindformers_computes_is_accepted(tmp_path, device):
    (tmp_path / "config.json").write_text(json.dumps(models.model("glm4-moe").config))
    settings = [f"device_config.device_target={device}", "model_config.model_dtype=float16"]
    load_config(None, [GIVEN, *settings], tmp_path)
    with pytest.raises(ConfigError, match="must name a model without experts chosen by a rule other than"):
        load_config(None, [*settings, "device_config.kernels=primitives"], tmp_path)


def test_latent_keys_of_mindformers_have_their_own_block_sizes_on_ascend(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(models.model("deepseek-v3-wide").config))
    settings = [GIVEN, "device_config.device_target=Ascend", "model_config.model_dtype=float16"]
    assert load_config(None, settings, tmp_path).pa.block_size == 32
    assert load_config(None, [*settings, "pa_config.block_size=128"], tmp_path).pa.block_size == 128
    with pytest.raises(ConfigError, match="must be at most 128 on Ascend with multi-head latent attention"):
        load_config(None, [*settings, "pa_config.block_size=256"], tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM is none of MindFormers' classes before 2"),
        ({"head_dim": 32}, "MindFormers' LlamaForCausalLM has heads that together are as wide as a row, 32"),
        ({"mlp_bias": True}, "MindFormers' LlamaForCausalLM has no parameter for model.layers.0.mlp.gate_proj.bias"),
    ],
)
def test_models_that_mindformers_legacy_does_not_support_are_refused(tmp_path, changes, message):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], **sizes, "num_attention_heads": 2, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        load_config(None, [LEGACY], tmp_path)
    assert f"must be native for this model: {message}" in str(error.value)
