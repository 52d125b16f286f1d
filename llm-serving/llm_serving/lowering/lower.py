"""The choice of a lowering."""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.core.enums import ImplementationName
from llm_serving.errors import ModelError
from llm_serving.lowering.cells import HeadOfCells, NetworkOfCells
from llm_serving.lowering.mindformers import NetworkOfMindFormers, NetworkOfMindFormersLlama
from llm_serving.lowering.parameters import Parameters, parameters_of
from llm_serving.lowering.program import NetworkOfProgram
from llm_serving.lowering.step_inputs import KVCaches, dynamic_inputs
from llm_serving.models.mindformers import unstacked
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.program import Program, program_of, program_of_head, program_of_states
from llm_serving.network.quantization import Quantization, lacking_in_coded_cache, lacking_of_codes


class Lowered(NamedTuple):
    """A network in two parts, and whole where that is faster; whatever way a row takes, its bits are the same."""

    logits: nn.Cell | None
    """The arguments of a step (`lowering.step.STEP_INPUTS`) -> float32 [S, V]"""
    states: nn.Cell
    """The arguments of a step -> what the head reads of the rows that give a result, float32 [S, H]"""
    head: nn.Cell
    """(float32 [P, H], `lowering.step.arguments_of_rows`) -> float32 [P, V]"""
    of_prompts: nn.Cell | None = None
    """As `states`, for steps of which nothing was computed before; None: `states` computes them."""

    @staticmethod
    def head_inputs(hidden: int) -> list[ms.Tensor]:
        """As `lowering.step.dynamic_inputs`, of `head`."""
        return [ms.Tensor(shape=[None, hidden], dtype=ms.float32), *dynamic_inputs()]


def lower(
    spec: ModelSpec,
    backend: Backend,
    reader: WeightReader,
    kv_caches: KVCaches,
    max_positions: int,
    *,
    as_program: bool = True,
    whole_prompts: bool = False,
    quantization: Quantization | None = None,
    implementation: ImplementationName = ImplementationName.NATIVE,
) -> Lowered:
    """Builds the network of a model and takes every weight it needs.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        reader: Of a folder that is read once.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.
        as_program: One operator runs it, where the backend has that; otherwise it is a graph of Cells.
        whole_prompts: Steps of whole prompts have a graph of Cells of their own.
        quantization: How weights are kept. None: in the model dtype.
        implementation: Whose network computes the states; others than the native one not with `as_program` or
            `whole_prompts`.

    Raises:
        KernelError: MindFormers' network is asked for and cannot be had.
        ModelError: The folder lacks a tensor, has one of another shape, or one too many; or the backend has no
            operation for something the network needs.
    """
    network = spec.network
    program = program_of(network, backend.dtype)
    as_program = as_program and backend.program() is not None
    lacks = None if as_program else lacking_of_codes(quantization)
    if lacks is not None:
        raise ModelError(f"the Cells of {backend.name} have no {lacks}; kernels: program has")
    if any(cache.dtype == ms.int8 for pair in kv_caches for cache in pair):
        if not as_program:
            raise ModelError(f"the Cells of {backend.name} attend to no keys in 8 bits; kernels: program does")
        if (lacks := lacking_in_coded_cache(network)) is not None:
            raise ModelError(f"a cache of 8 bits has no {lacks}")
    is_legacy = implementation == ImplementationName.MINDFORMERS_LEGACY
    read = unstacked(network) if is_legacy else network
    parameters = parameters_of(read, backend, reader, max_positions, as_cells=not as_program, quantization=quantization)
    if not as_program:
        if implementation != ImplementationName.NATIVE:
            built: nn.Cell = (
                NetworkOfMindFormersLlama(spec, read, backend, parameters, kv_caches, max_positions)
                if is_legacy
                else NetworkOfMindFormers(spec, backend, parameters, kv_caches, max_positions)
            )
            return Lowered(None, built, HeadOfCells(network, backend, parameters))
        settings = network, backend, parameters, kv_caches, max_positions
        states = NetworkOfCells(*settings, of_states=True)
        of_prompts = NetworkOfCells(*settings, of_states=True, whole_prompts=True) if whole_prompts else None
        return Lowered(None, states, HeadOfCells(network, backend, parameters), of_prompts)
    (head,) = parameters[network.head.weights["weight"]]
    of_states, of_head = program_of_states(network, backend.dtype), program_of_head(network, backend.dtype)
    return Lowered(
        _network(program, backend, parameters, kv_caches, spec.vocab_size),
        _network(of_states, backend, parameters, kv_caches, network.hidden),
        NetworkOfProgram(of_head, _operator(backend), [head], (), spec.vocab_size, rows=True),
    )


def _network(
    program: Program, backend: Backend, parameters: Parameters, kv_caches: KVCaches, width: int
) -> NetworkOfProgram:
    weights = [parameter for weight in program.weights for parameter in parameters[weight]]
    return NetworkOfProgram(program, _operator(backend), weights, kv_caches, width)


def _operator(backend: Backend) -> nn.Cell:
    operator = backend.program()
    assert operator is not None
    return operator
