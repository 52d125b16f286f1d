"""Models whose stored quantized values are multiplied directly: greedy tokens of the represented values."""

import json
import logging

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError
from llm_serving.lowering import parameters
from llm_serving.models.memory import weight_bytes
from llm_serving.models.weight_reader import check_folder
from llm_serving.network.quantization import Quantization
from support import gguf_files
from support.greedy_tokens import FAMILIES, greedy
from support.model_factories import TINY, random_weights, tiny_spec, write_safetensors
from support.quantized_folders import LAYOUTS, write_quantized

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ("compressed-tensors, W8A8", "w8a16"),
        ("compressed-tensors, W8A16", "w4a16"),
        ("compressed-tensors, W4A16, zeros", "w4a16"),
        ("AWQ, 4 bits", "w4a16"),
        ("GPTQ, 4 bits, act-order", "w8a16"),
        ("GPTQ, 4 bits, act-order", "w4a16"),
        ("compressed-tensors, W4A16, act-order", "w4a8"),
        ("AWQ, 4 bits", "w8a8"),
        ("GPTQ, 8 bits, zeros", "w4a8"),
        ("compressed-tensors, W8A16, zeros", "w8a16"),
    ],
)
def test_stored_quantized_values_generate_the_tokens_of_their_values(tmp_path, family, layout, kept):
    values = write_quantized(tmp_path / "quantised", LAYOUTS[layout], FAMILIES[family], seed=3)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(FAMILIES[family]))
    write_safetensors(plain / "model.safetensors", values)
    quantization = Quantization(QuantizationName(kept), group_size=32)
    assert greedy(tmp_path / "quantised", quantization) == greedy(plain)


@pytest.mark.parametrize(
    ("layout", "kept", "is_kept"),
    [
        ("GPTQ, 4 bits", "w4a16", True),
        ("GPTQ, 4 bits, act-order", "w4a16", False),
        ("compressed-tensors, W4A16, act-order", "w4a8", False),
        ("AWQ, 4 bits", "w8a8", False),
        ("compressed-tensors, W8A8", "w8a8", True),
        ("compressed-tensors, W8A8", "w4a8", True),
        ("GPTQ, 8 bits", "w4a16", True),
        ("compressed-tensors, W8A16, zeros", "w8a16", False),
        ("GPTQ, 8 bits, zeros", "w8a8", False),
    ],
)
def test_stored_weights_without_a_product_are_counted_in_the_model_dtype(tmp_path, caplog, layout, kept, is_kept):
    write_quantized(tmp_path, LAYOUTS[layout], TINY)
    quantization = Quantization(QuantizationName(kept), group_size=32)
    spec = check_folder(tmp_path)
    assert (weight_bytes(spec, 2, quantization) == spec.num_weight_elements * 2) == (not is_kept)
    with caplog.at_level(logging.WARNING, "llm_serving"):
        greedy(tmp_path, quantization)
    warnings = [each.getMessage() for each in caplog.records if "stored integers" in each.getMessage()]
    assert len(warnings) == (0 if is_kept else 1)
    assert is_kept or f"no {kept} product takes" in warnings[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_8_bits_in_a_4_bit_folder_are_multiplied_as_stored(tmp_path, caplog, family):
    eight = LAYOUTS["compressed-tensors, W8A16"]
    stacked = [f"self_attn.{each}_proj" for each in "qkv"]
    names = [f"model.layers.1.{each}.weight" for each in (*stacked, "mlp.down_proj")]
    layout = LAYOUTS["compressed-tensors, W4A16, zeros"]
    others = dict.fromkeys(names, eight)
    values = write_quantized(tmp_path / "quantised", layout, FAMILIES[family], seed=3, others=others)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(FAMILIES[family]))
    write_safetensors(plain / "model.safetensors", values)
    quantization = Quantization(QuantizationName.W4A16, group_size=32)
    with caplog.at_level(logging.WARNING, "llm_serving"):
        assert greedy(tmp_path / "quantised", quantization) == greedy(plain)
    assert "stored integers" not in caplog.text
    write_quantized(tmp_path / "in_4_bits", layout, FAMILIES[family])
    mixed, in_4_bits = (check_folder(tmp_path / each) for each in ("quantised", "in_4_bits"))
    more = weight_bytes(mixed, 2, quantization) - weight_bytes(in_4_bits, 2, quantization)
    assert more == sum(values[name].size // 2 - values[name].size // 32 * 4 + 4 * len(values[name]) for name in names)


def test_8_bit_blocks_of_a_gguf_file_are_rounded_to_4_bits(tmp_path, monkeypatch):
    gguf_files.write_model(tmp_path / "a.gguf", "llama", {**TINY, "hidden_size": 64, "intermediate_size": 96}, 8)
    bits_of_rounded, rounded = [], parameters.quantize

    def record(values, bits, *others):
        bits_of_rounded.append(bits)
        return rounded(values, bits, *others)

    monkeypatch.setattr(parameters, "quantize", record)
    greedy(tmp_path / "a.gguf", Quantization(QuantizationName.W4A16, group_size=32))
    assert bits_of_rounded.count(4) == 4 * TINY["num_hidden_layers"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantized_weights_are_counted_in_the_model_dtype(layout):
    spec = tiny_spec(quantization_config=LAYOUTS[layout].config)
    quantization = Quantization(QuantizationName.DEQUANTIZED)
    assert weight_bytes(spec, 2, quantization) == spec.num_weight_elements * 2


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_weights_are_refused_by_file_and_name(tmp_path, name, value):
    weights = random_weights(tiny_spec())
    weights[name].flat[-1] = value
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} must hold finite numbers only"):
        greedy(tmp_path)


@pytest.mark.parametrize("layer", [0, 1])
def test_non_finite_biases_of_keys_are_refused_with_and_without_a_rotary_embedding(tmp_path, layer):
    changes = {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": True, "no_rope_layer_interval": 2}
    weights = random_weights(tiny_spec(**changes))
    name = f"model.layers.{layer}.self_attn.k_proj.bias"
    weights[name][3] = np.nan
    (tmp_path / "config.json").write_text(json.dumps(TINY | changes))
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} must hold finite numbers only"):
        greedy(tmp_path)


@pytest.mark.parametrize("kept", ["w8a8", "w4a16"])
def test_weights_that_cannot_be_quantized_are_named(tmp_path, kept):
    weights = random_weights(tiny_spec())
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write_safetensors(tmp_path / "model.safetensors", weights)
    message = (
        r"model\.layers\.1\.mlp\.gate_proj\.weight, model\.layers\.1\.mlp\.up_proj\.weight: .* finite numbers only"
    )
    with pytest.raises(ModelError, match=message):
        greedy(tmp_path, Quantization(QuantizationName(kept), group_size=32))
