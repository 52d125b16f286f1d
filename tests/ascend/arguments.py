"""Checks of the arguments with which CANN's operators are called, from their documentation for Atlas A2 and A3.

A device refuses such a call with ACLNN_ERR_PARAM_INVALID (161002); the stubs of CANN accept any.

Read in the repositories ops-nn and ops-transformer of CANN (2026), in the document of each operator. The rules admit
only what this project uses of an operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

LAST_DIMENSION: Final = 65535
MAX_EXPERTS_OF_A_TOKEN: Final = 512
_FLOATS: Final = ("float16", "bfloat16", "float32")
_HALVES: Final = ("float16", "bfloat16")


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    is_nz: bool = False


Argument = Tensor | Sequence[Tensor] | int
"""Absent tensors and false are 0."""


class ArgumentError(Exception):
    """A call that a device refuses."""


def check(call: str) -> None:
    """Check a line of the trace, such as `aclnnDynamicQuant float16[1,64] 0 int8[1,64] float32[1]`. Calls of operators
    without rules pass. Raise ArgumentError.
    """
    name, *given = call.split()
    if name in RULES:
        try:
            RULES[name](*map(_parse, given))
        except (ArgumentError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{call}: {error}") from error


def _parse(text: str) -> Argument:
    if (whole := re.fullmatch(r"list\((.*)\)", text)) is not None:
        return [_tensor(each) for each in whole[1].split(";") if each]
    return _tensor(text) if "[" in text else int(text) if re.fullmatch(r"-?\d+", text) else 0


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


def _unpermute(x: Tensor, order: Tensor, weights: Tensor, padded: int, shape: int, y: Tensor) -> None:
    _require(x.dtype in _FLOATS and y.dtype == x.dtype, "the sums must have the type of the rows")
    _require(weights.dtype in _FLOATS and len(weights.shape) == 2, "the weights must be floats [rows, k]")
    _require(weights.shape[1] <= MAX_EXPERTS_OF_A_TOKEN, f"k must be at most {MAX_EXPERTS_OF_A_TOKEN}")
    _require(order == Tensor("int32", (weights.shape[0] * weights.shape[1],)), "the order must be int32 [rows * k]")
    _require(x.shape[0] == order.shape[0] and not padded, "the rows must be those of the order")
    _require(y.shape == (weights.shape[0], x.shape[1]), "there must be one sum for each row")


RULES: Final[Mapping[str, Callable[..., None]]] = {
    "aclnnDynamicQuant": _dynamic_quant,
    "aclnnGroupedMatmulV4": _grouped_matmul,
    "aclnnMoeGatingTopKSoftmax": _gating,
    "aclnnMoeInitRoutingQuantV2": _init_routing_quant,
    "aclnnMoeInitRoutingV2": _init_routing,
    "aclnnMoeTokenUnpermute": _unpermute,
    "aclnnQuantMatmulV4": _quant_matmul,
}
"""Operator -> the check of its arguments, in CANN's order."""
