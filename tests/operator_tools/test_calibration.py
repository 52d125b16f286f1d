"""`llm-serving quantize --calibrate`: the matrices that change results most have 8 bits, the others 4."""

import json
import logging
import re

import numpy as np
import pytest
from llm_serving.cli.main import main
from llm_serving.core.enums import QuantizationName
from llm_serving.formats.packed import unquantized
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.models.memory import weight_bytes
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving.network.operations import Weight
from llm_serving.network.quantization import Quantization
from llm_serving_tools.mixed_bits import choose_8_bits
from support.greedy_tokens import greedy
from support.model_factories import random_weights, tiny_spec, write_safetensors
from support.quantized_folders import is_quantized
from support.tokenizer_files import byte_level_folder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 512}
SHAPES = {"narrow": (32, 64), "wide": (64, 64), "other": (64, 64)}
TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i % 89} lazy dogs, naïve café\n" for i in range(400))
QUANTIZATION = Quantization(QuantizationName.W4A16, group_size=32)


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


def write_source(folder, factors=None, **changes):
    """Write a tiny model. `factors`: name of a weight -> factor of its values."""
    spec = tiny_spec(**{**SIZES, **changes})
    weights = random_weights(spec)
    for name, factor in (factors or {}).items():
        weights[name] = weights[name] * np.float32(factor)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", weights)
    byte_level_folder(folder)
    (folder / "config.json").write_text(json.dumps(spec.config))
    (folder.parent / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def run(source, target, *arguments):
    text = ("--calibrate", str(source.parent / "text.txt"))
    return main(["quantize", str(source), str(target), *text, *arguments])


def values_of(folder):
    spec = check_folder(folder)
    reader = WeightReader(folder, spec.scheme)
    return {name: reader.read_packed(name, shape) for name, shape in spec.tensors.items()}


def names_in_8_bits(values):
    return [name for name, value in values.items() if isinstance(value, QuantizedTensor) and value.bits == 8]


@pytest.mark.mindspore
@pytest.mark.parametrize(("mean_bits", "counts"), [(4.5, [0]), (5.5, range(1, 14)), (9, [14])])
def test_calibrated_folder_is_served_with_its_own_values(source, tmp_path, caplog, mean_bits, counts):
    assert run(source, tmp_path / "out", "--format", "w4a16", "--mean-bits", str(mean_bits)) == 0
    values = values_of(tmp_path / "out")
    quantized = {each: value for each, value in values.items() if isinstance(value, QuantizedTensor)}
    assert {each for each in values if is_quantized(each)} == set(quantized)
    in_8_bits, in_4_bits = names_in_8_bits(values), [each for each in quantized.values() if each.bits == 4]
    assert len(in_8_bits) in counts
    num_bits = sum(each.qvalues.size * each.bits + 8 * each.scales.nbytes for each in quantized.values()) - 16 * sum(
        each.scales.size for each in in_4_bits
    )
    assert num_bits <= mean_bits * sum(each.qvalues.size for each in quantized.values())
    original = values_of(source)
    for name, value in quantized.items():
        error = np.square(unquantized(value, value.shape) - original[name]).sum() / np.square(original[name]).sum()
        assert error < (1e-4 if name in in_8_bits else 1e-2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = config["config_groups"].get("group_1", {"targets": []})["targets"]
    assert sorted(targets) == sorted(each.removesuffix(".weight") for each in in_8_bits)
    more = sum(
        quantized[each].qvalues.size * 3 // 8 + 4 * len(quantized[each].scales) for each in in_8_bits
    )  # 4 bits more, and one scale of 32 bits for each row instead of each 32 columns
    expected = weight_bytes(tiny_spec(**SIZES), 2, QUANTIZATION) + more
    assert weight_bytes(check_folder(tmp_path / "out"), 2, QUANTIZATION) == expected
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((source / "config.json").read_text())
    exact = {each: unquantized(value, value.shape) if each in quantized else value for each, value in values.items()}
    write_safetensors(plain / "model.safetensors", {each: np.asarray(value) for each, value in exact.items()})
    with caplog.at_level(logging.WARNING, "llm_serving"):
        served = greedy(tmp_path / "out", QUANTIZATION)
    assert "stored integers" not in caplog.text
    assert served == greedy(plain) == greedy(tmp_path / "out")


@pytest.mark.mindspore
def test_matrix_that_changes_results_most_has_8_bits(tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    source = write_source(tmp_path / "source", {name: 30})
    assert run(source, tmp_path / "out", "--format", "w4a16", "--mean-bits", "5") == 0
    assert name in names_in_8_bits(values_of(tmp_path / "out"))


def test_8_bits_are_given_for_the_largest_change_per_bit_within_the_mean():
    narrow, wide, other = (Weight((each,), shape, (shape,)) for each, shape in SHAPES.items())
    changes = {wide: 0.3, narrow: 0.2, other: 0.1}
    assert choose_8_bits(changes, 32, 4.5) == []
    assert choose_8_bits(changes, 32, 6.5) == [narrow]  # the wide matrix does not fit
    assert choose_8_bits(changes, 32, 7.2) == [narrow, wide]
    assert choose_8_bits(changes, 32, 9) == [narrow, wide, other]


@pytest.mark.mindspore
def test_gemma_with_windows_and_caps_is_calibrated(tmp_path):
    changes = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8, "attn_logit_softcapping": 5.0}
    source = write_source(
        tmp_path / "source", **changes, query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh"
    )
    assert run(source, tmp_path / "out", "--format", "w4a16") == 0
    assert sum(isinstance(each, QuantizedTensor) for each in values_of(tmp_path / "out").values()) == 14


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["--format", "w8a16"], TEXT, "--calibrate requires --format w4a16. Given: w8a16"),
        (["--format", "w4a16", "--mean-bits", "4.4"], TEXT, "--mean-bits must be at least 4.5.* Given: 4.4"),
        (["--format", "w4a16"], "short", "the text of --calibrate must have at least .* tokens. Given: 4"),
        (["--format", "w4a16"], b"\xff", "must be a text file in UTF-8"),
        (["--format", "w4a16", "--group-size", "96"], TEXT, "has 128. Given: 96"),
    ],
)
def test_calibration_is_refused_before_writing(source, tmp_path, capsys, arguments, text, message):
    (tmp_path / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert run(source, tmp_path / "out", *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path, capsys):
    source = write_source(tmp_path / "source", vocab_size=128)
    assert run(source, tmp_path / "out", "--format", "w4a16") == 2
    assert re.search(r"source: the tokenizer gives id \d+, but the model has 128 embeddings", capsys.readouterr().err)


def test_mean_bits_without_a_text_are_refused(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "out"), "--format", "w4a16", "--mean-bits", "5"]) == 2
    assert "--mean-bits requires --calibrate. Given: 5" in capsys.readouterr().err


def test_matrices_that_cannot_be_rotated_are_refused(tmp_path, capsys):
    source = write_source(tmp_path / "source", intermediate_size=96)
    assert run(source, tmp_path / "out", "--format", "w4a16") == 2
    assert re.search(r"requires a multiple of 128 columns .*down_proj\.weight has 96", capsys.readouterr().err)


@pytest.mark.mindspore
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_models_whose_results_are_not_finite_are_not_calibrated(tmp_path, capsys):
    source = write_source(
        tmp_path / "source", {f"model.layers.0.mlp.{name}_proj.weight": 1e30 for name in ("up", "gate")}
    )
    assert run(source, tmp_path / "out", "--format", "w4a16") == 2
    assert "last hidden states of the text must be finite" in capsys.readouterr().err


@pytest.mark.mindspore
def test_models_with_experts_are_not_calibrated(tmp_path, capsys):
    changes = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    source = write_source(tmp_path / "source", **changes)
    assert run(source, tmp_path / "out", "--format", "w4a16") == 2
    assert "--calibrate does not support experts" in capsys.readouterr().err
