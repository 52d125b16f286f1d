"""Which weights are kept in codes, in which, and what they take."""

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.formats.quantized_tensor import QuantizedTensor, quantize_w4, quantize_w8
from llm_serving.models.model_config import Facts
from llm_serving.models.registry import describe
from llm_serving.network.operations import Weight
from llm_serving.network.quantization import Quantization, coded_weights, codes_of, spared_bytes
from support.family_configs import config_of

RNG = np.random.default_rng(1)
VALUES = [RNG.standard_normal((rows, 64), dtype=np.float32) for rows in (16, 8)]
STACK = Weight(("a", "b"), (24, 64), ((16, 64), (8, 64)))


def network_of(name):
    config = config_of(name)
    return describe(config["architectures"][0], Facts(config, name))


@pytest.mark.parametrize("name", ["llama", "qwen2, experts", "gemma2", "deepseek2"])
def test_what_is_multiplied_is_kept_in_codes_but_routers(name):
    network = network_of(name)
    coded = coded_weights(network, Quantization(QuantizationName.W8A8))
    used = {(each.kind, role): weight for each in network.operations for role, weight in each.weights.items()}
    for (kind, role), weight in used.items():
        products = {("linear", "weight"), ("experts", "gate_up"), ("experts", "down"), ("output", "weight")}
        assert (weight in coded) == ((kind, role) in products or weight == network.head.weights["weight"]), (kind, role)


@pytest.mark.parametrize(("name", "in_8_bits"), [("w4a16", "w8a16"), ("w4a8", "w8a8")])
def test_the_head_and_rows_that_groups_do_not_fill_have_8_bits(name, in_8_bits):
    network = network_of("llama")
    for group_size in (32, 128):
        coded = coded_weights(network, Quantization(QuantizationName(name), group_size))
        head = network.head.weights["weight"]
        assert coded.pop(head) == in_8_bits
        for weight, kept in coded.items():
            assert kept == (in_8_bits if weight.shape[-1] % group_size else name)


def test_without_quantisation_nothing_is_in_codes():
    network = network_of("llama")
    assert coded_weights(network, None) == {}
    assert spared_bytes(network, None, 2) == 0


def test_stored_codes_are_taken_as_they_are():
    for parts, kept in (
        ([quantize_w8(each) for each in VALUES], QuantizationName.W8A8),
        ([quantize_w8(each) for each in VALUES], QuantizationName.W8A16),
        ([quantize_w4(each, 32, symmetric=False) for each in VALUES], QuantizationName.W4A16),
        ([quantize_w4(VALUES[0], 32, symmetric=False), quantize_w4(VALUES[1], 32)], QuantizationName.W4A16),
        ([quantize_w4(each, 32) for each in VALUES], QuantizationName.W4A8),
    ):
        found = codes_of(STACK, parts, kept)
        assert found is not None
        assert (found.zeros is None) == all(each.zeros is None for each in parts)
        assert np.array_equal(found.codes, np.concatenate([each.codes for each in parts]))
        assert np.array_equal(found.dequantized(), np.concatenate([each.dequantized() for each in parts]))


def test_rows_are_picked_and_missing_ones_are_zeros():
    order = (3, -1, 0, *range(4, 16), -1)
    weight = Weight(("a",), (16, 64), ((16, 64),), rows=order)
    for tensor, kept in (
        (quantize_w8(VALUES[0]), QuantizationName.W8A8),
        (quantize_w4(VALUES[0], 32, symmetric=False), QuantizationName.W4A16),
    ):
        found = codes_of(weight, [tensor], kept)
        values = tensor.dequantized()
        expected = np.stack([np.zeros(64, np.float32) if row < 0 else values[row] for row in order])
        assert found is not None
        assert np.array_equal(found.dequantized(), expected)


def test_other_codes_are_worked_out_anew():
    eight, four = quantize_w8(VALUES[0]), quantize_w4(VALUES[0], 16)
    order = np.arange(64, dtype=np.int32) // 32
    act_order = QuantizedTensor(four.codes, four.scales[:, :2], None, 4, 32, order)
    one = Weight(("a",), (16, 64), ((16, 64),))
    for parts, kept in (
        ([eight], QuantizationName.W4A16),
        ([four], QuantizationName.W4A16),  # groups too short
        ([quantize_w4(VALUES[0], 32)], QuantizationName.W8A16),
        ([act_order], QuantizationName.W4A16),
        ([VALUES[0]], QuantizationName.W8A8),
    ):
        assert codes_of(one, parts, kept) is None
    assert codes_of(STACK, [eight, VALUES[1]], QuantizationName.W8A8) is None
    assert codes_of(Weight(("a",), (16, 64), ((16, 64),), columns=tuple(range(64))), [eight], "w8a8") is None
