"""Calls of the kernel library's operators on NumPy arrays, as MindSpore makes them, and bounds of their rounding
errors.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llm_serving.backends.weight_packing import BlockSegments
from llm_serving.core.dtypes import from_bfloat16, round_to_bfloat16
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.kernels import library
from llm_serving.network.weights import RowStack
from numpy.typing import NDArray

Array = NDArray[Any]

FLOAT32_UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""

ROUNDING_UNIT = {"float32": FLOAT32_UNIT, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of one rounding to the type."""

SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}
"""Absolute error up to which results may be lost: some instructions treat subnormal float32 and bfloat16 as zero."""

FLOAT_TYPES = tuple(ROUNDING_UNIT)

FIXED_POINT_ISA = "avx512_vnni"
"""The instruction set that multiplies packed bfloat16 weights in 16-bit integers."""


@dataclass(frozen=True)
class Typed:
    """An array with the dtype that an operator sees; bfloat16 is stored as uint16."""

    array: Array
    dtype: str

    @property
    def values(self) -> Array:
        """Return the values in a dtype that NumPy can compute with, exactly."""
        return from_bfloat16(self.array) if self.dtype == "bfloat16" else self.array

    @property
    def bits(self) -> Array:
        """Return the bytes, which compare equal also for NaN."""
        return self.array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[self.array.itemsize])

    def rows(self, index: Any) -> "Typed":
        return Typed(np.ascontiguousarray(self.array[index]), self.dtype)


def typed(values: Any, dtype: str) -> Typed:
    values = np.asarray(values, dtype=np.float32)
    if dtype == "bfloat16":
        return Typed(round_to_bfloat16(values), dtype)
    with np.errstate(over="ignore"):
        return Typed(values.astype(dtype), dtype)


def integers(values: Any, dtype: str = "int32") -> Typed:
    return Typed(np.asarray(values, dtype=dtype), dtype)


def scalar(value: Any, dtype: str) -> Typed:
    return Typed(np.asarray(value, dtype=np.dtype(dtype)), dtype)


def empty(shape: tuple[int, ...], dtype: str) -> Typed:
    """Return an array for a result, filled with a pattern that no operator writes."""
    storage = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    array = np.empty(shape, dtype=storage)
    array.view(np.uint8)[...] = 0xA5
    return Typed(array, dtype)


def status_of(operator: str, *parameters: Typed | None) -> int:
    """Call an operator; return its status, 0 for success."""
    count = len(parameters)
    pointers = (ctypes.c_void_p * count)(*(p.array.ctypes.data if p else None for p in parameters))
    ranks = (ctypes.c_int * count)(*(p.array.ndim if p else 0 for p in parameters))
    shapes = [
        (ctypes.c_int64 * max(1, rank))(*(p.array.shape if p else ()))
        for p, rank in zip(parameters, ranks, strict=True)
    ]
    shape_pointers = (ctypes.POINTER(ctypes.c_int64) * count)(
        *(ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes)
    )
    dtypes = (ctypes.c_char_p * count)(*(p.dtype.encode() if p else b"none" for p in parameters))
    status: int = getattr(library.load(), operator)(count, pointers, ranks, shape_pointers, dtypes, None, None)
    return status


def call(operator: str, *parameters: Typed | None) -> None:
    """Call an operator that must succeed."""
    assert status_of(operator, *parameters) == 0, library.last_error()


def packed(weight: Typed) -> Typed:
    """Return a packed weight. It stays registered as packed: use its array for nothing else."""
    n, k = weight.array.shape
    target = np.empty_like(weight.array)
    rows, _ = RowStack([weight.array]).addresses()
    library.load().llm_pack_weight(rows.ctypes.data, target.ctypes.data, weight.dtype.encode(), n, k)
    return Typed(target, weight.dtype)


def unpacked(weight: Typed) -> Typed:
    """Return an unpacked weight, whose address may have belonged to a packed one."""
    library.load().llm_release_weight(weight.array.ctypes.data)
    return weight


def quantized(
    qvalues: Any,
    scales: Any,
    dtype: str,
    *,
    weight_only: bool = False,
    zeros: Any = None,
    group_size: int | None = None,
    rotated: bool = False,
) -> Typed:
    """Return packed quantized values (int8 of 8 bits, uint8 of 4 bits); as for `packed`, the weight stays registered.

    Args:
        qvalues: [N, K].
        scales: [N] or [N, groups].
        dtype: Dtype of the rows that are multiplied with it.
        weight_only: Whether rows are not quantized.
        zeros: [N, groups], of 4 bits.
        group_size: Columns with one scale; None: all columns.
        rotated: Whether products rotate the rows.
    """
    qvalues = np.ascontiguousarray(qvalues)
    scales = np.ascontiguousarray(scales, np.float32)
    zeros = None if zeros is None else np.ascontiguousarray(zeros, np.uint8)
    bits = 4 if qvalues.dtype == np.uint8 else 8
    n, k = qvalues.shape
    shown = k * bits // 8
    memory = np.empty(library.load().llm_packed_qvalues_bytes(weight_only, bits, n, k) + 64, np.int8)
    arrays = qvalues.ctypes.data, scales.ctypes.data, None if zeros is None else zeros.ctypes.data
    group = group_size or max(k, 1)
    memory_arguments = memory.ctypes.data, dtype.encode(), n, k, shown
    if library.load().llm_pack_qvalues(weight_only, bits, *arrays, group, rotated, *memory_arguments) != 0:
        raise ValueError("no product supports such quantized values")
    return Typed(memory[: n * shown].reshape(n, shown), "int8")


def block_weight(segments: Sequence[BlockTensor], dtype: str, *, weight_only: bool = False) -> Typed:
    """Return a packed weight in blocks; as for `packed`, the weight stays registered."""
    packed = BlockSegments(segments)
    memory = np.zeros(packed.num_bytes + 64, np.int8)
    packed.pack(memory.ctypes.data, dtype, weight_only=weight_only)
    return Typed(memory[: packed.rows * packed.columns].reshape(packed.rows, packed.columns), "int8")


def linear(x: Typed, weight: Typed, result: str | None = None) -> Typed:
    """Call MatMul with a weight [N, K], packed or not."""
    y = empty((x.array.shape[0], weight.array.shape[0]), result or x.dtype)
    call("MatMul", x, weight, scalar(False, "bool"), scalar(True, "bool"), y)
    return y


def assert_close(result: Typed, expected: Array, bound: Array | float) -> None:
    """Check that all differences are within `bound` plus one rounding of the result to its type."""
    unit = ROUNDING_UNIT[result.dtype]
    limit = bound * (1 + unit) + unit * np.abs(expected) + SMALLEST[result.dtype]
    difference = np.abs(result.values.astype(np.float64) - expected)
    assert np.all(difference <= limit), f"off by up to {np.max(difference / limit):.2f} times what rounding explains"


def float32_sum_bound(x: Typed, weight: Typed) -> Array:
    """Return the error bound of K products and K sums, each rounded once; those below 2^-126 may become zero."""
    num_inputs = x.array.shape[1]
    magnitude = np.abs(x.values.astype(np.float64)) @ np.abs(weight.values.astype(np.float64)).T
    return 2 * num_inputs * (FLOAT32_UNIT * magnitude + 2.0**-126)


def fixed_point_bound(x: Typed, weight: Typed) -> Array:
    """Return the error bound of a product in 16-bit integers (csrc/fixed_point.h).

    A finite number has an error of at most half its unit, and none if it is a multiple of the unit. Sums within a block
    are exact. Each sum of a block is rounded to float32 once, as is each addition of blocks.
    """
    inputs, weights = x.values.astype(np.float64), weight.values.astype(np.float64)
    weight_units = 2.0 ** (_exponents(weights) - 14)
    blocks = range(0, max(1, weights.shape[1]), 128)
    norms = [np.linalg.norm(np.rint(weights / weight_units)[:, k : k + 128], axis=1).max(initial=1) for k in blocks]
    # Rounding the norms to float32 changes them by far less than 1e-5.
    max_norm = 2.0**31 * 0.999 / max(norms) * (1 - 1e-5) - 6
    input_units = np.empty_like(inputs)
    for k in blocks:
        scaled = inputs[:, k : k + 128] / 2.0 ** _exponents(inputs[:, k : k + 128])
        norm = np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 2.0**-126)
        per_one = 2.0 ** np.minimum(14, np.floor(np.log2(max_norm / norm)))
        input_units[:, k : k + 128] = 2.0 ** _exponents(inputs[:, k : k + 128]) / per_one
    input_errors, weight_errors = _distance(inputs, input_units), _distance(weights, weight_units)
    magnitude = np.abs(inputs) @ np.abs(weights).T
    from_units = (np.abs(inputs) + input_errors) @ (np.abs(weights) + weight_errors).T - magnitude
    bound: Array = from_units + (len(blocks) + 1) * FLOAT32_UNIT * (magnitude + from_units) + 2.0**-126
    return bound


def _exponents(values: Array) -> Array:
    """Exponent of the largest magnitude of each row [rows, 1], at least -90."""
    return np.floor(np.log2(np.abs(values).max(axis=1, initial=2.0**-90, keepdims=True)))


def _distance(values: Array, units: Array) -> Array:
    """Return the maximum distance of each value from the nearest multiple of its unit."""
    return np.where(values % units == 0, 0, np.minimum(np.abs(values), units / 2))
