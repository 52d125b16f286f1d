"""What a network is made of: operations on named values, and the weights that they use. Nothing is computed here.

A value is rows of numbers, one row for each token of a step; a weight is named where it is used, with the tensors of a
model folder it is made of. The operations (SIGNATURES has what each reads and writes):

    gather      rows of a table, by token; zeros for a token whose row is not in it
    linear      x * weight^T, with a bias or without; a weight for each head where asked for
    norm        root mean square norm of rows, or of the heads in a row (Zhang and Sennrich 2019)
    rotate      rotary position embedding (Su et al. 2021), elements i and i + head_dim / 2 together
    store       keys and values into the cache of a layer
    attend      causal attention to that cache
    activate    function(first half of a row) * second half
    add         a + scale * b
    weigh       x * sigmoid(gate), one gate for each row
    route       the experts of each row, and their shares
    experts     the sum over a row's experts of share * down(silu(gate) * up)
    all_reduce  the sum of a value over all ranks, in their order
    output      float32 logits of the rows that give a result, whichever rank has the rows of the head
    states      those rows themselves, in float32

The types a model is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.dtypes import MODEL_DTYPES

Float32Array = NDArray[np.float32]

Kind = Literal["model", "float32", "int32"]
"""Type of the elements of a value or of a weight; "model" is the model dtype."""


@dataclass(frozen=True)
class Signature:
    """Roles of what an operation reads and writes, in the order of an instruction. Any of them may be absent."""

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    attributes: tuple[str, ...]


def _signature(outputs: str, inputs: str, weights: str, attributes: str) -> Signature:
    return Signature(*(tuple(part.split()) for part in (outputs, inputs, weights, attributes)))


SIGNATURES: Final[Mapping[str, Signature]] = {
    "gather": _signature("y", "", "table", "scale first rows"),
    "linear": _signature("y", "x added", "weight bias", "function scale ordered reader heads"),
    "norm": _signature("y sum", "x added", "gain", "eps group reader"),
    "rotate": _signature("y", "x", "cos sin", ""),
    "store": _signature("", "k v", "", "layer"),
    "attend": _signature("y", "q q_turned k v", "slopes cos sin q_gain k_gain", "layer scale window cap eps reader"),
    "activate": _signature("y", "x", "", "function"),
    "add": _signature("y", "a b", "", "scale"),
    "route": _signature("shares chosen", "x", "weight correction", "top_k score normalise scale groups top_groups"),
    "experts": _signature("y", "x shares chosen added", "gate_up down", "function scale experts"),
    "output": _signature("", "x", "weight", "scale cap ordered first rows"),
    "select": _signature("y", "x", "", ""),
    "weigh": _signature("y", "x gate", "", ""),
    "states": _signature("", "x", "", ""),
    "all_reduce": _signature("y", "x", "", ""),
}
"""By kind, in the order of their numbers. No family writes `select`, `states`, `added`, `sum`, `ordered`, `reader`, nor
what `attend` has of keys and rotation: those are for `network.rewriting`, as `all_reduce` is for `network.sharding`.
So are `first` and `rows`: the weight has the rows from `first` on of a table or head of `rows`; 0: it has them all."""


@dataclass(frozen=True, eq=False)
class Value:
    """Rows of `width` elements, one row for each token. A view is `width` columns of another value, from `start` on."""

    name: str
    width: int
    kind: Kind = "model"
    whole: Value | None = None
    start: int = 0

    @property
    def root(self) -> Value:
        return self.whole or self


Change = Callable[[Float32Array], Float32Array]


@dataclass(frozen=True)
class Weight:
    """A parameter, and what of a model folder it is made of. Two that are equal are one parameter.

    Attributes:
        names: Of the tensors, which are stacked along their rows.
        shape: Of the parameter; (rows, columns) of products and tables, (size,) of vectors.
        stored: Shape of each of the tensors.
        rows: Row i of the parameter is row rows[i] of the stack; -1 is a row of zeros. None: as they are stacked.
        columns: As `rows`, of the second axis.
        change: What is done to the float32 values, row by row.
        made: num_positions -> the parameter, which no tensor holds.
        kind: Of its elements.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: tuple[tuple[int, ...], ...] = ()
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    change: Change | None = None
    made: Callable[[int], Float32Array] | None = None
    kind: Kind = "model"


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation; roles that are absent have no entry."""

    kind: str
    inputs: Mapping[str, Value]
    weights: Mapping[str, Weight]
    outputs: Mapping[str, Value]
    attributes: Mapping[str, Any]

    def changed(self, **parts: Mapping[str, Any]) -> Operation:
        """This operation with entries of `inputs`, `weights`, `outputs` or `attributes` replaced or added."""
        fields = {name: {**getattr(self, name), **parts.get(name, {})} for name in _PARTS}
        return Operation(self.kind, **fields)


_PARTS: Final = ("inputs", "weights", "outputs", "attributes")


ELEMENT_BYTES: Final[Mapping[str, int]] = {dtype.name: dtype.num_bytes for dtype in MODEL_DTYPES.values()}


def rounded_to(value: np.float32, dtype: str) -> np.float32:
    """The nearest number of a model dtype, ties to even; finite numbers only."""
    if dtype == "float16":
        return np.float32(np.float16(value))
    if dtype == "float32":
        return value
    bits = value.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)
