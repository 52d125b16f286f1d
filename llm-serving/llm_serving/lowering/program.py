"""A network as one operator that runs its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import parameter_over, to_model_dtype, zeroed_array
from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.kernels.address_table import AddressTable
from llm_serving.lowering.step_inputs import STEP_INPUTS, KVCaches
from llm_serving.network.program import DTYPES, Program

_STEP: Final = 2
"""Number of the first parameter that belongs to the step, behind instructions and operands."""
_WEIGHTS: Final = _STEP + len(STEP_INPUTS)
"""Number of the first weight."""


class NetworkOfProgram(nn.Cell):
    """Computes what `place` has been given; its own result is no number.

    All that there is is known to the operator by its address: a graph without arguments, whose shapes are always the
    same and which has one Parameter, is what MindSpore runs fastest.

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
        self._program = program
        caches = [cache for pair in kv_caches for cache in pair]
        self.held = ms.ParameterTuple([*weights, *caches])
        self._rows_at = _WEIGHTS + len(weights)
        first_cache = self._rows_at + rows
        self._result_at = first_cache + len(caches)
        self._addresses = AddressTable(self._result_at + 1)
        given = [program.instructions, program.operands]
        for first, arrays in ((0, given), (_WEIGHTS, _memory_of(weights)), (first_cache, _memory_of(caches))):
            for number, array in enumerate(arrays, first):
                self._addresses.lend(number, array)
        self.table = parameter_over(self._addresses.memory, "int64", "addresses")
        self.operator = operator

    def construct(self) -> ms.Tensor:
        return self.operator(self.table)

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
            rows, *step = arrays
            self._addresses.give(self._rows_at, to_model_dtype(rows, self._dtype))
        for number, array in enumerate(step, _STEP):
            self._addresses.give(number, array)
        num_results = len(step[-1])
        if num_results != len(self._result):
            self._result = self._room_for(num_results)
            self._addresses.lend(self._result_at, self._result)
        return self._result

    def _room_for(self, num_results: int) -> Float32Array:
        if num_results > len(self._memory):
            self._memory = zeroed_array((max(num_results, 2 * len(self._memory)), self._width), "float32")
        result: Float32Array = self._memory[:num_results]
        return result


def _memory_of(parameters: Sequence[ms.Parameter]) -> list[Array]:
    return [parameter.storage for parameter in parameters]
