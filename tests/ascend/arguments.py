"""Checks of the arguments with which CANN's operators are called, from their documentation for Atlas A2 and A3.

A device refuses a wrong call with ACLNN_ERR_PARAM_INVALID (161002); the stubs of CANN accept any. The rules admit only
what this project uses of an operator. Sources, of 2026: the document of each operator in CANN's repositories ops-math,
ops-nn and ops-transformer; for FlashAttentionScore, whose kernel is ATB's, `unpad_flash_attention_operation.cpp` and
`flash_attention_tiling.cpp` of ascend-transformer-boost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

LAST_DIMENSION: Final = 65535
MAX_EXPERTS_OF_A_TOKEN: Final = 512
_FLOATS: Final = ("float16", "bfloat16", "float32")
_HALVES: Final = ("float16", "bfloat16")
_NUMBERS: Final = (*_FLOATS, "int32", "int64")
_TYPE_NUMBERS: Final = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "int64": 9, "bool": 12, "bfloat16": 27}
"""Type -> its number in `aclDataType`."""
TH: Final = 5
"""Number of the layout [tokens, hidden] in MindSpore's FlashAttentionScore."""
_ANY_DISTANCE: Final = 2**31 - 1
_MASK_SIZE: Final = 128
_ONE_MASK: Final = 1
"""ATB's MASK_TYPE_NORM."""


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    is_nz: bool = False


class PlannedRequest(NamedTuple):
    """A request in ATB's plan of FlashAttentionScore."""

    queries: int
    keys: int
    first_query: int
    """First element of its queries, in elements of all queries."""
    first_key: int


Argument = Tensor | Sequence[Tensor] | Sequence[int] | float
"""Absent tensors and false are 0. A scalar is a tensor without dimensions."""


class ArgumentError(Exception):
    """A call that a device refuses."""


def check(call: str) -> None:
    """Check a line of the trace, such as `aclnnDynamicQuant float16[1,64] 0 int8[1,64] float32[1]`. Calls of operators
    without rules pass. Raise ArgumentError.
    """
    name, *given = call.split()
    if name in ALL_RULES:
        try:
            ALL_RULES[name](*map(_parse, given))
        except (ArgumentError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{call}: {error}") from error


def _parse(text: str) -> Argument:
    if (whole := re.fullmatch(r"list\((.*)\)", text)) is not None:
        return [_tensor(each) for each in whole[1].split(";") if each]
    if (whole := re.fullmatch(r"ints\((.*)\)", text)) is not None:
        return [int(each) for each in whole[1].split(",") if each]
    if (whole := re.fullmatch(r"requests\((.*)\)", text)) is not None:
        return [PlannedRequest(*map(int, each.split(","))) for each in whole[1].split(";") if each]
    if text.startswith("scalar:"):
        return Tensor(text.removeprefix("scalar:"), ())
    return _tensor(text) if "[" in text else float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else 0


def _tensor(text: str) -> Tensor:
    match = re.fullmatch(r"(\w+)\[([\d,]*)\](NZ)?", text)
    if match is None:
        raise ArgumentError(f"no tensor: {text}")
    return Tensor(match[1], tuple(int(each) for each in match[2].split(",") if each), match[3] is not None)


def _require(fulfilled: bool, rule: str) -> None:
    if not fulfilled:
        raise ArgumentError(rule)


def _quant_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: int,
    row_scale: Tensor,
    bias: int,
    left: int,
    right: int,
    y: Tensor,
) -> None:
    _require(x.dtype == weight.dtype == "int8", "both factors must be int8")
    _require(len(x.shape) == len(weight.shape) == 2, "both factors must have 2 dimensions")
    _require(not left, "the rows must not be transposed")
    _require(max(x.shape[-1], weight.shape[-1]) <= LAST_DIMENSION, f"a last dimension must be at most {LAST_DIMENSION}")
    n, k = weight.shape if right else weight.shape[::-1]
    _require(x.shape[1] == k, "the factors must have the same inner dimension")
    _require(scale.shape in ((1,), (n,)), "there must be one scale for each column")
    _require(row_scale == Tensor("float32", (x.shape[0],)), "there must be one float32 scale for each row")
    types = {"float16": ("float32",), "bfloat16": ("float32", "bfloat16")}
    _require(scale.dtype in types.get(y.dtype, ()), "the scales must be float32, or bfloat16 for bfloat16")
    _require(y.shape == (x.shape[0], n), "the result must be [rows, columns]")
    _require(not offset and not bias, "offset and bias are not used")


def _dynamic_quant(x: Tensor, smooth: int, y: Tensor, scales: Tensor) -> None:
    _require(x.dtype in _HALVES, "the rows must be float16 or bfloat16")
    _require(2 <= len(x.shape) <= 8, "the rows must have 2 to 8 dimensions")
    _require(not smooth, "smooth scales are not used")
    _require(y == Tensor("int8", x.shape), "the result must be int8 of the same shape")
    _require(scales == Tensor("float32", x.shape[:-1]), "there must be one float32 scale for each row")


def _grouped_matmul(*given: Argument) -> None:
    (x,), (weight,), *optional = given[:8]
    counts = given[8]
    _require(not any(optional), "bias, scales and offsets are not used")
    split, axis, kind, activation = given[12:16]
    (y,) = given[16]
    _require((split, axis, kind, activation) == (3, 0, 1, 0), "rows must be split by counts into one tensor")
    _require(len(weight.shape) == 3, "the weight must be [experts, in, out]")
    _require(x.shape[1] == weight.shape[1], "the factors must have the same inner dimension")
    _require(counts == Tensor("int64", weight.shape[:1]), "there must be one int64 count for each expert")
    types = {"float16": "float16", "bfloat16": "bfloat16", "int8": "int32"}
    _require(x.dtype == weight.dtype and types.get(x.dtype) == y.dtype, "the types must go together")
    _require(y.shape == (x.shape[0], weight.shape[2]), "the result must be [rows, out]")


def _gating(x: Tensor, finished: int, k: int, y: Tensor, experts: Tensor, rows: Tensor) -> None:
    _require(x.dtype in _FLOATS and y.dtype == x.dtype, "weights must have the type of the logits")
    _require(not finished and 0 < k <= min(x.shape[-1], 1024), "k must be at most the number of experts and 1,024")
    chosen = Tensor("int32", (x.shape[0], k))
    _require(y.shape == chosen.shape, "there must be k weights for each row")
    _require(experts == rows == chosen, "experts and rows must be int32 [rows, k]")


def _check_routing(x: Tensor, experts: Tensor, numbers: Sequence[int], destinations: Tensor, counts: Tensor) -> None:
    active, capacity, num_experts, drops, counted, _ = numbers
    _require(x.dtype in _FLOATS and len(x.shape) == 2, "the rows must be floats of 2 dimensions")
    _require(experts.dtype == "int32" and len(experts.shape) == 2, "the experts must be int32 [rows, k]")
    _require(experts.shape[0] == x.shape[0], "each row must have its experts")
    _require(active == capacity == drops == 0, "no row may be dropped")
    _require(num_experts > 0 and counted in (1, 2), "the counts need a number of experts")
    _require(destinations == Tensor("int32", (x.shape[0] * experts.shape[1],)), "destinations must be int32 [rows * k]")
    _require(counts == Tensor("int32", (num_experts,)), "there must be one int32 count for each expert")


def _init_routing(x: Tensor, experts: Tensor, *rest: Argument) -> None:
    *numbers, y, destinations, counts, _ = rest
    _check_routing(x, experts, numbers, destinations, counts)
    _require(y == Tensor(x.dtype, (destinations.shape[0], x.shape[1])), "the rows must be repeated for each expert")


def _init_routing_quant(x: Tensor, experts: Tensor, scale: int, offset: int, *rest: Argument) -> None:
    *numbers, mode, y, destinations, counts, _, scales = rest
    _check_routing(x, experts, numbers, destinations, counts)
    _require(mode == 1 and not scale and not offset, "rows must be quantized by their own scales")
    _require(y == Tensor("int8", (destinations.shape[0], x.shape[1])), "the rows must be int8")
    _require(scales == Tensor("float32", destinations.shape), "there must be one float32 scale for each row")


def _unpermute(x: Tensor, order: Tensor, weights: Tensor, padded: int, shape: Sequence[int], y: Tensor) -> None:
    _require(x.dtype in _FLOATS and y.dtype == x.dtype, "the sums must have the type of the rows")
    _require(weights.dtype in _FLOATS and len(weights.shape) == 2, "the weights must be floats [rows, k]")
    _require(weights.shape[1] <= MAX_EXPERTS_OF_A_TOKEN, f"k must be at most {MAX_EXPERTS_OF_A_TOKEN}")
    _require(order == Tensor("int32", (weights.shape[0] * weights.shape[1],)), "the order must be int32 [rows * k]")
    _require(x.shape[0] == order.shape[0] and not padded, "the rows must be those of the order")
    _require(y.shape == (weights.shape[0], x.shape[1]), "there must be one sum for each row")


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    sizes = [set(each) - {1} for each in zip(*padded, strict=True)]
    _require(all(len(each) < 2 for each in sizes), "the shapes must broadcast")
    return tuple(max(each, default=1) for each in sizes)


def _pair(types: Sequence[str], result: str | None, x: Tensor, y: Tensor, out: Tensor) -> None:
    """Check an operation of two tensors. `result`: the type of its result; None: that of the tensors."""
    _require(x.dtype == y.dtype and x.dtype in types, f"both tensors must have the same type, of {', '.join(types)}")
    _require(out.dtype == (result or x.dtype), f"the result must be {result or 'of the same type'}")
    _require(out.shape == _broadcast(x.shape, y.shape), "the result must have the shape of the broadcast tensors")


def _sum(x: Tensor, y: Tensor, factor: Tensor, out: Tensor) -> None:
    _pair(_NUMBERS, None, x, y, out)
    _require(factor == Tensor("int64", ()), "the factor of the second tensor must be an int64 scalar")


def _product_with_scalar(x: Tensor, factor: Tensor, out: Tensor) -> None:
    # A2 and A3 multiply in the type of the tensor, in float32 for bfloat16, whatever the type of the scalar is.
    _require(x.dtype in _FLOATS, "the tensor must be of floats")
    _require(factor.shape == () and factor.dtype in (*_NUMBERS, "float64"), "the factor must be a scalar number")
    _require(out == x, "the result must be like the tensor")


def _sum_with_scalar(x: Tensor, other: Tensor, factor: Tensor, out: Tensor) -> None:
    _product_with_scalar(x, other, out)
    _require(factor == Tensor("int64", ()), "the factor of the scalar must be an int64 scalar")


def _copied(target: Tensor, source: Tensor) -> None:
    _require(target.dtype in _TYPE_NUMBERS and source.dtype in _TYPE_NUMBERS, "the tensors must have known types")
    _require(target.shape == _broadcast(target.shape, source.shape), "the source must broadcast to the target")


def _filled(x: Tensor, mask: Tensor, value: Tensor) -> None:
    _require(mask.dtype == "bool" and x.shape == _broadcast(x.shape, mask.shape), "the mask must be bool, like x")
    _require(value in (Tensor(x.dtype, ()), Tensor(x.dtype, (1,))), "the value must be one element of the type of x")


def _selected(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    _require(index.dtype in ("int32", "int64") and len(index.shape) <= 1, "the index must be integers in a row")
    size = index.shape[0] if index.shape else 1
    _require(out == Tensor(x.dtype, _resized(x, dim, size)), "there must be a slice for each index")


def _matmul(x: Tensor, y: Tensor, out: Tensor, _: int) -> None:
    _require(x.dtype == y.dtype == out.dtype and x.dtype in _FLOATS, "all must have the same type")
    _require(len(x.shape) >= 2 and len(y.shape) >= 2 and x.shape[-1] == y.shape[-2], "inner dimensions must be equal")
    batch = _broadcast(x.shape[:-2], y.shape[:-2]) if len(x.shape) + len(y.shape) > 4 else ()
    _require(out.shape == (*batch, x.shape[-2], y.shape[-1]), "the result must be [.., rows, columns]")


def _permuted(x: Tensor, order: Sequence[int], out: Tensor) -> None:
    axes = [_dimension(x, each) for each in order]
    _require(sorted(axes) == list(range(len(x.shape))), "the order must have each dimension once")
    _require(out == Tensor(x.dtype, tuple(x.shape[axis] for axis in axes)), "the dimensions must be in this order")


def _of_each_element(types: Sequence[str], x: Tensor, out: Tensor) -> None:
    _require(x.dtype in types and out == x, f"both tensors must be alike, of {', '.join(types)}")


def _cast(x: Tensor, number: int, out: Tensor) -> None:
    _require(
        x.dtype in _TYPE_NUMBERS and _TYPE_NUMBERS.get(out.dtype) == number, "the number must be the result's type"
    )
    _require(out.shape == x.shape, "the result must have the same shape")


def _select(chosen: Tensor, x: Tensor, y: Tensor, out: Tensor) -> None:
    _require(chosen.dtype == "bool", "the condition must be bool")
    _require(x.dtype == y.dtype == out.dtype and x.dtype in _NUMBERS, "all values must have the same type")
    _require(out.shape == _broadcast(chosen.shape, x.shape, y.shape), "the result must have the broadcast shape")


def _dimension(x: Tensor, dim: int) -> int:
    _require(-len(x.shape) <= dim < len(x.shape), "the dimension must exist")
    return int(dim) % len(x.shape)


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    at = _dimension(x, dim)
    return (*x.shape[:at], int(size), *x.shape[at + 1 :])


def _reduced(x: Tensor, dims: Sequence[int], keep: int) -> tuple[int, ...]:
    (dim,) = dims
    shape = _resized(x, dim, 1)
    at = _dimension(x, dim)
    return shape if keep else (*shape[:at], *shape[at + 1 :])


def _reduce_max(x: Tensor, dims: Sequence[int], keep: int, out: Tensor) -> None:
    _require(x.dtype in _NUMBERS and out == Tensor(x.dtype, _reduced(x, dims, keep)), "the result must be the maximum")


def _reduce_sum(x: Tensor, dims: Sequence[int], keep: int, number: int, out: Tensor) -> None:
    _require(x.dtype in (*_NUMBERS, "bool") and _TYPE_NUMBERS.get(out.dtype) == number, "the number must be its type")
    _require(out.shape == _reduced(x, dims, keep), "the result must have the reduced shape")


def _max_and_index(x: Tensor, dim: int, keep: int, largest: Tensor, index: Tensor) -> None:
    _require(x.dtype in _FLOATS, "the values must be floats: A2 and A3 take no int32")
    shape = _reduced(x, [dim], keep)
    _require(largest == Tensor(x.dtype, shape), "the largest value must have the type of the values")
    _require(index.dtype in ("int32", "int64") and index.shape == shape, "the index must be int32 or int64")


def _cumulated(x: Tensor, dim: int, number: int, out: Tensor) -> None:
    _dimension(x, dim)
    _require(x.dtype in _NUMBERS and x.dtype != "int64", "int64 would be added on the AICPU")
    _require(out == x and _TYPE_NUMBERS[x.dtype] == number, "the result must be like the tensor")


def _topk(x: Tensor, k: int, dim: int, largest: int, ordered: int, values: Tensor, indices: Tensor) -> None:
    _require(x.dtype in _FLOATS, "the values must be floats")
    _require(not isinstance(k, Tensor) and 0 <= k <= x.shape[_dimension(x, dim)], "k must be a number of values")
    _require(largest == ordered == 1, "the largest values must come in order")
    shape = _resized(x, dim, k)
    _require(
        values == Tensor(x.dtype, shape) and indices == Tensor("int64", shape), "there must be k values and indices"
    )


def _gather(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    at = _dimension(x, dim)
    _require(index.dtype in ("int32", "int64") and len(index.shape) == len(x.shape), "the index must be an integer")
    sizes = enumerate(zip(index.shape, x.shape, strict=True))
    _require(all(own <= size for each, (own, size) in sizes if each != at), "the index must have no more rows")
    _require(out == Tensor(x.dtype, index.shape), "the result must have the shape of the index")


def _slice(x: Tensor, dim: int, start: int, end: int, step: int, out: Tensor) -> None:
    size = x.shape[_dimension(x, dim)]
    _require(0 <= start < end <= size and step == 1, "start and end must be in order and within the tensor")
    _require(
        out == Tensor(x.dtype, _resized(x, dim, end - start)), "the result must have the columns from start to end"
    )


def _split(x: Tensor, sizes: Sequence[int], dim: int, parts: Sequence[Tensor]) -> None:
    _require(sum(sizes) == x.shape[_dimension(x, dim)], "the sizes must add up to the dimension")
    _require(parts == [Tensor(x.dtype, _resized(x, dim, each)) for each in sizes], "each part must have its size")


def _concat(parts: Sequence[Tensor], dim: int, out: Tensor) -> None:
    total = sum(each.shape[_dimension(each, dim)] for each in parts)
    whole = {Tensor(each.dtype, _resized(each, dim, total)) for each in parts}
    _require(whole == {out}, "the parts must have one type and differ in the joined dimension only")


def _rms_norm(x: Tensor, gamma: Tensor, out: Tensor, rstd: Tensor) -> None:
    _require(x.dtype in _FLOATS and gamma == Tensor(x.dtype, x.shape[-1:]), "gamma must have a value for each column")
    _require(out == x and rstd == Tensor("float32", (*x.shape[:-1], 1)), "the result must be like the rows")


def _zero(x: Tensor) -> None:
    _require(x.dtype in _TYPE_NUMBERS, "the tensor must have a known type")


def _attention(q: int, k: int, v: int, *rest: Argument) -> None:
    """Check a node of MindSpore's FlashAttentionScore. Other nodes compute queries, keys, values and lengths: 0."""
    shift, drop, padding, mask, prefix, q_lens, k_lens, heads, keep, scale, before, after, precision, layout, mode = (
        rest
    )
    _require(not any((q, k, v, q_lens, k_lens)), "queries, keys, values and lengths must be computed")
    _require(not any((shift, drop, padding, prefix)), "only a mask may be given")
    _require(mask.shape == (_MASK_SIZE, _MASK_SIZE), "the mask must be 128 x 128")
    _require(mask.dtype in _HALVES, "the mask must be float16 or bfloat16")
    _require(heads > 0 and scale > 0, "heads and scale must be positive")
    _require(keep == 1, "nothing may be dropped")
    _require(before == after == _ANY_DISTANCE, "no distance may be excluded")
    _require(precision == 0 and layout == TH and mode == 0, "rows must be [tokens, hidden], in the default modes")


def _attention_plan(
    key: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    value_size: int,
    mask_type: int,
    columns: int,
    is_triangle: int,
    rows: int,
    requests: Sequence[PlannedRequest],
) -> None:
    """Check a plan of ATB's UNPAD_FLASH_ATTENTION_ENCODER_ND.

    `key`: 0 for float16, 1 for bfloat16. `rows`: tokens of the step.
    """
    _require(key in (0, 1), "queries must be float16 or bfloat16")
    _require(heads % kv_heads == 0, "query heads must be a multiple of key heads")
    _require(
        head_size == value_size and head_size % 16 == 0 and head_size <= 256, "a head must have at most 256 columns"
    )
    _require((mask_type, columns, is_triangle) == (_ONE_MASK, _MASK_SIZE, 1), "the mask must be a triangle of 128")
    _require(sum(each.keys for each in requests) == rows, "lengths must add up to the tokens, so not be cumulative")
    before = 0
    for each in requests:
        _require(each.queries == each.keys, "a prompt must be whole, as the mask begins at its first token")
        _require(each.first_query == before * heads * head_size, "each request must begin behind the last one")
        _require(each.first_key == before * kv_heads * head_size, "each request must begin behind the last one")
        before += each.queries


RULES: Final[Mapping[str, Callable[..., None]]] = {
    **dict.fromkeys(("aclnnAdd", "aclnnSub"), _sum),
    **dict.fromkeys(("aclnnMul", "aclnnMaximum", "aclnnMinimum"), partial(_pair, _NUMBERS, None)),
    **dict.fromkeys(
        ("aclnnEqTensor", "aclnnGeTensor", "aclnnGtTensor", "aclnnLeTensor", "aclnnLtTensor"),
        partial(_pair, _NUMBERS, "bool"),
    ),
    "FlashAttentionScore": _attention,
    "aclnnAmax": _reduce_max,
    "aclnnCast": _cast,
    "aclnnCat": _concat,
    "aclnnCumsum": _cumulated,
    "aclnnDiv": partial(_pair, _FLOATS, None),
    "aclnnDynamicQuant": _dynamic_quant,
    "aclnnExp": partial(_of_each_element, _FLOATS),
    "aclnnFloor": partial(_of_each_element, _NUMBERS),
    "aclnnFloorDivide": partial(_pair, ("int32", "int64"), None),
    "aclnnGather": _gather,
    "aclnnGroupedMatmulV4": _grouped_matmul,
    "aclnnInplaceZero": _zero,
    "aclnnMaxDim": _max_and_index,
    "aclnnMoeGatingTopKSoftmax": _gating,
    "aclnnMoeInitRoutingQuantV2": _init_routing_quant,
    "aclnnMoeInitRoutingV2": _init_routing,
    "aclnnMoeTokenUnpermute": _unpermute,
    "aclnnMuls": _product_with_scalar,
    "aclnnQuantMatmulV4": _quant_matmul,
    "aclnnReduceSum": _reduce_sum,
    "aclnnRmsNorm": _rms_norm,
    "aclnnSWhere": _select,
    "aclnnSlice": _slice,
    "aclnnSplitWithSize": _split,
    "aclnnTopk": _topk,
    "atbFlashAttention": _attention_plan,
}
"""Operator -> the check of its arguments, in CANN's order. `FlashAttentionScore` is MindSpore's node, and
`atbFlashAttention` the plan of its kernel.
"""
MINDFORMERS_RULES: Final[Mapping[str, Callable[..., None]]] = {
    **dict.fromkeys(
        ("aclnnCos", "aclnnNanToNum", "aclnnReciprocal", "aclnnSigmoid", "aclnnSin"), partial(_of_each_element, _FLOATS)
    ),
    "aclnnAdds": _sum_with_scalar,
    "aclnnDivs": _product_with_scalar,
    "aclnnIndexSelect": _selected,
    "aclnnInplaceCopy": _copied,
    "aclnnInplaceMaskedFillTensor": _filled,
    "aclnnMatmul": _matmul,
    "aclnnPermute": _permuted,
    "aclnnPowTensorTensor": partial(_pair, _FLOATS, None),
}
"""The same for the operators that only MindFormers' classes call."""
ALL_RULES: Final = {**RULES, **MINDFORMERS_RULES}
