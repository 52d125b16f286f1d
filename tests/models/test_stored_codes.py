"""Models out of quantised folders whose very codes are multiplied: greedy tokens of the values they stand for."""

import json

import pytest
from greedy_tokens import FAMILIES, greedy
from llm_serving.core.choices import QuantizationName
from llm_serving.network.coded import Quantization
from model_factories import write_safetensors
from quantized_folders import LAYOUTS, write_quantized

pytestmark = pytest.mark.mindspore


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ("compressed-tensors, W8A8", "w8a16"),
        ("compressed-tensors, W4A16, zeros", "w4a16"),
        ("AWQ, 4 bits", "w4a16"),
        ("GPTQ, 4 bits, act-order", "w8a16"),
    ],
)
def test_tokens_are_those_of_the_values(tmp_path, family, layout, kept):
    values = write_quantized(tmp_path / "quantised", LAYOUTS[layout], FAMILIES[family], seed=3)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(FAMILIES[family]))
    write_safetensors(plain / "model.safetensors", values)
    quantization = Quantization(QuantizationName(kept), group_size=32)
    assert greedy(tmp_path / "quantised", quantization) == greedy(plain)
