"""Lowers a model to MindSpore Cells: reads its weights, and builds its network with the selected implementation."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.core.enums import ImplementationName
from llm_serving.errors import ModelError
from llm_serving.lowering.cells import CellLmHead, CellNetwork, SingleTokenNetwork, TokenNetwork, TokenRowsNetwork
from llm_serving.lowering.mindformers import MindFormersLlamaNetwork, MindFormersNetwork, network_to_read
from llm_serving.lowering.parameters import Parameters, parameters_of
from llm_serving.lowering.program import ProgramNetwork
from llm_serving.lowering.step_inputs import KVCaches, dynamic_inputs
from llm_serving.models.mindformers import split_stacked_weights
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import WeightReader
from llm_serving.network.builder import Network
from llm_serving.network.key_bias import move_key_biases
from llm_serving.network.program import (
    Program,
    build_embedding_program,
    build_given_rows_program,
    build_head_program,
    build_hidden_states_program,
    build_program,
)
from llm_serving.network.quantization import Quantization, unsupported_by_int8_cache, unsupported_quantization


class Lowered(NamedTuple):
    """A network as two graphs: `states` computes hidden states, and `head` computes logits from them.

    `logits` is one graph for both. It is None unless it is faster. Its results are bit-identical.
    """

    logits: nn.Cell | None
    """Graph from `lowering.step_inputs.STEP_INPUTS` to logits, float32 [S, V]. If None, call `states`, then `head`."""
    states: nn.Cell
    """Graph from the step inputs to the input of the head for the sampled rows, float32 [S, H]."""
    head: nn.Cell
    """Graph from float32 [P, H] and `step_inputs_for_rows(P)` to float32 logits [P, V] or scores [P, labels]."""
    of_prompts: nn.Cell | None = None
    """Graph like `states`, for steps of prompts without a cached prefix. If it is None, `states` computes these steps.
    """
    of_tokens: TokenNetwork | None = None
    """Graph for steps in which each request has one token. If it is None, `states` and `head` compute them."""
    parameters: Parameters = MappingProxyType({})

    @staticmethod
    def head_inputs(hidden: int) -> list[ms.Tensor]:
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
    states: Sequence[ms.Parameter] = (),
) -> Lowered:
    """Build the network of a model, and read its weights from `reader`, which cannot be used again.

    Args:
        kv_caches: (keys, values) of each cache layer.
        max_positions: Longest context of a request, in tokens.
        as_program: Whether one custom operator computes the whole network (`lowering.program`), if the backend has it.
            Otherwise the network is a graph of Cells.
        whole_prompts: Whether steps of whole prompts have their own graph of Cells.
        implementation: Only `native` allows `as_program` and `whole_prompts`.
        states: Memory of recurrent states, from `Backend.states`. Graphs of Cells do not use it.
    """
    network = spec.network
    as_program = as_program and backend.program() is not None
    lacks = None if as_program else unsupported_quantization(quantization)
    if lacks is not None:
        raise ModelError(f"the Cells of {backend.name} do not support {lacks}; use `kernels: program`")
    if any(cache.dtype == ms.int8 for pair in kv_caches for cache in pair):
        if not as_program:
            raise ModelError(f"the Cells of {backend.name} do not support an int8 KV cache; use `kernels: program`")
        if (lacks := unsupported_by_int8_cache(network)) is not None:
            raise ModelError(f"an int8 KV cache does not support {lacks}; set `quant_config.kv_cache_dtype: auto`")
    is_legacy = implementation == ImplementationName.MINDFORMERS_LEGACY
    read = network
    if implementation != ImplementationName.NATIVE:
        read = split_stacked_weights(network) if is_legacy else network_to_read(network, backend)
    if as_program:
        read = network = network.changed(operations=move_key_biases(network.operations))
    parameters = parameters_of(read, backend, reader, max_positions, as_cells=not as_program, quantization=quantization)
    if not as_program:
        if implementation != ImplementationName.NATIVE:
            build = MindFormersLlamaNetwork if is_legacy else MindFormersNetwork
            built = build(spec, read, backend, parameters, kv_caches, max_positions)
            return Lowered(None, built, CellLmHead(network, backend, parameters))
        settings = network, backend, parameters, kv_caches, max_positions
        states = CellNetwork(*settings, of_states=True)
        of_prompts = CellNetwork(*settings, of_states=True, whole_prompts=True) if whole_prompts else None
        of_tokens = None
        if backend.largest_logits() is not None and not network.num_labels and not network.num_adapter_slots:
            rows = backend.attention_rows > 0
            inner = CellNetwork(*settings, single_tokens=True, all_rows=not rows)
            of_tokens = (TokenRowsNetwork if rows else SingleTokenNetwork)(inner, backend)
        return Lowered(None, states, CellLmHead(network, backend, parameters), of_prompts, of_tokens, parameters)
    dtype = backend.dtype
    of_states = build_hidden_states_program(network, dtype)
    hidden = _network(of_states, backend, parameters, kv_caches, network.hidden, states)
    of_head = build_head_program(network, dtype)
    weights = [parameter for weight in of_head.weights[:-1] for parameter in parameters[weight]]
    width = network.num_labels or spec.vocab_size
    head = ProgramNetwork(of_head, _operator(backend), weights, (), width, rows=True)
    if network.num_labels:
        return Lowered(None, hidden, head, parameters=parameters)
    program = build_program(network, dtype)
    logits = _network(program, backend, parameters, kv_caches, spec.vocab_size, states)
    return Lowered(logits, hidden, head, parameters=parameters)


class LoweredMtp(NamedTuple):
    """Two graphs of a layer for multi-token prediction (`models.layers`): call `embedding`, then `states`."""

    embedding: nn.Cell
    """Graph from the step inputs to the model's token embeddings, float32 [S, H]."""
    states: nn.Cell
    """Graph from rows [embedding, hidden state], float32 [T, 2 * H], and step inputs, whose token ids are indices of
    the rows, to the input of the model's LM head for the sampled rows, float32 [S, H].
    """


def lower_mtp(
    model: Network,
    network: Network,
    backend: Backend,
    reader: WeightReader,
    kv_caches: KVCaches,
    max_positions: int,
    quantization: Quantization | None,
    parameters: Parameters,
) -> LoweredMtp:
    """Build the graphs of MTP layer `network`, and read its weights. `model`, `parameters`: main model, its weights."""
    dtype, operator = backend.dtype, _operator(backend)
    network = network.changed(operations=move_key_biases(network.operations))
    own = parameters_of(network, backend, reader, max_positions, as_cells=False, quantization=quantization)
    of_embedding = build_embedding_program(model, dtype)
    table = [parameter for weight in of_embedding.weights for parameter in parameters[weight]]
    program = build_given_rows_program(network, dtype)
    weights = [parameter for weight in program.weights[:-1] for parameter in own[weight]]
    return LoweredMtp(
        ProgramNetwork(of_embedding, operator, table, (), network.hidden),
        ProgramNetwork(program, operator, weights, kv_caches, network.hidden, rows=True),
    )


def _network(
    program: Program,
    backend: Backend,
    parameters: Parameters,
    kv_caches: KVCaches,
    width: int,
    states: Sequence[ms.Parameter],
) -> ProgramNetwork:
    weights = [parameter for weight in program.weights for parameter in parameters[weight]]
    return ProgramNetwork(program, _operator(backend), weights, kv_caches, width, states=states)


def _operator(backend: Backend) -> nn.Cell:
    operator = backend.program()
    assert operator is not None
    return operator
