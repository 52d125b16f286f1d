"""The choice of a lowering."""

from __future__ import annotations

from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.lowering.cells import NetworkOfCells
from llm_serving.lowering.parameters import parameters_of
from llm_serving.lowering.program import NetworkOfProgram
from llm_serving.lowering.step import KVCaches
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weights import WeightReader
from llm_serving.network.program import program_of


def lower(
    spec: ModelSpec,
    backend: Backend,
    reader: WeightReader,
    kv_caches: KVCaches,
    max_positions: int,
    *,
    as_program: bool = True,
) -> nn.Cell:
    """Builds the network of a model and takes every weight it needs.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        reader: Of a folder that is read once.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.
        as_program: One operator runs it, where the backend has that; otherwise it is a graph of Cells.

    Raises:
        ModelError: The folder lacks a tensor, has one of another shape, or one too many; or the backend has no
            operation for something the network needs.
    """
    network = spec.network
    program = program_of(network, backend.dtype)
    kinds = "".join("s" if weight.kind == "float32" else "f" for weight in program.weights)
    operator = backend.program(kinds, len(network.caches)) if as_program else None
    parameters = parameters_of(network, backend, reader, max_positions, as_cells=operator is None)
    if operator is None:
        return NetworkOfCells(network, backend, parameters, kv_caches, max_positions)
    return NetworkOfProgram(program, operator, parameters, kv_caches)
