"""Models from quantized folders: greedy tokens of a float32 model with the represented values."""

import json

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving.network.quantization import Quantization
from support.gguf_files import write_model
from support.greedy_tokens import FAMILIES, greedy
from support.model_factories import TINY, write_safetensors
from support.quantized_folders import LAYOUTS, write_quantized

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout",
    [
        "compressed-tensors, W8A8",
        "compressed-tensors, W4A16, zeros",
        "GPTQ, 4 bits, act-order",
        "AWQ, 4 bits",
        "FP8, a scale for a block",
    ],
)
def test_quantized_model_generates_the_tokens_of_its_values(tmp_path, family, layout):
    config = FAMILIES[family]
    values = write_quantized(tmp_path / "quantised", LAYOUTS[layout], config, seed=3)
    assert greedy(tmp_path / "quantised") == greedy(plain_folder(tmp_path, config, values))


@pytest.mark.parametrize("quantization", [None, Quantization(QuantizationName.DEQUANTIZED)], ids=["blocks", "values"])
@pytest.mark.parametrize(("family", "kind"), [("llama", 8), ("llama", 2), ("llama", 20), ("qwen2", 8), ("qwen2", 6)])
def test_gguf_model_generates_the_tokens_of_its_values(tmp_path, family, kind, quantization):
    config = FAMILIES[family] | {"vocab_size": 96}
    values = write_model(tmp_path / "a.gguf", family, config, kind, seed=3)
    tokens = greedy(tmp_path / "a.gguf", quantization)
    assert tokens == greedy(plain_folder(tmp_path, config, values))
    assert len(set(tokens)) > 1


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("GPTQ, 4 bits", "quantize_config.json"),
        ("AWQ, 4 bits", "quant_config.json"),
        ("FP8 of ModelOpt", "hf_quant_config.json"),
    ],
)
def test_quantization_config_of_older_tools_is_a_separate_file(tmp_path, layout, name):
    values = write_quantized(tmp_path, LAYOUTS[layout], TINY)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(own))
    spec = check_folder(tmp_path)
    projection = "model.layers.0.mlp.up_proj.weight"
    found = WeightReader(tmp_path, spec.scheme).read(projection, spec.tensors[projection])
    assert np.array_equal(found, values[projection])
    (tmp_path / name).write_text("[]")
    with pytest.raises(ModelError, match=f"{name}: must be a JSON object"):
        check_folder(tmp_path)


def test_quantization_config_by_the_older_key_of_compressed_tensors(tmp_path):
    values = write_quantized(tmp_path, LAYOUTS["compressed-tensors, W8A8"], TINY)
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = check_folder(tmp_path)
    assert spec.scheme.description == "compressed-tensors, 8 bits"
    projection = "model.layers.0.mlp.up_proj.weight"
    found = WeightReader(tmp_path, spec.scheme).read(projection, spec.tensors[projection])
    assert np.array_equal(found, values[projection])


def plain_folder(tmp_path, config, values):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    write_safetensors(plain / "model.safetensors", values)
    return plain
