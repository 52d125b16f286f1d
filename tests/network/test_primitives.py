"""What graphs of Cells refuse, and that a network is asked before it is built."""

import pytest
from families import models
from llm_serving.config import load_config
from llm_serving.core.choices import QuantizationName
from llm_serving.errors import ConfigError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.coded import Quantization
from llm_serving.network.primitives import lacking, lacking_in_cells, lacking_of_codes


@pytest.mark.parametrize(
    ("name", "primitives", "cells"),
    [
        ("llama3.1", None, None),
        ("mistral", "attention with a window of 64 tokens", None),
        ("gemma2", "attention with a window of 64 tokens", None),
        ("baichuan2-13b", "attention with slopes", None),
        ("deepseek-v2-lite", "products with a weight for each head", "products with a weight for each head"),
    ],
)
def test_what_each_graph_lacks(tmp_path, name, primitives, cells):
    models.write(name, tmp_path)
    network = ModelSpec.from_folder(tmp_path).network
    assert (lacking(network, 4096), lacking_in_cells(network)) == (primitives, cells)
    for kernels, lacks, have in (("primitives", primitives, "program and plain have"), ("plain", cells, "")):
        overrides = [f"device_config.kernels={kernels}", "model_config.model_dtype=bfloat16"]
        if lacks is None:
            load_config(None, overrides, tmp_path)
            continue
        with pytest.raises(ConfigError) as error:
            load_config(None, overrides, tmp_path)
        have = "program has" if cells else have
        rule = f"must name a model without {lacks} with device_config.kernels: {kernels} ({have} it)"
        assert rule in str(error.value)


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    models.write("mistral", tmp_path)
    assert lacking(ModelSpec.from_folder(tmp_path).network, 64) is None


@pytest.mark.parametrize(
    ("name", "kept", "lacks"),
    [
        ("llama3.1", "w8a8", None),
        ("llama3.1", "w4a16", "products of w4a16 weights"),
        ("qwen3-moe", "w8a8", "products of w8a8 experts"),
    ],
)
def test_which_weights_in_codes_primitives_multiply_by(tmp_path, name, kept, lacks):
    models.write(name, tmp_path)
    network = ModelSpec.from_folder(tmp_path).network
    assert lacking_of_codes(network, Quantization(QuantizationName(kept))) == lacks
    assert lacking_of_codes(network, None) is None
    overrides = [f"quant_config.quantization={kept}", "model_config.model_dtype=bfloat16"]
    for kernels in ("primitives", "plain"):
        given = [*overrides, f"device_config.kernels={kernels}"]
        if lacks is None and kernels == "primitives":
            assert load_config(None, given, tmp_path).quant.quantization == kept
            continue
        with pytest.raises(ConfigError, match=r"`quant_config\.quantization` must be .*program on a CPU has"):
            load_config(None, given, tmp_path)
