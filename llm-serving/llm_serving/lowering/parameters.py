"""The Parameters of a network, read from a model folder in the order of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Backend
from llm_serving.backends.quantize import quantize
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import is_finite
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Weight
from llm_serving.network.quantization import BITS, WIDENED, Quantization, coded_weights, codes_of
from llm_serving.network.weights import made_of, parameter

_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight",),
    "route": ("weight",),
    "experts": ("gate_up", "down"),
    "output": ("weight",),
}
"""Operation -> roles of weights by which it multiplies."""


Parameters = Mapping[Weight, Sequence[ms.Parameter]]
"""One for each weight; codes and scales; of experts perhaps one for each of them."""


def parameters_of(
    network: Network,
    backend: Backend,
    reader: WeightReader,
    max_positions: int,
    *,
    as_cells: bool,
    quantization: Quantization | None = None,
) -> Parameters:
    """Makes the Parameter of every weight, one after the other: a stacked weight takes memory until it is packed.

    Args:
        network: The description.
        backend: Makes the Parameters.
        reader: Of the folder; it is read once.
        max_positions: Longest context of a row, in tokens.
        as_cells: Experts have Parameters of their own form, and biases are tables of one row.
        quantization: How weights are kept; each is rounded by itself, when it is read.

    Raises:
        ModelError: The folder lacks a tensor, has one of another shape or one too many, or one with an element that is
            infinite or no number.
    """
    multiplied = products(network.operations)
    coded = coded_weights(network, quantization)
    experts = _experts(network.operations) if as_cells else {}
    biases = {each.weights["bias"] for each in network.operations if "bias" in each.weights}
    made: dict[Weight, list[ms.Parameter]] = {}
    for index, weight in enumerate(network.weights):
        name = f"weights.{index}"
        if quantization is not None and weight in coded:
            kept = coded[weight]
            codes = _codes(weight, reader, kept, quantization.group_size)
            if not as_cells:
                made[weight] = [backend.coded_weight(codes, kept in WIDENED, name)]
            elif weight in experts:
                made[weight] = list(backend.quantized_expert_weights(codes, experts[weight], name))
            else:
                made[weight] = list(backend.quantized_weight(codes, name))
            continue
        values = parameter(weight, reader, max_positions)
        if weight.made is None and not is_finite(values):
            where = reader.first_not_finite(weight.names) or ", ".join(weight.names[:3])
            raise ModelError(f"{where} must hold finite numbers only")
        if weight in experts:
            made[weight] = list(backend.expert_weights(values, experts[weight], name))
        elif weight in multiplied:
            made[weight] = [backend.linear_weight(values, name)]
        elif weight.kind == "float32":
            made[weight] = [backend.numbers(values, name)]
        elif values.ndim == 1 and not (weight in biases and as_cells):
            made[weight] = [backend.vector(values, name=name)]
        else:
            made[weight] = [backend.table(np.atleast_2d(values), name)]
    for name in network.optional:
        reader.leave(name)
    reader.check_all_taken()
    return made


def _codes(weight: Weight, reader: WeightReader, kept: QuantizationName, group_size: int) -> QuantizedTensor:
    """As the folder has them, where products take those; otherwise rounded anew."""
    parts = [reader.take_packed(name, shape) for name, shape in zip(weight.names, weight.stored, strict=True)]
    if (stored := codes_of(weight, parts, kept)) is not None:
        return stored
    values = made_of(weight, [part.dequantized() if isinstance(part, QuantizedTensor) else part for part in parts])
    try:
        return quantize(values, BITS[kept], group_size if BITS[kept] == 4 else None)
    except ModelError as error:
        raise ModelError(f"{', '.join(weight.names[:3])}: {error}") from None


def _experts(operations: Iterable[Operation]) -> dict[Weight, int]:
    """Number of experts in a weight."""
    routed = [each for each in operations if each.kind == "experts"]
    return {each.weights[role]: each.attributes["experts"] for each in routed for role in ("gate_up", "down")}


def products(operations: Iterable[Operation]) -> set[Weight]:
    """The weights by which an operation multiplies."""
    return {each.weights[role] for each in operations for role in _PRODUCTS.get(each.kind, ())}
