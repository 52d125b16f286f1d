"""Mixtures of experts whose weights stay in the blocks of a GGUF file."""

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.models.weight_reader import WeightReader, check_folder
from llm_serving.network.quantization import Quantization, block_weights, stored_blocks
from support.family_configs import config_of
from support.gguf_families import write_family
from support.graph_model import GraphModel, backend

Q4_0 = 2
MIXTURES = {
    "mixtral": ("llama", {"num_experts_per_tok": 4}),
    "qwen2, experts": ("qwen2moe", {"num_experts_per_tok": 5, "moe_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3, experts": ("qwen3moe", {"num_experts_per_tok": 5, "moe_intermediate_size": 64}),
    "deepseek2": ("deepseek2", {"num_experts_per_tok": 6, "moe_intermediate_size": 64}),
}
"""(architecture, changes) by name in `family_configs.CONFIGS`. Rows choose all experts, so that rounding cannot change
which."""


def write_mixture(path, name):
    architecture, changes = MIXTURES[name]
    write_family(path, architecture, {**config_of(name), "vocab_size": 96, **changes}, Q4_0)
    return check_folder(path)


@pytest.mark.parametrize("name", MIXTURES)
def test_gguf_expert_matrices_stay_in_blocks(tmp_path, name):
    spec = write_mixture(tmp_path / "a.gguf", name)
    reader = WeightReader(tmp_path / "a.gguf", spec.scheme)
    experts = [
        each.weights[role] for each in spec.network.operations if each.kind == "experts" for role in ("gate_up", "down")
    ]
    assert experts
    assert set(experts) <= block_weights(spec.network)
    for weight in experts:
        parts = [reader.read_packed(*each) for each in zip(weight.names, weight.stored_shapes, strict=True)]
        segments = stored_blocks(weight, parts)
        assert sum(each.shape[0] for each in segments) == weight.shape[0]


@pytest.mark.mindspore
@pytest.mark.parametrize("name", MIXTURES)
def test_gguf_experts_in_blocks_give_nearly_the_logits_of_their_values_or_the_same_without_rounded_rows(tmp_path, name):
    spec = write_mixture(tmp_path / "a.gguf", name)

    def logits(quantization):
        model = GraphModel(spec, tmp_path / "a.gguf", backend("cpu", "float32"), quantization=quantization)
        return model.logits((list(range(3, 23)), 0, [4, 9, 2]))

    found, expected = logits(None), logits(Quantization(QuantizationName.DEQUANTIZED))
    assert np.std(found - expected) < 0.1 * np.std(expected)
    assert np.array_equal(logits(Quantization(QuantizationName.BLOCKS_A16)), expected)
