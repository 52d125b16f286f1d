"""Products of weights in blocks: the bits that NumPy computes, on every instruction set."""

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.backends.weight_packing import BlockSegments
from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.gguf_blocks import BLOCKS
from llm_serving.kernels import library
from support.instruction_sets import isas_of_qvalues, real_isas
from support.kernel_calls import (
    Array,
    Typed,
    assert_close,
    block_weight,
    call,
    empty,
    float32_sum_bound,
    integers,
    linear,
    packed,
    scalar,
    typed,
)
from support.kernels import quantized_products

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")


class Form(NamedTuple):
    """A form of blocks, as one or more types of GGUF have it."""

    bits: int
    group_size: int
    zero: int = 0
    has_minima: bool = False
    has_units: bool = False


FORMS = {
    "Q4_0": Form(4, 32, zero=8),
    "Q4_1": Form(4, 32, has_minima=True),
    "Q5_0": Form(5, 32, zero=16),
    "Q5_1": Form(5, 32, has_minima=True),
    "Q8_0": Form(8, 32, zero=128),
    "Q2_K": Form(4, 16, has_minima=True, has_units=True),
    "Q3_K": Form(4, 16, zero=4, has_units=True),
    "Q4_K": Form(4, 32, has_minima=True, has_units=True),
    "Q5_K": Form(5, 32, has_minima=True, has_units=True),
    "Q6_K": Form(6, 16, zero=32, has_units=True),
    "IQ4_XS": Form(8, 32, zero=128, has_units=True),
}
SHAPES = [(1, 16, 256), (3, 50, 512), (4, 1, 256), (6, 33, 2560), (7, 200, 256), (19, 100, 2304), (40, 130, 512)]
BATCHES = (1, 2, 5, 6, 7, 18, 19, 24, 25, 64, 300)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def random_tensor(rng: np.random.Generator, n: int, k: int, form: Form) -> BlockTensor:
    groups = n, k // form.group_size
    qvalues = rng.integers(0, 2**form.bits, (n, k), np.uint8)

    def halves(*shape: int) -> Array:
        return (normal(rng, *shape) * 0.01).astype(np.float16)

    if form.has_units:
        scales, units = rng.integers(-128, 128, groups).astype(np.int8), halves(n, k // 256)
        minima = rng.integers(0, 256, groups).astype(np.uint8) if form.has_minima else None
        minimum_units = halves(n, k // 256) if form.has_minima else None
        return BlockTensor(qvalues, form.bits, form.group_size, form.zero, scales, minima, units, minimum_units)
    minima = halves(*groups) if form.has_minima else None
    return BlockTensor(qvalues, form.bits, form.group_size, form.zero, halves(*groups), minima)


def fuses(isa: str) -> bool:
    """Whether an instruction set has fused multiply-adds."""
    return isa != "plain"


def expected(x: Typed, tensor: BlockTensor, is_fused: bool) -> Array:
    numbers = tensor.group_scales(), tensor.group_minima(), tensor.group_size
    return quantized_products.blocks(x.values, tensor.qvalues, tensor.zero, *numbers, is_fused=is_fused)


class Product(NamedTuple):
    x: Typed
    tensor: BlockTensor
    bits: Array


@cache  # all instruction sets except `plain` share these products
def products(name: str, is_fused: bool) -> list[Product]:
    """Return products of every type and shape, with the bits that NumPy computes."""
    rng = np.random.default_rng(1)
    found = []
    for dtype, (m, n, k) in product(("bfloat16", "float16", "float32"), SHAPES):
        tensor = random_tensor(rng, n, k, FORMS[name])
        x = typed(normal(rng, m, k) * (np.arange(m) % 3 > 0)[:, None], dtype)
        found.append(Product(x, tensor, expected(x, tensor, is_fused).view(np.uint32)))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_block_product_bits_equal_numpy(isa_of_codes: str, name: str) -> None:
    for x, tensor, bits in products(name, fuses(isa_of_codes)):
        found = linear(x, block_weight([tensor], x.dtype), "float32").bits
        assert np.array_equal(found, bits), (x.dtype, x.array.shape, tensor.qvalues.shape)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weight_only_block_product_bits_equal_those_of_dequantized_weights(
    isa_of_codes: str, dtype: str, name: str
) -> None:
    if isa_of_codes == "avx512_vnni" and dtype == "bfloat16":
        pytest.skip("multiplies bfloat16 weights in fixed point")
    for x, tensor, _ in products(name, is_fused=True):  # the bits are not used
        if x.dtype != dtype:
            continue
        weight = typed(tensor.dequantized(), dtype)
        found = linear(x, block_weight([tensor], dtype, weight_only=True), "float32")
        expected = x.values.astype(np.float64) @ weight.values.astype(np.float64).T
        assert_close(found, expected, float32_sum_bound(x, weight))
        assert np.array_equal(found.bits, linear(x, packed(weight), "float32").bits), x.array.shape


@pytest.mark.parametrize(("n", "k", "name"), [(200, 2560, "Q4_K"), (130, 2080, "Q5_0"), (65, 2304, "Q6_K")])
def test_weight_only_block_product_is_batch_invariant(isa_of_codes: str, n: int, k: int, name: str) -> None:
    rng = np.random.default_rng(8)
    x = typed(normal(rng, max(BATCHES), k), "bfloat16")
    weight = block_weight([random_tensor(rng, n, k, FORMS[name])], "bfloat16", weight_only=True)
    alone = np.concatenate([linear(Typed(x.array[row : row + 1], x.dtype), weight).bits for row in range(4)])
    for count in BATCHES:
        bits = linear(Typed(x.array[:count], x.dtype), weight).bits
        assert np.array_equal(bits[:4], alone[:count]), count


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    inputs=st.integers(1, 40),
    name=st.sampled_from(sorted(FORMS)),
    spread=st.integers(0, 60),
    isa=st.sampled_from(isas_of_qvalues() or ["plain"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_block_product_bits_equal_numpy_for_any_shape(
    m: int, n: int, inputs: int, name: str, spread: int, isa: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    form = FORMS[name]
    k = inputs * (256 if form.has_units else 32)
    tensor = random_tensor(rng, n, k, form)
    x = typed(normal(rng, m, k) * np.float32(2.0) ** rng.integers(-spread, spread + 1, (m, k)), "float32")
    with library.use_isa(isa):
        bits = linear(x, block_weight([tensor], "float32"), "float32").bits
    assert np.array_equal(bits, expected(x, tensor, fuses(isa)).view(np.uint32))


@pytest.mark.parametrize("name", FORMS)
def test_block_product_of_the_largest_numbers_is_exact(isa_of_codes: str, name: str) -> None:
    """Sums of such products come closest to the limits of the 16 bits in which some instructions add."""
    k, largest = 512, 2 ** FORMS[name].bits - 1
    tensor = random_tensor(np.random.default_rng(4), 64, k, FORMS[name])
    tensor.qvalues[:] = np.array([0, 1, largest // 2, largest], np.uint8)[np.arange(64)[:, None] % 4]
    signs = [np.ones(k), -np.ones(k), np.where(np.arange(k) % 2, 1, -1), np.where(np.arange(k) % 4 < 2, 1, -1)]
    for count in (1, 4, 20):
        x = typed(np.array([signs[row % 4] for row in range(count)], np.float32), "float32")
        bits = linear(x, block_weight([tensor], "float32"), "float32").bits
        assert np.array_equal(bits, expected(x, tensor, fuses(isa_of_codes)).view(np.uint32)), count


@pytest.mark.parametrize("m", [1, 5, 9, 70])
def test_block_product_of_segments_equals_those_of_each(isa_of_codes: str, m: int) -> None:
    rng = np.random.default_rng(2)
    rows = [(48, "Q4_0"), (16, "Q6_K"), (32, "Q4_K"), (16, "Q4_K"), (64, "Q5_0"), (21, "Q8_0")]
    segments = [random_tensor(rng, n, 512, FORMS[name]) for n, name in rows]
    x = typed(normal(rng, m, 512), "bfloat16")
    bits = linear(x, block_weight(segments, "bfloat16"), "float32").bits
    whole = np.concatenate([expected(x, each, fuses(isa_of_codes)) for each in segments], axis=1)
    assert np.array_equal(bits, whole.view(np.uint32))


@pytest.mark.parametrize(("n", "k", "name"), [(200, 2560, "Q4_K"), (130, 2080, "Q5_0"), (65, 2304, "Q6_K")])
def test_block_product_is_batch_invariant(isa_of_codes: str, n: int, k: int, name: str) -> None:
    rng = np.random.default_rng(3)
    x = typed(normal(rng, max(BATCHES), k), "bfloat16")
    weight = block_weight([random_tensor(rng, n, k, FORMS[name])], "bfloat16")
    alone = np.concatenate([linear(Typed(x.array[row : row + 1], x.dtype), weight).bits for row in range(4)])
    for count in BATCHES:
        bits = linear(Typed(x.array[:count], x.dtype), weight).bits
        assert np.array_equal(bits[:4], alone[:count]), count


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_block_product_of_a_row_with_infinity_or_nan_is_nan(isa_of_codes: str, name: str, value: float) -> None:
    rng = np.random.default_rng(4)
    x = normal(rng, 3, 256)
    x[1, 100] = value
    tensor = random_tensor(rng, 20, 256, FORMS[name])
    y = linear(typed(x, "float32"), block_weight([tensor], "float32")).values
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("name", FORMS)
def test_block_product_is_close_to_that_of_the_values(name: str) -> None:
    rng = np.random.default_rng(5)
    tensor, x = random_tensor(rng, 40, 512, FORMS[name]), normal(rng, 4, 512)
    values = tensor.dequantized().astype(np.float64)
    steps = np.abs(x.reshape(4, -1, 32)).max(axis=2) / 127  # an input is rounded by at most half a step
    bound = np.repeat(steps, 32, axis=1) / 2 @ np.abs(values).T
    y = linear(typed(x, "float32"), block_weight([tensor], "float32")).values
    assert (np.abs(y - x.astype(np.float64) @ values.T) <= bound * 1.001 + 1e-4).all()


@pytest.mark.parametrize("name", FORMS)
def test_gather_dequantizes_rows_of_blocks(name: str) -> None:
    rng = np.random.default_rng(6)
    segments = [random_tensor(rng, 32, 512, FORMS["Q8_0"]), random_tensor(rng, 37, 512, FORMS[name])]
    weight, ids = block_weight(segments, "float32"), np.array([0, 31, 32, 68, 40], np.int32)
    y = empty((len(ids), 512), "float32")
    call("Gather", weight, integers(ids), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.values, np.concatenate([each.dequantized() for each in segments])[ids])


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_packed_bytes_of_a_block_type_are_those_of_the_library(kind: int) -> None:
    for out, columns in ((16, 256), (37, 768), *(((5, 96),) if BLOCKS[kind].elements == 32 else ())):
        rows = np.zeros((out, columns // BLOCKS[kind].elements * BLOCKS[kind].num_bytes), np.uint8)
        tensor = BLOCKS[kind].unpacked(rows)
        assert BLOCKS[kind].has_minima == (tensor.minima is not None)
        assert BLOCKS[kind].packed_bytes((out, columns)) == BlockSegments([tensor]).num_bytes


def test_block_packing_refuses_unsupported_forms() -> None:
    rng = np.random.default_rng(7)
    whole, part = (random_tensor(rng, n, 256, FORMS["Q4_0"]) for n in (16, 20))
    with pytest.raises(
        ModelError, match=r"cannot multiply a weight of these blocks: .* Given: 4 bits, groups of 32, \[20, 256\]"
    ):
        BlockSegments([part, whole])
    wide = random_tensor(rng, 16, 512, FORMS["Q4_0"])
    with pytest.raises(ModelError, match="cannot multiply a weight of these blocks"):
        BlockSegments([whole, wide])
    three = BlockTensor(whole.qvalues & 7, 3, 32, 4, whole.scales)
    with pytest.raises(ModelError, match="3 bits"):
        BlockSegments([three])
    minima = BlockTensor(whole.qvalues, 6, 32, 0, whole.scales, whole.scales)
    with pytest.raises(ModelError, match="6 bits"):
        BlockSegments([minima])
    no_power_of_two = BlockTensor(whole.qvalues, 4, 32, 7, whole.scales)
    with pytest.raises(ModelError, match="4 bits"):
        BlockSegments([no_power_of_two])
