"""Draft tokens from a model's layer for multi-token prediction (MTP)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from families import models
from llm_serving.core.enums import QuantizationName
from llm_serving.core.step import DraftRequest
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.operations import Operation
from llm_serving.network.quantization import Quantization, quantized_weights
from llm_serving.worker.draft_model import load_mtp
from llm_serving.worker.model_runner import ModelRunner
from support.graph_model import GraphModel, backend
from support.mtp_models import (
    NAMES,
    joined,
    mtp_weights,
    prefixes,
    single_layer_config,
    write_mtp_model,
    write_single_layer,
)

pytestmark = pytest.mark.mindspore

TOKENS = np.random.default_rng(5).integers(3, 200, 28).tolist()
BLOCKS = [4, 2]


def described(operation: Operation, layer: str) -> tuple:
    """Return an operation with its weights, whose names have `layer.` in place of the prefix of the layer."""
    weights = {
        role: (tuple(name.replace(layer, "layer.") for name in each.names), each.shape, each.rows, each.columns)
        for role, each in operation.weights.items()
    }
    return operation.kind, dict(operation.attributes), weights


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_is_one_of_the_model_between_the_joint_input_and_a_norm(name) -> None:
    spec = ModelSpec.from_hugging_face(models.model(name).config).mtp()
    single = ModelSpec.from_hugging_face(single_layer_config(name))
    layer, around = prefixes(name)
    assert [each.weights for each in spec.network.operations[:2]] == [
        {"gamma": spec.network.weights[0]},
        {"weight": spec.network.weights[1]},
    ]
    first, second = spec.network.weights[:2]
    assert first.names == (f"{around['embedding']}.weight", f"{around['hidden']}.weight")
    assert second.names == (f"{around['project']}.weight",)
    inner = [described(each, layer) for each in spec.network.operations[2:-2]]
    assert inner == [described(each, "model.layers.0.") for each in single.network.operations[1:-2]]
    assert spec.caches == single.caches
    assert spec.network.operations[-2].weights["gamma"].names == (f"{around['norm']}.weight",)
    assert second in quantized_weights(spec.network, Quantization(QuantizationName.W8A8))
    weights = mtp_weights(name)
    assert {key: weights[key].shape for key in spec.tensors} == spec.tensors


def test_experts_that_are_not_stacked_are_read_as_stored() -> None:
    spec = ModelSpec.from_hugging_face(models.model("qwen3.5-moe").config)
    stored = "mtp.layers.0.mlp.experts.0.gate_proj.weight"
    assert stored not in spec.mtp().tensors
    assert stored in spec.mtp([stored]).tensors
    assert spec.mtp([stored]).num_parameters == spec.mtp().num_parameters


@pytest.fixture(scope="module", params=["deepseek-v3", "qwen3.5-moe"])
def loaded(request, tmp_path_factory):
    """Return the name of a model, its tensors, its runner, the MTP layer, and a folder."""
    folder, cpu = tmp_path_factory.mktemp("model"), backend("cpu", "float32")
    weights = write_mtp_model(request.param, folder, "float32")
    spec = ModelSpec.from_folder(folder)
    runner = ModelRunner(spec, folder, cpu, 8, 16, 64, num_state_slots=2 * bool(spec.states))
    return request.param, weights, runner, load_mtp(runner, folder, cpu, None), folder


def proposed(layer, token_ids, count, *, key=1, start=0, temperature=0.0, blocks=BLOCKS):
    (found,) = layer.propose([DraftRequest(key, start, token_ids, count, temperature, 0, 1.0, 0.0, 9, blocks)])
    return found


def keep(runner, states, first=0):
    """Keep the hidden states of the tokens from `first` on."""
    positions = np.arange(first, first + len(states))
    slots = np.array(BLOCKS)[positions // 16] * 16 + positions % 16
    runner.hidden_states.keep(slots.astype(np.int32), states)


def test_draft_tokens_follow_from_hidden_states_and_embeddings(loaded, tmp_path, monkeypatch) -> None:
    """The reference is a model whose only layer is the MTP layer, and whose embeddings are the joint inputs."""
    name, weights, runner, layer, folder = loaded
    table = weights["model.embed_tokens.weight"]
    states = GraphModel(ModelSpec.from_folder(folder), folder, backend("cpu", "float32")).states((TOKENS, 0, [0, 1]))
    logits, logits_of = [], runner.logits_of
    monkeypatch.setattr(runner, "logits_of", lambda x: logits.append(logits_of(x).copy()) or logits[-1])
    keep(runner, states[:-1])
    drafts = proposed(layer, TOKENS, 2)
    inputs = joined(name, weights, table[TOKENS[1:]], states[:-1])
    for draft, found in zip(drafts, logits, strict=True):
        write_single_layer(name, tmp_path, weights, inputs)
        spec = replace(ModelSpec.from_folder(tmp_path), max_position_embeddings=256)
        single = GraphModel(spec, tmp_path, backend("cpu", "float32"))
        rows = list(range(len(inputs))), 0, [3, 1]
        expected = single.logits(rows)[-1]
        np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-4 * np.abs(expected).max())
        assert draft == np.argmax(expected)
        further = joined(name, weights, table[[draft]], single.states(rows)[-1:])
        inputs = np.concatenate([inputs, further])


def test_proposals_do_not_depend_on_what_is_cached_or_beside_them(loaded) -> None:
    runner, layer = loaded[2:4]
    states = np.random.default_rng(3).normal(size=(27, runner.spec.network.hidden)).astype(np.float32)
    keep(runner, states)
    alone = [proposed(layer, TOKENS[:n], 4, key=100 + n, temperature=1.0) for n in (9, 20, 28)]
    assert len({tuple(each) for each in alone}) == 3
    requests = [DraftRequest(n, 0, TOKENS[:n], 4, 1.0, 0, 1.0, 0.0, 9, BLOCKS) for n in (9, 20, 28)]
    assert layer.propose(requests) == alone
    # One request that grows: its rejected draft tokens are computed again from the hidden states of the model.
    assert [proposed(layer, TOKENS[:n], 4, key=7, temperature=1.0) for n in (9, 20, 28)] == alone
    other = [*TOKENS[:9], 1]
    assert proposed(layer, other, 4, key=7) == proposed(layer, other, 4, key=8)


def test_a_request_is_read_from_its_latest_missing_state_on(loaded) -> None:
    runner, layer = loaded[2:4]
    states = np.random.default_rng(4).normal(size=(27, runner.spec.network.hidden)).astype(np.float32)
    keep(runner, states)
    whole = proposed(layer, TOKENS, 4)
    runner.hidden_states.drop(np.empty((0, 6), np.int32), np.array([BLOCKS[0] * 16 + 11], np.int32))
    assert proposed(layer, TOKENS, 4, key=2) == proposed(layer, TOKENS[12:], 4, key=3, start=12)
    keep(runner, states)
    assert proposed(layer, TOKENS, 4) == whole
    assert proposed(layer, TOKENS, 4, blocks=[7, 6]) == []


def test_a_folder_without_the_layer_is_refused(loaded, tmp_path) -> None:
    name, _, runner = loaded[:3]
    models.write(name, tmp_path, dtype="float32")
    rule = "scheduler_config.speculative_method: mtp needs a layer for multi-token prediction: .* lacks .* tensors"
    with pytest.raises(ModelError, match=rule):
        load_mtp(runner, tmp_path, backend("cpu", "float32"), None)
