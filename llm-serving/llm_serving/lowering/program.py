"""A network as one operator that runs its program."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import parameter_over, to_model_dtype, zeroed_array
from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.kernels.addressed import AddressTable
from llm_serving.lowering.step import STEP_INPUTS, KVCaches
from llm_serving.network.program import DTYPES, Program

_STEP = 2
"""Number of the first parameter that belongs to the step, behind instructions and operands."""


class NetworkOfProgram(nn.Cell):
    """Computes what `place` has been given; its own result is no number.

    A step's arrays and its result are known to the operator by their addresses: a graph without arguments, whose
    shapes are always the same, is what MindSpore runs fastest.

    Args:
        program: What is run.
        operator: From `Backend.program`.
        weights: Parameters of the program's weights, in its order; without the last one if that is `rows`.
        kv_caches: One pair for each layer.
        width: Of the result.
        rows: The program's last weight is given with each step.
    """

    def __init__(
        self,
        program: Program,
        operator: nn.Cell,
        weights: Sequence[ms.Parameter],
        kv_caches: KVCaches,
        width: int,
        *,
        rows: bool = False,
    ) -> None:
        super().__init__()
        self._width = width
        self._dtype = DTYPES[program.instructions[0, 5]]
        self._has_rows = rows
        self._memory: Float32Array = zeroed_array((0, width), "float32")
        self._result = self._memory
        first_weight = _STEP + len(STEP_INPUTS)
        places = [(_STEP + number, "int32") for number in range(len(STEP_INPUTS))]
        places += [(first_weight + len(weights), self._dtype)] if rows else []
        result = first_weight + len(weights) + rows + 2 * len(kv_caches)
        self._addresses = AddressTable([*places, (result, "float32")])
        self.operator = operator
        self.instructions = ms.Tensor(program.instructions)
        self.operands = ms.Tensor(program.operands)
        self.table = parameter_over(self._addresses.memory, "int64", "addresses")
        self.parameters_of_step = ms.ParameterTuple([*weights, *(cache for pair in kv_caches for cache in pair)])

    def construct(self) -> ms.Tensor:
        return self.operator(self.instructions, self.operands, self.table, *self.parameters_of_step)

    def place(self, arrays: Sequence[Int32Array | Float32Array]) -> Float32Array:
        """Says what the next run is about.

        Args:
            arrays: Those of a step (`lowering.step.STEP_INPUTS`); before them the rows, float32 [T, H] of numbers of
                the model dtype, if there are any.

        Returns:
            Where the result, float32 [S, width], will be until the run after that.
        """
        step: Sequence[Array] = arrays
        if self._has_rows:
            step = (*arrays[1:], to_model_dtype(arrays[0], self._dtype))
        for index, array in enumerate(step):
            self._addresses.give(index, array)
        num_results = len(step[len(STEP_INPUTS) - 1])
        if num_results != len(self._result):
            self._result = self._room_for(num_results)
            self._addresses.take(len(step), self._result)
        return self._result

    def _room_for(self, num_results: int) -> Float32Array:
        if num_results > len(self._memory):
            self._memory = zeroed_array((max(num_results, 2 * len(self._memory)), self._width), "float32")
        result: Float32Array = self._memory[:num_results]
        return result
