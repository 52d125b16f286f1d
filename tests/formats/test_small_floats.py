"""Weights of gpt-oss in MXFP4: their values, and the refusal of damaged files."""

import numpy as np
import pytest
from families import models
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError
from llm_serving.formats.small_floats import quantized
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving.network.quantization import stored_qvalues
from llm_serving.network.weights import assemble_weight
from safetensors.numpy import load_file, save_file

MATRICES = ("gate_up_proj", "down_proj")
QUANTIZED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
RNG = np.random.default_rng(1)


def write(folder):
    """Write a small gpt-oss as published, with random matrices of experts. Return their parts by name."""
    models.write("gpt-oss", folder, dtype="float32", changes={**QUANTIZED, "intermediate_size": 64})
    tensors, parts = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith("gate_up_proj_bias"):
            tensors[name] = np.zeros((8, 128), np.float32)
        if name.endswith(MATRICES):
            out = 128 if "gate_up" in name else 64
            del tensors[name]
            parts[name] = RNG.integers(0, 256, (8, out, 2, 16), np.uint8), RNG.integers(118, 126, (8, out, 2), np.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = parts[name]
    save_file(tensors, folder / "model.safetensors")
    return parts


def test_mxfp4_values_are_e2m1_times_a_power_of_two():
    """The sixteen values, the lower half of a byte first, with the exponents -1 and 2."""
    blocks = (np.arange(0, 16, 2) + 16 * np.arange(1, 16, 2)).astype(np.uint8)
    found = quantized(np.tile(blocks, 4).reshape(1, 1, 2, 16), np.array([[[126, 129]]], np.uint8)).dequantized()
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.array([*magnitudes, *(-each for each in magnitudes)] * 2)
    np.testing.assert_array_equal(found, [[*(values / 2), *(values * 4)]])


def test_mxfp4_matrices_have_the_layout_of_the_unquantized_folder(tmp_path):
    parts = write(tmp_path)
    spec = check_folder(tmp_path)
    assert spec.scheme.description == "MXFP4, 4 bits"
    reader = WeightReader(tmp_path, spec.scheme)
    for name, (blocks, scales) in parts.items():
        found = reader.read(name, spec.tensors[name])
        values = quantized(blocks, scales).dequantized().reshape(*blocks.shape[:2], 64)
        np.testing.assert_array_equal(found, values.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blocks, scales: (blocks, None), "must have model.layers.0.mlp.experts.down_proj_blocks and "),
        (lambda blocks, scales: (blocks[..., :8], scales), r"blocks must be U8 \[experts, out, groups, 16\]"),
        (lambda blocks, scales: (blocks, scales[:, 1:]), "blocks must be U8 "),
        (lambda blocks, scales: (blocks, scales | 255), "exponents of scales must be at most 120. Found: 128"),
    ],
)
def test_mxfp4_damaged_weights_are_refused(tmp_path, change, message):
    write(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    given = zip(("_blocks", "_scales"), changed, strict=True)
    tensors |= {name + ending: np.ascontiguousarray(each) for ending, each in given if each is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        spec = check_folder(tmp_path)
        WeightReader(tmp_path, spec.scheme).read(name, spec.tensors[name])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_mxfp4_folder_refuses_other_tensors_of_integer_types(tmp_path, dtype):
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight must be .*, F32\. Found: "):
        check_folder(tmp_path)


def test_mxfp4_folder_refuses_a_matrix_stored_twice(tmp_path):
    write(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    save_file({**tensors, name: np.zeros((8, 64, 64), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {name} occurs twice: under this name, and as {name}_blocks"):
        check_folder(tmp_path)


def test_mxfp4_stored_values_are_used_by_w8a16(tmp_path):
    """The rows of gate and up alternate in the file."""
    write(tmp_path)
    spec = check_folder(tmp_path)
    reader = WeightReader(tmp_path, spec.scheme)
    experts = [each for each in spec.network.operations if each.kind == "experts"]
    for weight in (each.weights[role] for each in experts for role in ("gate_up", "down")):
        (name,), (shape,) = weight.names, weight.stored_shapes
        stored = stored_qvalues(weight, [reader.read_packed(name, shape)], QuantizationName.W8A16)
        np.testing.assert_array_equal(stored.dequantized(), assemble_weight(weight, [reader.read(name, shape)]))
        assert stored_qvalues(weight, [reader.read_packed(name, shape)], QuantizationName.W8A8) is None
