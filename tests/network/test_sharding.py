"""Ranks together compute the same logits as one process, except for the order of sums."""

import math

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.builder import Network
from llm_serving.network.program import build_program
from llm_serving.network.quantization import Quantization, quantized_weights
from llm_serving.network.rewriting import rewrite, select_rows
from llm_serving.network.sharding import sharded, sharding_violation
from llm_serving.network.weights import RowFactors
from support.family_configs import CONFIGS, RandomTensors, config_of
from support.network_reference import parameters, run, run_ranks, step_of_prompt
from support.weights import load_parameter

TOKENS = [5, 60, 7, 7, 31, 96, 0, 2, 44, 8, 13]
REFUSED = ("gemma3n", "gemma4, inputs of layers")
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


def network(name: str, **facts: object) -> Network:
    config = config_of(name) | facts
    return describe(config["architectures"][0], ConfigReader(config, name))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_sharding_over_two_ranks_computes_the_same_logits(name: str) -> None:
    net = network(name)
    ranks = [sharded(net, rank, 2) for rank in range(2)]
    # The latent keys of all heads are one KV head.
    assert [cache.kv_heads for cache in ranks[0].caches] == [max(cache.kv_heads // 2, 1) for cache in net.caches]
    assert_equal_logits(net, ranks)


def assert_equal_logits(net: Network, ranks: list[Network]) -> None:
    expected = run(net.operations, parameters(net, RandomTensors(), 64), step_of_prompt(TOKENS, net, every=True))[-1:]
    weights = [parameters(rank, RandomTensors(), 64) for rank in ranks]
    for plans in (
        [select_rows(rank.operations) for rank in ranks],
        [rewrite(select_rows(rank.operations)) for rank in ranks],
    ):
        steps = [step_of_prompt(TOKENS, rank) for rank in ranks]
        first, *others = run_ranks([plan.operations for plan in plans], weights, steps)
        assert all(np.array_equal(first, other) for other in others)
        assert np.allclose(first, expected, atol=2e-5 * np.abs(expected).max())


ONE_GROUP = {"n_groups": 1}
ONE_KEY_HEAD = {"linear_num_key_heads": 1}


@pytest.mark.parametrize(
    ("name", "facts", "shapes"),
    [
        ("qwen3-next", {}, [(3, 64), (2, 16, 16)]),
        ("qwen3-next", ONE_KEY_HEAD, [(3, 64), (2, 16, 16)]),
        ("qwen3-next", ONE_KEY_HEAD | {"linear_num_value_heads": 1}, None),
        ("nemotron-h", {}, [(3, 32 + 24), (2, 12, 16)]),
        ("nemotron-h", ONE_GROUP, None),
        ("falcon-h1", {}, [(3, 32 + 24), (2, 12, 16)] * 3),
        ("lfm2", {}, [(2, 32)] * 2),
    ],
)
def test_sharding_divides_the_states_of_heads_and_columns(name: str, facts: dict, shapes: list | None) -> None:
    """With one group of heads, each rank has its own heads and the whole group. A norm over the heads of several ranks
    keeps the layer whole (None)."""
    net = network(name, **facts)
    expected = [each.shape for each in net.states] if shapes is None else shapes
    assert [each.shape for each in sharded(net, 1, 2).states][: len(expected)] == expected
    assert_equal_logits(net, [sharded(net, rank, 2) for rank in range(2)])


def test_sharding_of_one_group_over_four_ranks_gives_each_a_head() -> None:
    net = network("nemotron-h", num_key_value_heads=4, n_groups=2, mamba_num_heads=4)
    assert sharded(net, 0, 4).states == net.states  # the norm spans the two heads of a group
    net = network("falcon-h1", num_key_value_heads=4)
    ranks = [sharded(net, rank, 4) for rank in range(4)]
    assert {rank.states[1].shape[0] for rank in ranks} == {1}
    assert_equal_logits(net, ranks)


def test_row_factors_of_a_rank_multiply_its_rows_as_those_of_the_whole_weight() -> None:
    factors = RowFactors(((4, 3.0), (8, 5.0)))
    weight = np.arange(1, 25, dtype=np.float32).reshape(12, 2)
    of_rank = (0, 1, 4, 5, 11, 7)
    assert np.array_equal(factors.of_rows(of_rank)(weight[list(of_rank)]), factors(weight)[list(of_rank)])
    of_part = tuple(of_rank[row] for row in (5, 0))
    assert np.array_equal(
        factors.of_rows(of_rank).of_rows((5, 0))(weight[list(of_part)]), factors(weight)[list(of_part)]
    )


def test_sharding_over_four_ranks_gives_each_a_kv_head() -> None:
    net = network("baichuan2, 13B")
    expected = run(net.operations, parameters(net, RandomTensors(), 64), step_of_prompt(TOKENS, net))
    ranks = [sharded(net, rank, 4) for rank in range(4)]
    assert [cache.kv_heads for cache in ranks[3].caches] == [1, 1, 1]
    weights = [parameters(rank, RandomTensors(), 64) for rank in ranks]
    results = run_ranks([rank.operations for rank in ranks], weights, [step_of_prompt(TOKENS, rank) for rank in ranks])
    assert np.allclose(results[0], expected, atol=2e-5 * np.abs(expected).max())


def test_sharding_adds_two_all_reduces_a_layer_and_one_for_the_embedding() -> None:
    kinds = [each.kind for each in sharded(network("llama"), 1, 2).operations]
    assert kinds.count("all_reduce") == 2 * 3 + 1
    # The sum is added to the residual by the norm after it, so the all-reduce is the only additional instruction.
    assert len(build_program(sharded(network("llama"), 1, 2), "float32").instructions) - 1 == 3 * 9 + 3 + 3


def test_sharding_slices_the_weights() -> None:
    net = network("llama, biases, tied")
    ranks = [sharded(net, rank, 2) for rank in range(2)]
    for at, each in enumerate(net.operations):
        if each.kind != "linear":
            continue
        (name, *_) = each.weights["weight"].names
        whole = load_parameter(each.weights["weight"], RandomTensors(), 64)
        parts = [
            load_parameter(found.weights["weight"], RandomTensors(), 64)
            for rank in ranks
            for found in rank.operations
            if found.kind == "linear" and found.weights["weight"].names == each.weights["weight"].names
        ]
        if "o_proj" in name or "down_proj" in name:
            assert np.array_equal(np.concatenate(parts, axis=1), whole), at
        elif "gate_proj" in name:
            halves = [half for index in range(2) for half in (np.split(part, 2)[index] for part in parts)]
            assert np.array_equal(np.concatenate(halves), whole)
        else:
            q, k, v = ([np.split(part, [64, 96])[index] for part in parts] for index in range(3))
            assert np.array_equal(np.concatenate([*q, *k, *v]), whole)


@pytest.mark.parametrize("name", ["llama", "llama, biases, tied"])
def test_sharding_duplicates_only_norms_and_output_biases(name: str) -> None:
    net = network(name)
    ranks = [sharded(net, rank, 2) for rank in range(2)]
    whole, *shares = (
        sum(math.prod(weight.shape) for weight in each.weights if len(weight.shape) == 2 and weight.generate is None)
        for each in (net, *ranks)
    )
    assert sum(shares) == whole


@pytest.mark.parametrize("count", [2, 3])
def test_sharding_keeps_tied_embeddings_one_parameter(count: int) -> None:
    net = network("llama, biases, tied", **({} if count == 2 else SIX_HEADS))
    whole = load_parameter(net.head.weights["weight"], RandomTensors(), 64)
    parts = []
    for rank in range(count):
        of_rank = sharded(net, rank, count)
        assert of_rank.operations[0].weights["table"] == of_rank.head.weights["weight"]
        assert of_rank.operations[0].attributes["first"] == sum(map(len, parts))
        parts.append(load_parameter(of_rank.head.weights["weight"], RandomTensors(), 64))
    assert np.array_equal(np.concatenate(parts), whole)


def test_sharding_with_partial_groups_falls_back_to_8_bits() -> None:
    rank = sharded(network("llama"), 0, 2)
    quantized = quantized_weights(rank, Quantization(QuantizationName.W4A16, 32))
    kept = {weight.names[0].split(".")[-2]: (weight.shape[1], name) for weight, name in quantized.items()}
    assert kept["o_proj"] == (64, QuantizationName.W4A16)
    assert kept["down_proj"] == (48, QuantizationName.W8A16)


def test_sharding_gives_output_biases_to_rank_0_alone() -> None:
    first, second = (sharded(network("llama, biases, tied"), rank, 2) for rank in range(2))
    name = "model.layers.0.self_attn.o_proj.bias"
    assert any(name in weight.names for weight in first.weights)
    assert not any(name in weight.names for weight in second.weights)
    assert name in second.optional


@pytest.mark.parametrize(
    ("name", "facts", "count", "rule"),
    [
        ("llama", {}, 4, "must divide the 2 heads of keys and values"),
        ("llama", {"intermediate_size": 97}, 2, "must divide the 97 columns of a feed-forward layer"),
        ("mixtral", {"intermediate_size": 80, **SIX_HEADS}, 3, "must divide the 80 columns of an expert"),
        ("llama", {"vocab_size": 1}, 2, "must be at most the 1 tokens of the vocabulary"),
        ("deepseek2", {}, 3, "must divide the 4 heads of queries"),
    ],
)
def test_sharding_refuses_networks_that_cannot_be_split(
    name: str, facts: dict[str, object], count: int, rule: str
) -> None:
    net = network(name, **facts)
    assert sharding_violation(net, count) == rule
    with pytest.raises(ModelError, match=f"cluster_config.tensor_parallel: {rule}. Given: {count}"):
        sharded(net, 1, count)
