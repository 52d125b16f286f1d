"""Mixtures of experts in every quantization."""

import json

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.models.spec import ModelSpec
from llm_serving.network.quantization import Quantization
from support.family_configs import RandomTensors, config_of
from support.graph_model import GraphModel, backend
from support.model_factories import write_safetensors

pytestmark = pytest.mark.mindspore

MIXTURES = {
    "mixtral": {"num_experts_per_tok": 4, "intermediate_size": 64},
    "qwen2, experts": {"num_experts_per_tok": 5, "moe_intermediate_size": 64},
    "deepseek2": {"num_experts_per_tok": 6, "moe_intermediate_size": 64},
}
"""Changes by name in `family_configs.CONFIGS`. Rows choose all experts, so that rounding cannot change which."""
BOUNDS = {"w8a8": 0.1, "w8a16": 0.1, "w4a16": 0.7, "w4a8": 0.7}
"""Standard deviation of the difference of logits, divided by that of logits; groups have 32 inputs."""


@pytest.mark.parametrize("name", MIXTURES)
def test_quantized_experts_give_nearly_the_logits_of_their_values(tmp_path, name):
    config = {**config_of(name), **MIXTURES[name]}
    spec = ModelSpec.from_hugging_face(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {tensor: RandomTensors().read(tensor, shape) for tensor, shape in spec.tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", values)

    def logits(quantization=None):
        model = GraphModel(spec, tmp_path, backend("cpu", "float32"), quantization=quantization)
        return model.logits((list(range(3, 23)), 0, [4, 9, 2]))

    expected = logits()
    errors = {
        scheme: np.std(logits(Quantization(QuantizationName(scheme), 32)) - expected) / np.std(expected)
        for scheme in BOUNDS
    }
    assert all(errors[scheme] < bound for scheme, bound in BOUNDS.items()), errors
