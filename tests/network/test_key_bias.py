"""The bias of keys moves from the linear operation to the rotary embedding, and an offset is subtracted from keys."""

from dataclasses import replace

import numpy as np
import pytest
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.builder import Network
from llm_serving.network.key_bias import move_key_biases
from support.family_configs import RandomTensors, config_of
from support.network_reference import Array, parameters, run, step_of_prompt

WITH_OFFSETS = [
    "qwen2",
    "qwen2, experts",
    "internlm2",
    "llama, biases, tied",
    "glm",
    "gpt-neox",
    "starcoder2",
    "phimoe",
]
TOKENS = [5, 60, 7, 7, 31, 96, 0, 2, 44, 8, 13]


def network(name: str) -> Network:
    config = config_of(name)
    return describe(config["architectures"][0], ConfigReader(config, name))


def logits(net: Network) -> Array:
    return run(net.operations, parameters(net, RandomTensors(), 64), step_of_prompt(TOKENS, net))


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_offset_of_keys_changes_no_attention_weight(name):
    net = network(name)
    without = [
        replace(each, weights={role: weight for role, weight in each.weights.items() if role != "offset"})
        for each in net.operations
    ]
    assert any(each.weights != other.weights for each, other in zip(net.operations, without, strict=True))
    np.testing.assert_allclose(logits(net), logits(net.changed(operations=without)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_moved_bias_changes_no_key(name):
    net = network(name)
    moved = net.changed(operations=move_key_biases(net.operations))
    np.testing.assert_allclose(logits(moved), logits(net), rtol=1e-4, atol=1e-5)


def test_moved_bias_is_zero_in_the_linear_operation():
    net = network("qwen2")
    moved = net.changed(operations=move_key_biases(net.operations))
    weights = parameters(moved, RandomTensors(), 64)
    producers = {y: each for each in moved.operations for y in each.outputs.values()}
    ropes = [each for each in moved.operations if "bias" in each.weights and each.kind == "rope"]
    assert len(ropes) == len(net.caches)
    for rope in ropes:
        keys = rope.inputs["x"]
        bias = weights[producers[keys.root].weights["bias"]]
        of_keys = slice(keys.start, keys.start + keys.width)
        assert not bias[of_keys].any()
        assert np.delete(bias, of_keys).all()
        assert weights[rope.weights["bias"]].all()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt-oss"])
def test_network_without_an_offset_stays_the_same(name):
    net = network(name)
    assert move_key_biases(net.operations) == net.operations
