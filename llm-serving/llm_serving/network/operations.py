"""The operations that describe a network, the values they read and write, and the weights they use.

This module computes nothing. A value is a matrix with one row for each token of a step. A weight names the tensors of
a model folder that it is assembled from. SIGNATURES lists the inputs, weights and attributes of each operation:

    embedding         rows of a table by token id, or by position; zeros for a token whose row another rank holds
    linear            x * weight^T, optionally with a bias, one weight for each head, or adapters (`adapters.py`)
    rms_norm          root mean square norm of rows, or of the heads in a row (Zhang and Sennrich 2019); if `centred`,
                      layer norm (Ba et al. 2016), which subtracts the mean first
    rope              rotary position embedding (Su et al. 2021) of elements i and i + head_dim / 2 together; a bias may
                      be added before it, and an offset subtracted after it
    store_kv          write keys and values to the cache of a layer
    attention         attention over that cache, causal or bidirectional
    select_keys       the keys with the largest scores of a sparse attention (DeepSeek-V3.2, 2025)
    gated_activation  function(first half of a row) * second half
    activation        function(x)
    add               a + scale * b
    multiply          a * function(b), or a times a vector
    causal_conv       depthwise convolution of a row with the rows before it in its sequence
    delta_rule        linear attention with a state for each head, by the gated delta rule
    ssm               state space model with a state for each head (Mamba-2)
    mix_streams       add a weighted sum of the equal parts of x to each residual stream (AltUp, Baykal et al. 2023)
    match_streams     `like`, then the parts of x scaled to the root mean square of `like`; if `sums`, all of them added
    sparsify          max(x - threshold, 0), with a threshold of mean + scale * standard deviation of the row
    sigmoid_gate      x * sigmoid(gate), one gate for each row
    route             the top-k experts of each row and their weights
    experts           the sum over a row's experts of topk_weight * down(silu(gate) * up)
    all_reduce        the sum of a value over all ranks, added in rank order
    lm_head           float32 logits of the sampled rows; all ranks get the logits of every part of the head
    hidden_states     the sampled rows themselves in float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.dtypes import MODEL_DTYPES, from_bfloat16, round_to_bfloat16

Float32Array = NDArray[np.float32]

ElementType = Literal["model", "float32", "int32"]
"""Type of the elements of a value or a weight. "model" means the model dtype."""


@dataclass(frozen=True)
class Signature:
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    attributes: tuple[str, ...]


def _signature(outputs: str, inputs: str, weights: str, attributes: str) -> Signature:
    return Signature(*(tuple(part.split()) for part in (outputs, inputs, weights, attributes)))


SIGNATURES: Final[Mapping[str, Signature]] = {
    "embedding": _signature("y", "", "table", "scale first rows of_positions"),
    "linear": _signature("y", "x residual", "weight bias a b ranks parts", "function scale tiled consumer heads"),
    "rms_norm": _signature("y residual_out", "x residual", "gamma beta", "eps group centred consumer"),
    "rope": _signature("y", "x", "cos sin bias offset", ""),
    "store_kv": _signature("", "k v", "", "layer layer_group"),
    "attention": _signature(
        "y",
        "q q_rope k v selected",
        "slopes cos sin q_gamma k_gamma k_bias k_offset sinks",
        "layer scale window cap eps causal consumer chunk layer_group",
    ),
    "gated_activation": _signature("y", "x", "", "function"),
    "add": _signature("y", "a b", "", "scale"),
    "route": _signature(
        "topk_weights topk_ids",
        "x",
        "weight bias correction factors",
        "top_k score normalise scale groups top_groups margin",
    ),
    "experts": _signature(
        "y",
        "x topk_weights topk_ids residual",
        "gate_up down gate_up_bias down_bias",
        "function scale experts scales_input",
    ),
    "lm_head": _signature("", "x", "weight bias", "scale cap tiled first rows"),
    "select_rows": _signature("y", "x", "", ""),
    "sigmoid_gate": _signature("y", "x gate", "", ""),
    "hidden_states": _signature("", "x", "", ""),
    "all_reduce": _signature("y", "x", "", ""),
    "activation": _signature("y", "x", "", "function"),
    "multiply": _signature("y", "a b", "gamma", "function"),
    "causal_conv": _signature("y", "x", "taps bias", "function state"),
    "delta_rule": _signature("y", "q k v a b", "rates bias", "scale eps heads state"),
    "ssm": _signature("y", "c b x dt", "rates bias skip", "low high heads state"),
    "mix_streams": _signature("y", "base x coefficients", "", "streams offset first"),
    "match_streams": _signature("y", "like x", "", "eps sums"),
    "sparsify": _signature("y", "x", "", "scale"),
    "select_keys": _signature("selected", "q weights", "", "layer top_k"),
}
"""Operation kind -> signature. The position of a kind is its number in a program.

Model families leave some roles to `network.rewriting` (`residual`, `residual_out`, `tiled`, `consumer`, keys and rotary
embedding of `attention`). `network.sharding` sets `first` and `rows`: the weight holds the rows from `first` of a table
or head with `rows` rows. `rows` is 0 if the weight is not split. `network.adapters` sets `a`, `b`, `ranks` and `parts`.
"""


BY_TOKEN: Final[Mapping[str, Any]] = {"scale": 1.0, "first": 0, "rows": 0, "of_positions": False}
"""Attributes of an embedding of token ids that is neither scaled nor sharded."""


@dataclass(frozen=True, eq=False)
class Value:
    """A matrix with a row of `width` elements for each token. A view has `width` columns of `base`, from `start`."""

    name: str
    width: int
    dtype: ElementType = "model"
    base: Value | None = None
    start: int = 0

    @property
    def root(self) -> Value:
        return self.base or self


Transform = Callable[[Float32Array], Float32Array]


@dataclass(frozen=True)
class Weight:
    """A parameter, and how it is assembled from the tensors of a model folder. Equal weights share one parameter.

    Attributes:
        names, stored_shapes: Tensors, stacked along their rows, and the shape of each.
        shape: Shape of the parameter: (rows, columns) for matrices and tables, (size,) for vectors.
        rows, columns: Row i of the parameter is row rows[i] of the stack; -1 is a row of zeros. None keeps the order.
        transposed: Whether the last two axes of each tensor are exchanged first.
        transform: Function that is applied to the float32 values.
        generate: Function of num_positions that returns the parameter, for a weight that no tensor stores.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored_shapes: tuple[tuple[int, ...], ...] = ()
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    transform: Transform | None = None
    generate: Callable[[int], Float32Array] | None = None
    dtype: ElementType = "model"
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a network. SIGNATURES lists the inputs, weights, outputs and attributes of each `kind`."""

    kind: str
    inputs: Mapping[str, Value]
    weights: Mapping[str, Weight]
    outputs: Mapping[str, Value]
    attributes: Mapping[str, Any]

    def changed(self, **parts: Mapping[str, Any]) -> Operation:
        fields = {name: {**getattr(self, name), **parts.get(name, {})} for name in _PARTS}
        return Operation(self.kind, **fields)


_PARTS: Final = ("inputs", "weights", "outputs", "attributes")


ELEMENT_BYTES: Final[Mapping[str, int]] = {dtype.name: dtype.num_bytes for dtype in MODEL_DTYPES.values()}


def rounded_to(value: np.float32, dtype: str) -> np.float32:
    """Round a finite number to the nearest value of a model dtype, ties to even."""
    if dtype == "float16":
        return np.float32(np.float16(value))
    if dtype == "float32":
        return value
    rounded: np.float32 = from_bfloat16(round_to_bfloat16(np.asarray(value)))[0]
    return rounded
