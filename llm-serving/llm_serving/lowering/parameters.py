"""The MindSpore Parameters of a network, read from a model folder in the order of its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import mindspore as ms

from llm_serving.backends.base import Backend
from llm_serving.backends.weight_packing import quantize
from llm_serving.core.enums import QuantizationName
from llm_serving.errors import ModelError, NotFiniteError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.packed import Quantized, unquantized
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array, is_finite
from llm_serving.log import get_logger
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Weight
from llm_serving.network.quantization import (
    BITS,
    WEIGHT_ONLY,
    Quantization,
    block_weights,
    keeps_blocks,
    quantized_weights,
    schemes_of_stored,
    stored_blocks,
    stored_qvalues,
)
from llm_serving.network.weights import RowStack, assemble_weight, row_stack

logger = get_logger(__name__)

_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight",),
    "route": ("weight",),
    "experts": ("gate_up", "down"),
    "lm_head": ("weight",),
}
"""Kind of operation -> roles of its weights that are factors of matrix products."""

Stored = QuantizedTensor | list[BlockTensor] | RowStack | Array

Parameters = Mapping[Weight, Sequence[ms.Parameter]]
"""The Parameters of each weight: one, one for each expert, or two for quantized values and scales."""


def parameters_of(
    network: Network,
    backend: Backend,
    reader: WeightReader,
    max_positions: int,
    *,
    as_cells: bool,
    quantization: Quantization | None = None,
) -> Parameters:
    """Create the Parameters of all weights, one weight at a time, because packing a weight takes extra memory.

    `quantization`: scheme of matrix products. If it is None or `blocks_a16`, weights have the model dtype, except GGUF
    blocks that kernels can multiply. `as_cells`: create Parameters for a graph of Cells, not for one custom operator.
    Raise ModelError if a tensor is missing, unexpected, of the wrong shape, or has an infinite or NaN element.
    """
    multiplied = {each.weights[role] for each in network.operations for role in _PRODUCTS.get(each.kind, ())}
    quantized = quantized_weights(network, quantization)
    in_blocks = block_weights(network) if keeps_blocks(quantization) and not as_cells else set()
    experts = _experts(network.operations) if as_cells else {}
    tables = {each.weights["table"] for each in network.operations if "table" in each.weights}
    made: dict[Weight, list[ms.Parameter]] = {}
    dequantized = []
    for index, weight in enumerate(network.weights):
        name = f"weights.{index}"
        values: Stored
        if quantization is not None and weight in quantized:
            schemes = (quantized[weight], quantization.name)
            values, scheme = _quantized_values(weight, reader, schemes, quantization.group_size, as_cells=as_cells)
        elif weight in in_blocks:
            values, scheme = _blocks(weight, reader), None
        elif weight.generate is not None:
            values, scheme = weight.generate(max_positions), None
        else:
            stored = [reader.read(*each) for each in _stored(weight)]
            values, scheme = row_stack(weight, stored), None
            # Also check elements that the network does not use, such as a bias of keys without a rotary embedding.
            if len(weight.shape) == 1 and not all(map(is_finite, stored)):
                raise _not_finite(weight, reader)
        if isinstance(values, QuantizedTensor):
            if not as_cells:
                made[weight] = [backend.packed_quantized_weight(values, scheme in WEIGHT_ONLY, name)]
            elif weight in experts:
                made[weight] = list(backend.quantized_expert_weights(values, experts[weight], name))
            else:
                made[weight] = list(backend.quantized_weight(values, name))
            continue
        if isinstance(values, list):
            made[weight] = [backend.block_weight(values, quantization is not None, name)]
            continue
        if weight in quantized:
            dequantized.append(weight)
        if isinstance(values, RowStack):
            if weight in multiplied:
                try:
                    packed = backend.packed_rows(values, experts.get(weight), name)
                except NotFiniteError:
                    raise _not_finite(weight, reader) from None
                if packed is not None:
                    made[weight] = [packed]
                    continue
            values = values.assembled()
        if weight.generate is None and not is_finite(values):
            raise _not_finite(weight, reader)
        if weight in experts:
            made[weight] = list(backend.expert_weights(values, experts[weight], name))
        elif weight in multiplied:
            create = backend.tied_weight if weight in tables else backend.linear_weight
            made[weight] = [create(values, name)]
        elif weight.dtype == "float32":
            made[weight] = [backend.numbers(values, name)]
        elif values.ndim == 1:
            made[weight] = [backend.vector(values, name=name)]
        else:
            made[weight] = [backend.table(values, name)]
    if dequantized and quantization is not None:
        logger.warning(
            "dequantized %d of %d weights to %s: no %s product takes their stored integers, and quantizing them again "
            "would lose accuracy; first=%s",
            *(len(dequantized), len(quantized), backend.dtype, quantization.name, dequantized[0].names[0]),
        )
    for name in network.optional:
        reader.ignore(name)
    reader.check_all_read()
    return made


def _not_finite(weight: Weight, reader: WeightReader) -> ModelError:
    name = reader.first_non_finite(weight.names) or ", ".join(weight.names[:3])
    return ModelError(f"{name} must hold finite numbers only")


def _quantized_values(
    weight: Weight, reader: WeightReader, schemes: Sequence[QuantizationName], group_size: int, *, as_cells: bool
) -> tuple[Stored, QuantizationName]:
    """Return a weight and its quantization scheme.

    If the files store integers that a matmul of one of `schemes` can use, return them. Quantize floating-point values
    by the first scheme. Dequantize other stored integers; quantizing them again would lose accuracy. `as_cells` accepts
    this loss and quantizes them by the first scheme, because Cells choose matmuls before reading weights.
    """
    parts = _read_packed(weight, reader)
    # Stored integers may have 8 bits in a 4-bit format. GGUF blocks may not: they are rounded to 4 bits.
    if not any(isinstance(part, BlockTensor) for part in parts):
        schemes = (*schemes, *schemes_of_stored(schemes[-1]))
    is_rotated = any(isinstance(part, QuantizedTensor) and part.rotated for part in parts)
    for scheme in () if as_cells and is_rotated else schemes:
        if (stored := stored_qvalues(weight, parts, scheme)) is not None:
            return stored, scheme
    scheme = schemes[0]
    values = assemble_weight(weight, _dequantized(weight, parts))
    if not as_cells and any(isinstance(part, QuantizedTensor) for part in parts):
        return values, scheme
    try:
        return quantize(values, BITS[scheme], group_size if BITS[scheme] == 4 else None, not as_cells), scheme
    except ModelError as error:
        raise ModelError(f"{', '.join(weight.names[:3])}: {error}") from None


def _blocks(weight: Weight, reader: WeightReader) -> Stored:
    parts = _read_packed(weight, reader)
    segments = stored_blocks(weight, parts)
    return row_stack(weight, _dequantized(weight, parts)) if segments is None else segments


def _read_packed(weight: Weight, reader: WeightReader) -> list[Quantized | Array]:
    return [reader.read_packed(*each) for each in _stored(weight)]


def _stored(weight: Weight) -> Iterator[tuple[str, tuple[int, ...]]]:
    return zip(weight.names, weight.stored_shapes, strict=True)


def _dequantized(weight: Weight, parts: Iterable[Quantized | Array]) -> list[Array]:
    return [unquantized(part, shape) for part, shape in zip(parts, weight.stored_shapes, strict=True)]


def _experts(operations: Iterable[Operation]) -> dict[Weight, int]:
    routed = [each for each in operations if each.kind == "experts"]
    return {each.weights[role]: each.attributes["experts"] for each in routed for role in ("gate_up", "down")}
