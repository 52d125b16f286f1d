"""A network as one operator that runs its program."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step import KVCaches
from llm_serving.network.program import Program


class NetworkOfProgram(nn.Cell):
    """The arguments of a step (`lowering.step.STEP_INPUTS`) -> logits, float32 [S, V], or states, float32 [S, H].

    Args:
        program: What is run.
        operator: From `Backend.program`.
        parameters: Of every weight.
        kv_caches: One pair for each layer.
    """

    def __init__(self, program: Program, operator: nn.Cell, parameters: Parameters, kv_caches: KVCaches) -> None:
        super().__init__()
        self.operator = operator
        self.instructions = ms.Tensor(program.instructions)
        self.operands = ms.Tensor(program.operands)
        weights = [parameter for weight in program.weights for parameter in parameters[weight]]
        self.parameters_of_step = ms.ParameterTuple([*weights, *(cache for pair in kv_caches for cache in pair)])

    def construct(
        self,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        q_seq_lens: ms.Tensor,
        batch_valid_length: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        step = token_ids, positions, slot_mapping, block_tables, q_seq_lens, batch_valid_length, sample_indices
        return self.operator(self.instructions, self.operands, *step, *self.parameters_of_step)


class HeadOfProgram(nn.Cell):
    """states float32 [P, H], then `lowering.step.arguments_of_rows` -> logits, float32 [P, V]

    Args:
        program: From `network.program.program_of_head`.
        operator: From `Backend.program`.
        weight: The head.
        backend: Its model dtype is that of the rows.
    """

    def __init__(self, program: Program, operator: nn.Cell, weight: ms.Parameter, backend: Backend) -> None:
        super().__init__()
        self.operator = operator
        self.instructions = ms.Tensor(program.instructions)
        self.operands = ms.Tensor(program.operands)
        self.weight = weight
        self.dtype = backend.activation_dtype

    def construct(
        self,
        states: ms.Tensor,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        q_seq_lens: ms.Tensor,
        batch_valid_length: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        step = token_ids, positions, slot_mapping, block_tables, q_seq_lens, batch_valid_length, sample_indices
        return self.operator(self.instructions, self.operands, *step, self.weight, states.astype(self.dtype))
