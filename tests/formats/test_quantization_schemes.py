"""Quantized folders: each layout gives the values of its definition, and unsupported ones are refused by name."""

import json

import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats.compressed_tensors import ROTATION
from llm_serving.formats.quantization_schemes import scheme_of
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.small_floats import Fp8
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving_tools.quantized_parts import quantize_w8
from support.model_factories import TINY, write_safetensors
from support.quantized_folders import LAYOUTS, compressed, fp8_numbers, gptq, int_quantized, of_gptq, write_quantized

PROJECTION = "model.layers.0.mlp.down_proj.weight"  # of 96 columns


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_schemes_dequantize_to_their_definition(tmp_path, layout):
    values = write_quantized(tmp_path, layout, TINY)
    spec = check_folder(tmp_path)
    reader = WeightReader(tmp_path, spec.scheme)
    for name, shape in spec.tensors.items():
        assert np.array_equal(reader.read(name, shape), values[name]), name
    reader.check_all_read()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compressed-tensors, W8A8", (8, 96, False, False)),
        ("compressed-tensors, W8A16", (8, 96, False, False)),
        ("compressed-tensors, W4A16", (4, 32, False, False)),
        ("compressed-tensors, W4A16, zeros", (4, 32, True, False)),
        ("compressed-tensors, W4A16, act-order", (4, 32, False, True)),
        ("GPTQ, 4 bits", (4, 32, True, False)),
        ("GPTQ, 4 bits, symmetric", (4, 32, False, False)),
        ("GPTQ, 4 bits, act-order", (4, 32, True, True)),
        ("GPTQ, 8 bits", (8, 96, False, False)),
        ("AWQ, 4 bits", (4, 32, True, False)),
        ("GPTQ, 8 bits, zeros", (8, 96, True, False)),
        ("compressed-tensors, W8A16, zeros", (8, 96, True, False)),
    ],
)
def test_schemes_return_stored_quantized_values(tmp_path, name, expected):
    write_quantized(tmp_path, LAYOUTS[name], TINY)
    spec = check_folder(tmp_path)
    found = WeightReader(tmp_path, spec.scheme).read_packed(PROJECTION, (64, 96))
    assert isinstance(found, QuantizedTensor)
    assert (found.bits, found.group_size, found.zeros is not None, found.g_idx is not None) == expected
    assert isinstance(WeightReader(tmp_path, spec.scheme).read_packed("model.norm.weight", (64,)), np.ndarray)


NO_NUMBERS = (127, 255)
"""Encodings of NaN in e4m3."""


def write_fp8(folder, bits, scale):
    write_safetensors(folder / "model.safetensors", {"a.weight": bits, "a.weight_scale": np.array([scale], np.float32)})
    return WeightReader(folder, Fp8("FP8"))


def test_fp8_table_holds_all_e4m3_values(tmp_path):
    bits = np.delete(np.arange(256, dtype=np.uint8), NO_NUMBERS).reshape(2, 127)
    found = write_fp8(tmp_path, bits, 2).read("a.weight", (2, 127))
    np.testing.assert_array_equal(found, 2 * fp8_numbers()[bits])
    assert found.max() == 896


@pytest.mark.parametrize("code", NO_NUMBERS)
def test_fp8_nan_is_refused_by_weight(tmp_path, code):
    bits = np.full((16, 16), 56, np.uint8)
    bits[5, 3] = code
    with pytest.raises(ModelError, match=r"model\.safetensors: a\.weight: .* give finite numbers\. Found: nan"):
        write_fp8(tmp_path, bits, 1).read("a.weight", (16, 16))


def scaled(scale):
    return lambda parts: {**parts, **{key: np.full_like(parts[key], scale) for key in parts if "scale" in key}}


@pytest.mark.parametrize("scale", [-3e38, 3e38])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith(("GPTQ", "AWQ"))])
def test_schemes_refuse_scales_with_infinite_values(tmp_path, layout, scale):
    scheme = check_folder_of(tmp_path, LAYOUTS[layout], scaled(scale))
    with pytest.raises(ModelError, match=rf"model\.safetensors: {PROJECTION}: .* give finite numbers\. Found: -?inf"):
        WeightReader(tmp_path, scheme).read_packed(PROJECTION, (64, 96))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scale", [-1.0, 0.0, 6e-8])
def test_schemes_accept_negative_and_zero_scales(tmp_path, layout, scale):
    """Tools write scale 0 for rows of zeros; some give a scale the sign of the largest element."""
    scheme = check_folder_of(tmp_path, layout, scaled(scale))
    found = WeightReader(tmp_path, scheme).read(PROJECTION, (64, 96))
    ones = WeightReader(tmp_path, check_folder_of(tmp_path, layout, scaled(1.0)))
    with np.errstate(under="ignore"):
        np.testing.assert_allclose(found, ones.read(PROJECTION, (64, 96)) * np.float32(scale), rtol=0.01)


@pytest.mark.parametrize(("group_size", "in_order"), [(-1, True), (32, False)])
def test_act_order_without_groups_keeps_the_columns_in_order(group_size, in_order):
    """With one group per row, act-order has no effect, so the columns are in order."""
    given = of_gptq(group_size=group_size, desc_act=True)
    assert scheme_of({"quantization_config": given}, "config.json").form.in_order == in_order


def test_schemes_refuse_8_bit_zeros_with_infinite_values(tmp_path):
    parts, _ = gptq(quantize_w8(np.ones((8, 32), np.float32)))
    parts |= {"qzeros": parts["qzeros"] + 1, "scales": np.full((1, 8), 3e38, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", {f"a.{ending}": each for ending, each in parts.items()})
    reader = WeightReader(tmp_path, scheme_of({"quantization_config": of_gptq(bits=8, group_size=-1)}, "config.json"))
    with pytest.raises(
        ModelError, match=r"a\.weight: quantized values and scales must give finite numbers\. Found: -?inf"
    ):
        reader.read_packed("a.weight", (8, 32))


def test_schemes_dequantize_8_bits_with_asymmetric_zeros(tmp_path):
    tensor = quantize_w8(np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32))
    parts, values = gptq(tensor)
    parts["qzeros"] = parts["qzeros"] + 1  # zeros of the first of every four rows
    write_safetensors(tmp_path / "model.safetensors", {f"a.{ending}": each for ending, each in parts.items()})
    reader = WeightReader(tmp_path, scheme_of({"quantization_config": of_gptq(bits=8, group_size=-1)}, "config.json"))
    found = reader.read("a.weight", (8, 32))
    scales = tensor.scales.astype(np.float16).astype(np.float32)
    expected = values - np.where(np.arange(8) % 4 == 0, scales[:, 0], 0)[:, None]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_compressed_tensors_reads_one_scale_and_int8_zeros(tmp_path):
    qvalues = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    parts = {"a.weight": qvalues, "a.weight_scale": np.array([0.5], np.float32)}
    write_safetensors(tmp_path / "model.safetensors", parts)
    scheme = scheme_of({"quantization_config": compressed("int-quantized", num_bits=8)}, "config.json")
    assert np.array_equal(WeightReader(tmp_path, scheme).read("a.weight", (4, 4)), qvalues * np.float32(0.5))
    parts |= {"a.weight_zero_point": np.array([2], np.int8), "a.input_scale": np.ones(1, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", parts)
    assert np.array_equal(WeightReader(tmp_path, scheme).read("a.weight", (4, 4)), (qvalues - 2) * np.float32(0.5))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scale", [np.nan, -np.inf])
def test_schemes_refuse_nan_scales(tmp_path, layout, scale):
    parts, _ = layout.write(np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32))
    for ending in parts:
        if "scale" in ending:
            parts[ending].flat[-1] = scale
    write_safetensors(tmp_path / "model.safetensors", {f"a.{ending}": each for ending, each in parts.items()})
    reader = WeightReader(tmp_path, scheme_of({"quantization_config": layout.config}, "config.json"))
    with pytest.raises(ModelError, match=rf"model\.safetensors: a\.weight: scales must be finite .* Found: {scale}"):
        reader.read_packed("a.weight", (64, 96))


def test_schemes_refuse_a_weight_without_columns(tmp_path):
    parts, _ = gptq(quantize_w8(np.ones((8, 32), np.float32)))
    parts["qweight"] = parts["qweight"][:0]
    write_safetensors(tmp_path / "model.safetensors", {f"a.{ending}": each for ending, each in parts.items()})
    scheme = scheme_of({"quantization_config": of_gptq(bits=8, group_size=-1)}, "config.json")
    with pytest.raises(ModelError, match=r"a\.weight: scales must have shape \[0, 8\] by its other parts"):
        WeightReader(tmp_path, scheme)


def test_compressed_tensors_refuses_values_beyond_its_bits(tmp_path):
    parts = {"a.weight": np.full((2, 32), 8, np.int8), "a.weight_scale": np.ones((2, 1), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", parts)
    scheme = scheme_of({"quantization_config": compressed("int-quantized", num_bits=4)}, "config.json")
    with pytest.raises(ModelError, match=r"weight must hold values from -8 to 7"):
        WeightReader(tmp_path, scheme).read("a.weight", (2, 32))


def test_weight_reader_accepts_zero_biases_only(tmp_path):
    write_quantized(tmp_path, LAYOUTS["GPTQ, 4 bits"], TINY)
    stored = WeightReader(tmp_path, check_folder(tmp_path).scheme)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    bias = {"model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float16)}
    write_safetensors(tmp_path / "model-2.safetensors", bias)
    spec = check_folder(tmp_path)
    reader = WeightReader(tmp_path, spec.scheme)
    for name, shape in spec.tensors.items():
        reader.read(name, shape)
    reader.check_all_read()
    assert len(reader.shapes()) == len(stored.shapes()) + 1
    write_safetensors(tmp_path / "model-2.safetensors", {name: each + 1 for name, each in bias.items()})
    with pytest.raises(ModelError, match=r"unexpected: 1: model\.layers\.1\.self_attn\.q_proj\.bias"):
        check_folder(tmp_path)


def without(ending):
    return lambda parts: {name: each for name, each in parts.items() if name != ending}


def cut(ending):
    return lambda parts: {**parts, ending: parts[ending][:-1]}


def other(ending, dtype):
    return lambda parts: {**parts, ending: parts[ending].astype(dtype)}


def zeros_like_scales(dtype):
    """Return as many zeros as scales, all different."""
    return lambda parts: {**parts, "weight_zero_point": np.zeros(parts["weight_scale"].shape, dtype)}


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("GPTQ, 4 bits", without("scales"), "has g_idx, qweight, qzeros, but must also have scales"),
        ("GPTQ, 4 bits", without("qweight"), "must also have qweight"),
        ("GPTQ, 4 bits", without("qzeros"), "must also have qzeros"),
        ("GPTQ, 4 bits", cut("scales"), r"scales must have shape \[3, 64\] by its other parts. Found: \[2, 64\]"),
        ("GPTQ, 4 bits", cut("qzeros"), r"qzeros must have shape \[3, 8\]"),
        ("GPTQ, 4 bits", cut("g_idx"), r"g_idx must have shape \[96\]"),
        ("GPTQ, 4 bits", other("qweight", np.float32), "qweight must be I32 with 2 dimensions. Found: F32"),
        ("GPTQ, 4 bits", other("scales", np.int32), "scales must be BF16 or F16 or F32 with 2 dimensions. Found: I32"),
        ("AWQ, 4 bits", cut("scales"), r"scales must have shape \[3, 64\]"),
        ("AWQ, 4 bits", without("qzeros"), "must also have qzeros"),
        ("compressed-tensors, W8A8", without("weight_scale"), "must also have weight_scale"),
        ("compressed-tensors, W8A8", cut("weight_scale"), "one per row or one per group"),
        ("compressed-tensors, W4A16", cut("weight_packed"), r"weight_packed must hold \[.*\] values of 4 or 8 bits"),
        ("compressed-tensors, W4A16", cut("weight_shape"), r"weight_shape must have shape \[2\]"),
        ("compressed-tensors, W4A16, zeros", cut("weight_zero_point"), r"weight_zero_point must have shape \[8, 3\]"),
        (
            "compressed-tensors, W4A16, zeros",
            zeros_like_scales(np.int32),
            r"weight_zero_point must have shape \[8, 3\]",
        ),
        ("compressed-tensors, W4A16, zeros", zeros_like_scales(np.float32), "must be I8 with 2 dimensions. Found: F32"),
        ("compressed-tensors, W4A16, act-order", cut("weight_g_idx"), r"weight_g_idx must have shape \[96\]"),
        ("FP8, a scale for a block", cut("weight_scale_inv"), r"block of \[24, 40\] in \[64, 96\]"),
        ("FP8, a scale for a block", without("weight_scale_inv"), "must also have weight_scale_inv"),
        ("FP8, a scale for all", other("weight", np.int8), "weight must be F8_E4M3"),
    ],
)
def test_schemes_refuse_mismatched_parts_before_reading(tmp_path, layout, change, message):
    spec = check_folder_of(tmp_path, LAYOUTS[layout], change)
    with pytest.raises(ModelError, match=f"model.safetensors: {PROJECTION}: .*{message}|{PROJECTION} .*{message}"):
        WeightReader(tmp_path, spec)


def check_folder_of(folder, layout, change):
    """Return the scheme of a folder with one projection whose parts are changed."""
    parts, _ = layout.write(np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32))
    name = PROJECTION.removesuffix("weight")
    write_safetensors(folder / "model.safetensors", {f"{name}{key}": each for key, each in change(parts).items()})
    return scheme_of({"quantization_config": layout.config}, "config.json")


def test_schemes_refuse_groups_out_of_range(tmp_path):
    wrong = lambda parts: {**parts, "g_idx": parts["g_idx"] + 1}  # noqa: E731
    scheme = check_folder_of(tmp_path, LAYOUTS["GPTQ, 4 bits"], wrong)
    with pytest.raises(ModelError, match=rf"{PROJECTION}: g_idx must have groups from 0 to 2"):
        WeightReader(tmp_path, scheme).read(PROJECTION, (64, 96))


def test_schemes_refuse_a_weight_stored_twice(tmp_path):
    both = lambda parts: {**parts, "weight": np.zeros((64, 96), np.float32)}  # noqa: E731
    scheme = check_folder_of(tmp_path, LAYOUTS["GPTQ, 4 bits"], both)
    with pytest.raises(ModelError, match="occurs twice: under this name, and as g_idx, qweight, qzeros, scales"):
        WeightReader(tmp_path, scheme)


@pytest.mark.parametrize(("layout", "dtype"), [("W8A8", "I8"), ("W4A8", "I8"), ("FP8", "F8_E4M3")])
def test_rotated_weights_must_be_packed(tmp_path, layout, dtype):
    given = LAYOUTS[f"compressed-tensors, {layout}"]
    write_quantized(tmp_path, given._replace(config={**given.config, "transform_config": ROTATION}), TINY)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .* must be stored as weight_packed, .* Found: {dtype}"):
        check_folder(tmp_path)


def test_schemes_refuse_other_tensors_of_packed_types(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a.table": np.zeros(3, np.int32)})
    with pytest.raises(ModelError, match=r"tensor a\.table must be BF16, F16, F32. Found: I32"):
        WeightReader(tmp_path, scheme_of({"quantization_config": of_gptq()}, "config.json"))
    parts, _ = int_quantized(quantize_w8(np.ones((4, 4), np.float32)))
    write_safetensors(tmp_path / "model.safetensors", {f"a.{ending}": each for ending, each in parts.items()})
    with pytest.raises(ModelError, match=r"tensor a\.weight must be BF16, F16, F32. Found: 'I8'"):
        WeightReader(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (of_gptq(bits=3), "GPTQ, 3 bits, groups of 32, .* must have `bits` 4 or 8. Given: 3"),
        (of_gptq(bits=True), "must have `bits` 4 or 8. Given: True"),
        (of_gptq(group_size=0), "must have a `group_size` from 1 to 1048576, or -1. Given: 0"),
        (of_gptq(group_size="x"), "must have a `group_size`"),
        (of_gptq(checkpoint_format="marlin"), "must have a `checkpoint_format` of gptq or gptq_v2. Given: 'marlin'"),
        (of_gptq(dynamic={"+:a": {"bits": 8}}), "must not have `dynamic`"),
        ({"quant_method": "awq", "w_bit": 8}, "must have `w_bit` 4. Given: 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "must have a `version` of gemm. Given: 'gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "must have a `fmt` of e4m3"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "must have blocks of two dimensions, both integers. Given",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "must have a block of two dimensions from 1"),
        (compressed("marlin-24", num_bits=4), "must have a `format` of int-quantized, .* Given: 'marlin-24'"),
        (
            compressed("pack-quantized", num_bits=2),
            r"have weights of 4-bit or 8-bit integers or 8-bit floating point. Given: \('int'",
        ),
        (compressed("float-quantized", num_bits=4, type="float"), "must have weights of 4-bit"),
        ({**compressed("int-quantized", num_bits=8), "format": ["x"]}, r"must have a `format` of .* Given: \['x'\]"),
        ({**compressed("int-quantized", num_bits=8), "sparsity_config": {"format": "x"}}, "must not have `sparsity_"),
        ({**compressed("pack-quantized", num_bits=4), "sparsity_config": ROTATION}, "must not have `sparsity_config`"),
        ({**compressed("int-quantized", num_bits=8), "transform_config": {"u": 1}}, "must not have `transform_config`"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt, .* must have a `quant_algo` of FP8 .*NVFP4"),
        ({"quant_method": "modelopt", "quantization": []}, "must have a `quant_algo` of FP8 or .* Given: None"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "bitsandbytes, 4 bits, .* an unsupported `quant_method`. Given: 'bitsandb",
        ),
        ({"quant_method": "newest"}, "'newest', which cannot be served"),
        ({}, "an unnamed method, .* an unsupported `quant_method`. Given: None"),
        ("gptq", "'gptq', which cannot be served"),
        ([], r"\[\], which cannot be served"),
    ],
)
def test_scheme_of_lists_the_supported_schemes(given, message):
    with pytest.raises(ModelError, match=rf"^config.json: the weights are quantised by .*{message}") as caught:
        scheme_of({"quantization_config": json.loads(json.dumps(given))}, "config.json")
    assert "Supported: compressed-tensors (W8A8, W8A16, W4A16, W4A8, FP8), GPTQ of 4" in str(caught.value)


def test_scheme_of_returns_none_for_unquantized_folders():
    assert scheme_of({}, "config.json") is None
    assert scheme_of({"quantization_config": None}, "config.json") is None


@pytest.mark.parametrize(
    ("inputs", "bits"),
    [
        ({"num_bits": 8, "type": "int", "dynamic": True}, 8),
        (None, None),
        ({"num_bits": 4}, None),
        ({"num_bits": [8]}, None),
        ("x", None),
    ],
)
def test_scheme_of_reads_activation_bits(inputs, bits):
    given = compressed("int-quantized", num_bits=8)
    given["config_groups"]["group_0"]["input_activations"] = inputs
    assert scheme_of({"quantization_config": given}, "config.json").activation_bits == bits
