from dataclasses import replace

import numpy as np
import pytest
from llm_serving.core.enums import QuantizationName
from llm_serving.formats.quantized_tensor import QuantizedTensor, QValuesForm
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.registry import describe
from llm_serving.network.operations import Weight
from llm_serving.network.quantization import Quantization, bytes_saved, quantized_weights, stored_qvalues
from llm_serving.network.sharding import sharded
from llm_serving_tools.quantized_parts import quantize_w4, quantize_w8
from support.asymmetric import asymmetric_w4
from support.family_configs import config_of

RNG = np.random.default_rng(1)
VALUES = [RNG.standard_normal((rows, 64), dtype=np.float32) for rows in (16, 8)]
STACK = Weight(("a", "b"), (24, 64), ((16, 64), (8, 64)))


def empty_network(name):
    config = config_of(name)
    return describe(config["architectures"][0], ConfigReader(config, name))


@pytest.mark.parametrize("name", ["llama", "qwen2, experts", "gemma2", "deepseek2"])
def test_quantized_weights_are_all_products_except_routers(name):
    network = empty_network(name)
    quantized = quantized_weights(network, Quantization(QuantizationName.W8A8))
    used = {(each.kind, role): weight for each in network.operations for role, weight in each.weights.items()}
    for (kind, role), weight in used.items():
        products = {("linear", "weight"), ("experts", "gate_up"), ("experts", "down"), ("lm_head", "weight")}
        assert (weight in quantized) == ((kind, role) in products or weight == network.head.weights["weight"]), (
            kind,
            role,
        )


@pytest.mark.parametrize(("name", "in_8_bits"), [("w4a16", "w8a16"), ("w4a8", "w8a8")])
def test_quantized_weights_use_8_bits_for_lm_head_and_partial_groups(name, in_8_bits):
    network = empty_network("llama")
    for group_size in (32, 128):
        quantized = quantized_weights(network, Quantization(QuantizationName(name), group_size))
        head = network.head.weights["weight"]
        assert quantized.pop(head) == in_8_bits
        for weight, kept in quantized.items():
            assert kept == (in_8_bits if weight.shape[-1] % group_size else name)


def test_quantized_weights_are_empty_without_quantization():
    network = empty_network("llama")
    assert quantized_weights(network, None) == {}
    assert bytes_saved(network, None, 2) == 0


def test_stored_qvalues_are_used_unchanged():
    for parts, kept in (
        ([quantize_w8(each) for each in VALUES], QuantizationName.W8A8),
        ([quantize_w8(each) for each in VALUES], QuantizationName.W8A16),
        ([asymmetric_w4(each, 32) for each in VALUES], QuantizationName.W4A16),
        ([asymmetric_w4(VALUES[0], 32), quantize_w4(VALUES[1], 32)], QuantizationName.W4A16),
        ([quantize_w4(each, 32) for each in VALUES], QuantizationName.W4A8),
    ):
        found = stored_qvalues(STACK, parts, kept)
        assert found is not None
        assert (found.zeros is None) == all(each.zeros is None for each in parts)
        assert np.array_equal(found.qvalues, np.concatenate([each.qvalues for each in parts]))
        assert np.array_equal(found.dequantized(), np.concatenate([each.dequantized() for each in parts]))


def test_stored_qvalues_follow_the_row_order_and_pad_with_zeros():
    order = (3, -1, 0, *range(4, 16), -1)
    weight = Weight(("a",), (16, 64), ((16, 64),), rows=order)
    for tensor, kept in (
        (quantize_w8(VALUES[0]), QuantizationName.W8A8),
        (asymmetric_w4(VALUES[0], 32), QuantizationName.W4A16),
    ):
        found = stored_qvalues(weight, [tensor], kept)
        values = tensor.dequantized()
        expected = np.stack([np.zeros(64, np.float32) if row < 0 else values[row] for row in order])
        assert found is not None
        assert np.array_equal(found.dequantized(), expected)


@pytest.mark.parametrize(
    ("columns", "is_used"), [(None, True), (range(128, 256), True), (range(64, 192), False), (range(64), False)]
)
def test_stored_qvalues_of_rotated_weights_keep_whole_blocks(columns, is_used):
    tensor = replace(quantize_w4(RNG.standard_normal((16, 256), dtype=np.float32), 32), rotated=True)
    width = 256 if columns is None else len(columns)
    weight = Weight(("a",), (16, width), ((16, 256),), columns=columns and tuple(columns))
    found = stored_qvalues(weight, [tensor], QuantizationName.W4A16)
    assert (found is not None) == is_used
    assert found is None or found.rotated


def test_stored_qvalues_of_unsupported_formats_are_not_used():
    eight, four = quantize_w8(VALUES[0]), quantize_w4(VALUES[0], 16)
    order = np.arange(64, dtype=np.int32) // 32
    act_order = QuantizedTensor(four.qvalues, four.scales[:, :2], None, 4, 32, order)
    one = Weight(("a",), (16, 64), ((16, 64),))
    for parts, kept in (
        ([eight], QuantizationName.W4A16),
        ([four], QuantizationName.W4A16),  # groups too short
        ([quantize_w4(VALUES[0], 32)], QuantizationName.W8A16),
        ([act_order], QuantizationName.W4A16),
        ([VALUES[0]], QuantizationName.W8A8),
    ):
        assert stored_qvalues(one, parts, kept) is None
    assert stored_qvalues(STACK, [eight, VALUES[1]], QuantizationName.W8A8) is None


@pytest.mark.parametrize(
    ("columns", "is_used"), [((*range(32, 64), *range(32)), True), (range(16, 48), False), (range(31), False)]
)
def test_stored_qvalues_keep_columns_that_do_not_divide_a_group(columns, is_used):
    weight = Weight(("a",), (16, len(columns)), ((16, 64),), columns=tuple(columns))
    four, eight = asymmetric_w4(VALUES[0], 32), quantize_w8(VALUES[0])
    for tensor, kept, expected in ((four, "w4a16", is_used), (eight, "w8a8", True)):
        found = stored_qvalues(weight, [tensor], QuantizationName(kept))
        assert (found is not None) == expected
        if found is not None:
            assert np.array_equal(found.dequantized(), tensor.dequantized()[:, list(columns)])


@pytest.mark.parametrize(("group_size", "divided"), [(96, 32), (384, 128), (160, 32), (40, None), (16, None)])
def test_stored_qvalues_divide_groups_into_powers_of_two(group_size, divided):
    values = RNG.standard_normal((16, 1920), dtype=np.float32)
    tensor = asymmetric_w4(values, group_size)
    found = stored_qvalues(Weight(("a",), (16, 1920), ((16, 1920),)), [tensor], QuantizationName.W4A16)
    assert (found and found.group_size) == divided
    assert found is None or np.array_equal(found.dequantized(), tensor.dequantized())


def test_stored_qvalues_of_a_rank_divide_groups_that_its_columns_divide():
    """Rank 1 of 2 holds columns 96 to 191, which split a group of 64; values are regrouped by 32."""
    values = RNG.standard_normal((16, 192), dtype=np.float32)
    tensor, columns = asymmetric_w4(values, 64), tuple(range(96, 192))
    weight = Weight(("a",), (16, 96), ((16, 192),), columns=columns)
    found = stored_qvalues(weight, [tensor], QuantizationName.W4A16)
    assert found is not None
    assert found.group_size == 32
    assert np.array_equal(found.dequantized(), tensor.dequantized()[:, 96:])


@pytest.mark.parametrize(("name", "num_kept"), [("llama", 9), ("llama, odd heads and odd inner", 6)])
def test_bytes_saved_excludes_weights_whose_groups_a_rank_splits(name, num_kept):
    """On each of two ranks, the 48 or 45 columns of down_proj, and padded odd heads, split groups of 32."""
    network, form = sharded(empty_network(name), 0, 2), QValuesForm(8, 32)
    quantization = Quantization(QuantizationName.W8A16)
    weights = quantized_weights(network, quantization)
    shapes = [each.shape for each in weights if each.shape[1] % 32 == 0 and -1 not in (each.columns or ())]
    expected = sum(rows * (columns * (2 - 1) - 4 * columns // 32) for rows, columns in shapes)
    assert bytes_saved(network, quantization, 2, form) == expected
    assert len(shapes) == num_kept + 1  # and the LM head
