"""Every family as it is served, compared with its golden values."""

from typing import Any

import numpy as np
import pytest
from families import models
from families.precision import greedy, served
from llm_serving.backends.weight_packing import quantize
from llm_serving.core.enums import QuantizationName
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.quantization import Quantization, unsupported_by_ascend
from support.graph_model import BLOCK_SIZE
from support.network_reference import parameters, run, step_of_prompt

pytestmark = pytest.mark.mindspore

LARGEST_ERROR = 1e-4
W8A8 = Quantization(QuantizationName.W8A8)
ONE_LAYER = {"num_hidden_layers": 1}
ON_EVERY_KERNELS: dict[str, dict[str, Any]] = {
    "llama3.1": {},
    "qwen2": ONE_LAYER,
    "qwen3": ONE_LAYER,
    "mistral": ONE_LAYER,
    "phi3-longrope": ONE_LAYER,
    "internlm2": ONE_LAYER,
    "baichuan2-13b": ONE_LAYER,
    "glm4": ONE_LAYER,
    "gemma2": ONE_LAYER,
    "gemma3": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "granite": ONE_LAYER,
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2},
    "olmo2": ONE_LAYER,
    "ministral3": ONE_LAYER,
    "mixtral": ONE_LAYER,
    "qwen2-moe": ONE_LAYER,
    "qwen3-moe": ONE_LAYER,
    "deepseek-v2-lite": {"num_hidden_layers": 2},
}
"""Models, and what their graphs leave out: each kind of layer once, but for the first, since a graph of Cells takes
MindSpore seconds a layer."""
ON_PLAIN_KERNELS = ("baichuan2-13b", "gemma2", "gemma3", "qwen2-moe")
"""A graph for each of what primitives lack, and what plain operations differ in: windows, slopes, caps, norms of heads,
two rotations, gates, experts. `families.precision --kernels plain` asks all."""


@pytest.mark.parametrize("name", models.names())
def test_program_logits_equal_the_golden_values(tmp_path, name):
    model, golden, longest = served(name, tmp_path, "program", "float32")
    for prompt in golden.prompts.values():
        logits, tokens = greedy(model, prompt, longest)
        assert np.abs(logits[prompt.positions] - prompt.logits).max() < LARGEST_ERROR
        assert tokens == prompt.generated[: len(tokens)].tolist()


@pytest.mark.plain
@pytest.mark.parametrize("name", ON_PLAIN_KERNELS)
def test_plain_kernels_logits_equal_the_description(tmp_path, name):
    model, golden, longest = served(name, tmp_path, "plain", "float32", ON_EVERY_KERNELS[name])
    token_ids = golden.prompts[200].token_ids.tolist()
    blocks = list(range(-(-200 // BLOCK_SIZE)))
    logits = [model.logits((token_ids[:-1], 0, blocks)), model.logits(([token_ids[-1]], 199, blocks))]
    network = ModelSpec.from_folder(tmp_path).network
    weights = parameters(network, WeightReader(tmp_path), longest)
    expected = run(network.operations, weights, step_of_prompt(token_ids, network, every=True))
    assert np.abs(np.concatenate(logits) - expected).max() < 2 * LARGEST_ERROR  # either adds up in float32


@pytest.mark.parametrize("name", ON_EVERY_KERNELS)
def test_ascend_graph_is_bit_identical_to_the_program(tmp_path, monkeypatch, name):
    _add_biases_in_products(monkeypatch)
    changes = ON_EVERY_KERNELS[name]
    program, golden, longest = served(name, tmp_path / "program", "program", "bfloat16", changes)
    spec = ModelSpec.from_folder(tmp_path / "program")
    if unsupported_by_ascend(spec.network, longest) is not None:
        pytest.skip(f"the primitives have no {unsupported_by_ascend(spec.network, longest)}")
    graph, _, _ = served(name, tmp_path / "graph", "primitives", "bfloat16", changes)
    token_ids = golden.prompts[200].token_ids.tolist() if 200 in golden.prompts else []
    blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    expected, logits = (each.logits((token_ids, 0, blocks)) for each in (program, graph))
    assert logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["llama3.1", "qwen2", "qwen2-moe"])
def test_ascend_w8a8_graph_is_bit_identical_to_the_program_without_rotation(tmp_path, monkeypatch, name):
    """A tied LM head, biases, experts. Ascend's primitives do not rotate rows."""
    _add_biases_in_products(monkeypatch)
    without_rotation = lambda values, bits, group_size, _: quantize(values, bits, group_size, False)  # noqa: E731
    monkeypatch.setattr("llm_serving.lowering.parameters.quantize", without_rotation)
    logits = []
    for kernels in ("program", "primitives"):
        folder = tmp_path / kernels
        model, golden, _ = served(name, folder, kernels, "bfloat16", ON_EVERY_KERNELS[name] or ONE_LAYER, W8A8)
        token_ids = golden.prompts[200].token_ids.tolist()
        blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
        logits.append(model.logits((token_ids, 0, blocks)))
    program, graph = logits
    assert np.isfinite(program).all()
    assert graph.tobytes() == program.tobytes()


def _add_biases_in_products(monkeypatch):
    """Make a program compute keys as a graph does: the linear operation adds the bias, and no offset is subtracted."""
    monkeypatch.setattr("llm_serving.models.attention._key_offset", lambda *_: None)
