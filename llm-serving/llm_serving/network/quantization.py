"""Rules of quantization: which weights are quantized, how many bytes this saves, and what the backends cannot compute.

Norm weights, biases, router weights and embeddings that are not also the LM head stay in the model dtype: they are
small or cheap to read, and the result is sensitive to them. The LM head has at least 8 bits. A token embedding that is
the same tensor as the head shares its quantized memory, and the lookup dequantizes rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.enums import QuantizationName
from llm_serving.formats.block_tensor import PANEL_ROWS, BlockTensor
from llm_serving.formats.packed import Quantized
from llm_serving.formats.quantized_tensor import ROTATED_BLOCK, SYMMETRIC_ZERO, QuantizedTensor, QValuesForm
from llm_serving.formats.stored_tensor import Array
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Weight

_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("weight",),
    "experts": ("gate_up", "down"),
    "lm_head": ("weight",),
}

MIN_GROUP_SIZE: Final = 32
"""Minimum number of inputs that share a scale. Group sizes are powers of two."""
_IN_8_BITS: Final = {
    QuantizationName.W4A16: QuantizationName.W8A16,
    QuantizationName.W4A8: QuantizationName.W8A8,
}
"""4-bit scheme -> 8-bit scheme of the LM head, and of weights whose columns do not divide into groups."""
WEIGHT_ONLY: Final = frozenset({QuantizationName.W8A16, QuantizationName.W4A16})
"""Schemes whose activations stay in the model dtype. All other schemes quantize activations to 8 bits."""
BITS: Final[Mapping[QuantizationName, int]] = {
    QuantizationName.W8A8: 8,
    QuantizationName.W8A16: 8,
    QuantizationName.W4A16: 4,
    QuantizationName.W4A8: 4,
}


@dataclass(frozen=True)
class Quantization:
    """How the weights of a network are quantized. `group_size`: number of inputs per scale of a 4-bit weight."""

    name: QuantizationName
    group_size: int = 128


def keeps_blocks(quantization: Quantization | None) -> bool:
    return quantization is None or quantization.name == QuantizationName.BLOCKS_A16


def quantized_weights(network: Network, quantization: Quantization | None) -> dict[Weight, QuantizationName]:
    if quantization is None or quantization.name in (QuantizationName.DEQUANTIZED, QuantizationName.BLOCKS_A16):
        return {}
    name = quantization.name
    quantized: dict[Weight, QuantizationName] = {
        each.weights[role]: name for each in network.operations for role in _ROLES.get(each.kind, ())
    }
    if network.head.kind == "lm_head":
        quantized[network.head.weights["weight"]] = _IN_8_BITS.get(name, name)
    return {
        weight: _IN_8_BITS.get(scheme, scheme) if weight.shape[-1] % quantization.group_size else scheme
        for weight, scheme in quantized.items()
    }


def schemes_of_stored(name: QuantizationName) -> tuple[QuantizationName, ...]:
    """Return scheme `name` and, for a 4-bit scheme, the 8-bit one: a folder may hold some matrices in 8 bits."""
    return tuple(dict.fromkeys((name, _IN_8_BITS.get(name, name))))


def stored_qvalues(
    weight: Weight, parts: Sequence[Quantized | Array], scheme: QuantizationName
) -> QuantizedTensor | None:
    """Return a weight's quantized values as stored in `parts`, or None if no kernel of `scheme` multiplies by them."""
    found = [part.as_quantized() if isinstance(part, BlockTensor) else part for part in parts]
    tensors = [_in_groups_of_products(part) for part in found if isinstance(part, QuantizedTensor)]
    forms = {each.form for each in tensors}
    if len(tensors) < len(parts) or len(forms) > 1 or weight.transform is not None:
        return None
    rotated = {each.rotated for each in tensors}
    if len(rotated) > 1 or (rotated == {True} and not _in_whole_blocks(weight.columns, ROTATED_BLOCK)):
        return None
    if not can_multiply(scheme, tensors[0].form):
        return None
    if weight.columns is not None:
        tensors = _with_columns(tensors, np.array(weight.columns))
    if not tensors:
        return None
    first = tensors[0]
    if weight.shape[-1] != first.shape[1]:
        return None
    qvalues, scales = (np.concatenate([getattr(each, name) for each in tensors]) for name in ("qvalues", "scales"))
    has_zeros = any(each.zeros is not None for each in tensors)
    zeros = np.concatenate([_zeros(each) for each in tensors]) if has_zeros else None
    if weight.rows is not None:
        at = np.array(weight.rows)
        rows = np.maximum(at, 0)
        qvalues, zeros = qvalues[rows], None if zeros is None else zeros[rows]
        scales = np.where(at[:, None] < 0, np.float32(0), scales[rows])  # with a scale of 0 all values of a row are 0
    return QuantizedTensor(qvalues, scales, zeros, first.bits, first.group_size, rotated=first.rotated)


def block_weights(network: Network) -> set[Weight]:
    """Return the weights that may stay in GGUF blocks: weights of matrix products, and the token embedding."""
    roles = {**_ROLES, "embedding": ("table",)}
    found = [each.weights[role] for each in network.operations for role in roles.get(each.kind, ())]
    return {*found, *network.head.weights.values()}


def stored_blocks(weight: Weight, parts: Sequence[Quantized | Array]) -> list[BlockTensor] | None:
    """Return the stored GGUF blocks of a weight, in row order, or None if the kernels cannot multiply by them."""
    blocks = [part for part in parts if isinstance(part, BlockTensor)]
    if len(blocks) < len(parts) or weight.columns is not None or weight.transform is not None:
        return None
    if any(each.shape[1] != weight.shape[-1] for each in blocks):
        return None
    segments = blocks if weight.rows is None else _picked_segments(blocks, np.array(weight.rows))
    return segments if all(each.shape[0] % PANEL_ROWS == 0 for each in segments[:-1]) else None


def _picked_segments(blocks: Sequence[BlockTensor], rows: NDArray[np.integer[Any]]) -> list[BlockTensor]:
    """Return `rows` of the stacked tensors; -1 is a row of zeros. Consecutive rows of one tensor form one segment."""
    starts = np.cumsum([0, *(each.shape[0] for each in blocks)])
    known = np.maximum.accumulate(np.where(rows >= 0, np.arange(len(rows)), 0))
    owners = np.searchsorted(starts, np.maximum(rows[known], 0), side="right") - 1
    ends = [*(np.flatnonzero(np.diff(owners)) + 1), len(rows)]
    segments = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        owner = int(owners[first])
        segments.append(blocks[owner].select(np.where(rows[first:last] < 0, -1, rows[first:last] - starts[owner])))
    return segments


def _zeros(tensor: QuantizedTensor) -> NDArray[np.uint8]:
    return np.full(tensor.scales.shape, SYMMETRIC_ZERO, np.uint8) if tensor.zeros is None else tensor.zeros


def _in_groups_of_products(tensor: QuantizedTensor) -> QuantizedTensor:
    """Split quantization groups to a power of two, as kernels require. A group of 96 inputs becomes 3 groups of 32."""
    size = _power_of_two_in(tensor.form.group_size)
    return tensor if size in (0, tensor.group_size) or tensor.g_idx is not None else tensor.with_groups_of(size)


def _with_columns(tensors: list[QuantizedTensor], columns: NDArray[np.int64]) -> list[QuantizedTensor]:
    """Return the given columns of quantized tensors. Halve the groups of inputs that share a scale until each group is
    taken as a whole or not at all. Return [] if this needs groups below MIN_GROUP_SIZE.
    """
    while True:
        picked = [each.with_columns(columns) for each in tensors]
        found = [each for each in picked if each is not None]
        size = tensors[0].group_size // 2
        if len(found) == len(tensors) or size < MIN_GROUP_SIZE:
            return found if len(found) == len(tensors) else []
        tensors = [each.with_groups_of(size) for each in tensors]


def _in_whole_blocks(columns: tuple[int, ...] | None, size: int) -> bool:
    """Return whether columns (None: all) consist of whole blocks, of which each begins at a multiple of `size`."""
    if columns is None:
        return True
    firsts = np.array(columns[::size])
    blocks = (firsts[:, None] + np.arange(size)).reshape(-1)
    return not (firsts % size).any() and np.array_equal(blocks, columns)


def _power_of_two_in(group_size: int) -> int:
    return group_size & -group_size


def can_multiply(scheme: QuantizationName, form: QValuesForm) -> bool:
    in_groups = scheme != QuantizationName.W8A8 and _power_of_two_in(form.group_size) >= MIN_GROUP_SIZE
    has_form = form.bits == BITS.get(scheme) and form.in_order and not form.has_zeros
    return has_form and (form.group_size == 0 or in_groups)


def bytes_saved(
    network: Network,
    quantization: Quantization | None,
    dtype_bytes: int,
    stored: QValuesForm | None = None,
    in_8_bits: Collection[str] = (),
) -> int:
    """Return how many bytes quantization saves. `stored`: form of the quantized values in the model's files, if any.
    `in_8_bits`: modules whose stored values have 8 bits, whatever `stored` says. Weights that stack modules of 4 and 8
    bits are dequantized, and save nothing.
    """
    total = 0
    for weight, scheme in quantized_weights(network, quantization).items():
        assert quantization is not None
        num_named = sum(name.removesuffix(".weight") in in_8_bits for name in weight.names)
        if 0 < num_named < len(weight.names):
            continue
        if num_named or (stored is not None and stored.bits == 8):
            scheme = _IN_8_BITS.get(scheme, scheme)
        rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
        numbers = {QuantizationName.W8A8: 2, QuantizationName.W8A16: 1}.get(scheme, columns // quantization.group_size)
        if stored is not None and stored.group_size and stored.bits == BITS[scheme]:
            if not _in_whole_blocks(weight.columns, MIN_GROUP_SIZE):
                continue
            numbers = columns // _power_of_two_in(stored.group_size)
        total += rows * (columns * dtype_bytes - columns * BITS[scheme] // 8 - 4 * numbers)
    return total


_LATENT: Final = "attention to latent keys"
_BIDIRECTIONAL: Final = "bidirectional attention"
_WITHOUT_CELL: Final[Mapping[str, str]] = {
    "causal_conv": "causal convolutions",
    "delta_rule": "the gated delta rule",
    "ssm": "state space models (Mamba-2)",
    "multiply": "products of two values",
    "mix_streams": "mixtures of residual streams",
    "match_streams": "mixtures of residual streams",
    "sparsify": "sparse activations",
    "select_keys": "attention to selected keys",
}
"""Kind of operation that programs compute and Cells do not -> its name for users."""


def unsupported_by_cells(network: Network) -> str | None:
    """Return a feature of the network that the backend of MindSpore Cells cannot compute, or None if there is none."""
    if not network.causal:
        return _BIDIRECTIONAL
    if network.num_labels:
        return "a classifier in place of the LM head"
    if kinds := dict.fromkeys(each.kind for each in network.operations if "state" in each.attributes):
        return " and ".join(_WITHOUT_CELL[kind] for kind in kinds)
    layers = [each.attributes["layer"] for each in network.operations if each.kind == "attention"]
    if len(set(layers)) < len(layers):
        return "layers that share keys and values"
    return next(filter(None, map(_unsupported_by_cells, network.operations)), None)


def _unsupported_by_cells(operation: Operation) -> str | None:
    attributes, weights = operation.attributes, operation.weights
    if operation.kind == "linear" and attributes["heads"] > 1:
        return "projections with one weight per head"
    if is_latent(operation):
        return _LATENT
    if operation.kind in _WITHOUT_CELL:
        return _WITHOUT_CELL[operation.kind]
    if operation.kind == "activation" or attributes.get("function", "") not in ("", "silu", "gelu_tanh"):
        return f"activation function {attributes['function']}{' without a gate' * (operation.kind == 'activation')}"
    if attributes.get("centred"):
        return "layer norms"
    if attributes.get("chunk"):
        return "attention within chunks"
    if operation.kind == "route" and "bias" in weights:
        return "experts chosen with a bias"
    if operation.kind == "lm_head" and "bias" in weights:
        return "a bias of the LM head"
    if attributes.get("score") == "sparsemixer":
        return "experts chosen by SparseMixer"
    if attributes.get("scales_input"):
        return "experts whose input is weighted"
    roles = {
        "sinks": "attention with sinks",
        "gate_up_bias": "experts with biases",
        "factors": "experts with factors of their weights",
    }
    return next((lacks for role, lacks in roles.items() if role in weights), None)


def unsupported_quantization(quantization: Quantization | None) -> str | None:
    if quantization is None or quantization.name in (QuantizationName.W8A8, QuantizationName.DEQUANTIZED):
        return None
    return f"products of {quantization.name} weights"


def unsupported_by_int8_cache(network: Network) -> str | None:
    if not network.causal:
        return _BIDIRECTIONAL
    return _LATENT if any(map(is_latent, network.operations)) else None


def unsupported_by_ascend(network: Network, num_positions: int) -> str | None:
    """Return what Ascend's primitives cannot compute for contexts of `num_positions` tokens, or None."""
    if (lacks := unsupported_by_cells(network)) is not None:
        return lacks
    for each in network.operations:
        attributes = each.attributes
        if each.kind == "route":
            is_softmax = attributes["score"] == "softmax" and attributes["groups"] == 1
            if not is_softmax or "correction" in each.weights:
                return "experts chosen by a rule other than their softmax scores"
        if each.kind == "attention":
            if 0 < attributes["window"] < num_positions:
                return f"attention with a window of {attributes['window']} tokens"
            if attributes["cap"]:
                return "attention with soft-capped scores"
            if "slopes" in each.weights:
                return "attention with ALiBi slopes"
    return None


def is_latent(operation: Operation) -> bool:
    return operation.kind == "attention" and "q_rope" in operation.inputs
