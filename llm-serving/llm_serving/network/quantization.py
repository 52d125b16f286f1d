"""Which weights of a network are kept in a few bits, and how many bytes that leaves.

Norms, biases, the weights that choose experts, and tables that nothing multiplies by stay in the model dtype: they are
few, and much hangs on each of them. The head has 8 bits at least; where the table of embeddings is the same tensor it
is the same memory, and its rows are looked up as its codes say.

What graphs of Cells have no operations for, so that a model is refused before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.enums import QuantizationName
from llm_serving.formats.quantized_tensor import SYMMETRIC_ZERO, QuantizedTensor
from llm_serving.formats.stored_tensor import Array
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Weight

_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("weight",),
    "experts": ("gate_up", "down"),
    "output": ("weight",),
}
"""Operation -> roles of the weights that are kept in codes."""

LEAST_GROUP: Final = 32
"""Inputs with one scale, at least; and a power of two."""
_IN_8_BITS: Final = {
    QuantizationName.W4A16: QuantizationName.W8A16,
    QuantizationName.W4A8: QuantizationName.W8A8,
}
"""What takes the place of 4 bits in the head, and in weights whose rows groups do not fill."""
WIDENED: Final = frozenset({QuantizationName.W8A16, QuantizationName.W4A16})
"""Those that multiply rows as they are; others bring them to 8 bits."""
BITS: Final[Mapping[QuantizationName, int]] = {
    QuantizationName.W8A8: 8,
    QuantizationName.W8A16: 8,
    QuantizationName.W4A16: 4,
    QuantizationName.W4A8: 4,
}
"""Of a weight."""


@dataclass(frozen=True)
class Quantization:
    """
    Attributes:
        name: How weights are kept, the head perhaps in more bits.
        group_size: Inputs with one scale, in weights of 4 bits.
    """

    name: QuantizationName
    group_size: int = 128


def coded_weights(network: Network, quantization: Quantization | None) -> dict[Weight, QuantizationName]:
    """How each weight is kept that has no elements of the model dtype; none without quantisation."""
    if quantization is None:
        return {}
    name = quantization.name
    coded = {each.weights[role]: name for each in network.operations for role in _ROLES.get(each.kind, ())}
    coded[network.head.weights["weight"]] = _IN_8_BITS.get(name, name)
    return {weight: _in_groups(weight, kept, quantization.group_size) for weight, kept in coded.items()}


def _in_groups(weight: Weight, kept: QuantizationName, group_size: int) -> QuantizationName:
    """Rows that groups do not fill are kept in 8 bits."""
    return kept if weight.shape[-1] % group_size == 0 else _IN_8_BITS.get(kept, kept)


def codes_of(
    weight: Weight, parts: Sequence[QuantizedTensor | Array], kept: QuantizationName
) -> QuantizedTensor | None:
    """A weight in the very codes that its tensors are stored in; None where products of `kept` do not take them."""
    tensors = [part for part in parts if isinstance(part, QuantizedTensor)]
    forms = {(each.bits, each.group_size, each.columns is None) for each in tensors}
    if len(tensors) < len(parts) or len(forms) > 1 or weight.columns is not None or weight.change is not None:
        return None
    first = tensors[0]
    if first.columns is not None or not _can_multiply(kept, first) or weight.shape[-1] != first.shape[1]:
        return None
    codes, scales = (np.concatenate([getattr(each, name) for each in tensors]) for name in ("codes", "scales"))
    has_zeros = any(each.zeros is not None for each in tensors)
    zeros = np.concatenate([_zeros(each) for each in tensors]) if has_zeros else None
    if weight.rows is not None:
        at = np.array(weight.rows)
        rows = np.maximum(at, 0)
        codes, zeros = codes[rows], None if zeros is None else zeros[rows]
        scales = np.where(at[:, None] < 0, np.float32(0), scales[rows])  # which makes a row of zeros
    return QuantizedTensor(codes, scales, zeros, first.bits, first.group_size)


def _zeros(tensor: QuantizedTensor) -> NDArray[np.uint8]:
    """Of 4 bits."""
    return np.full(tensor.scales.shape, SYMMETRIC_ZERO, np.uint8) if tensor.zeros is None else tensor.zeros


def _can_multiply(kept: QuantizationName, tensor: QuantizedTensor) -> bool:
    group = tensor.group_size
    in_groups = kept != QuantizationName.W8A8 and group >= LEAST_GROUP and group & (group - 1) == 0
    return tensor.bits == BITS[kept] and (tensor.num_groups == 1 or in_groups)


def spared_bytes(network: Network, quantization: Quantization | None, dtype_bytes: int) -> int:
    """Bytes by which weights in codes are smaller than in the model dtype; scales and sums are 4 bytes each."""
    total = 0
    for weight, kept in coded_weights(network, quantization).items():
        assert quantization is not None
        rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
        numbers = {QuantizationName.W8A8: 2, QuantizationName.W8A16: 1}.get(kept, columns // quantization.group_size)
        total += rows * (columns * dtype_bytes - columns * BITS[kept] // 8 - 4 * numbers)
    return total


_LATENT: Final = "attention to latent keys"


def lacking_in_cells(network: Network) -> str | None:
    """What a network needs and no Cell computes; None where there is nothing."""
    for each in network.operations:
        if each.kind == "linear" and each.attributes["heads"] > 1:
            return "products with a weight for each head"
        if _is_latent(each):
            return _LATENT
    return None


def lacking_of_codes(quantization: Quantization | None) -> str | None:
    """What weights that are kept so need and the primitives of Ascend do not have; None where they have everything."""
    if quantization is None or quantization.name == QuantizationName.W8A8:
        return None
    return f"products of {quantization.name} weights"


def lacking_in_coded_cache(network: Network) -> str | None:
    """What a network needs of keys and values that a cache of 8 bits has not; None where there is nothing."""
    return _LATENT if any(map(_is_latent, network.operations)) else None


def lacking(network: Network, num_positions: int) -> str | None:
    """What a network needs and the primitives of Ascend do not have; None where they have everything.

    Args:
        network: The description.
        num_positions: Longest context that is served: a window of as many tokens is none.
    """
    found = (_lacking_in(each, num_positions) for each in network.operations)
    return lacking_in_cells(network) or next(filter(None, found), None)


def _lacking_in(operation: Operation, num_positions: int) -> str | None:
    if operation.kind == "route" and not _is_softmax(operation):
        return "experts chosen by anything but the largest of a softmax"
    return _lacking_in_attention(operation, num_positions) if operation.kind == "attend" else None


def _is_latent(operation: Operation) -> bool:
    return operation.kind == "attend" and "q_turned" in operation.inputs


def _lacking_in_attention(operation: Operation, num_positions: int) -> str | None:
    if 0 < operation.attributes["window"] < num_positions:
        return f"attention with a window of {operation.attributes['window']} tokens"
    if operation.attributes["cap"]:
        return "attention with a cap on its scores"
    return "attention with slopes" if "slopes" in operation.weights else None


def _is_softmax(operation: Operation) -> bool:
    """Of `route`: MoeGatingTopKSoftmax chooses so."""
    attributes = operation.attributes
    return attributes["score"] == "softmax" and attributes["groups"] == 1 and "correction" not in operation.weights
