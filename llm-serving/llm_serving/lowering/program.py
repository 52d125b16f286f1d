"""A network as one custom operator, which executes a program: the network's operations encoded as integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import parameter_over, to_model_dtype, zeroed_array
from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.kernels.library import AddressTable, ProgramCall
from llm_serving.lowering.step_inputs import STATE_INPUTS, STEP_INPUTS, KVCaches
from llm_serving.network.program import DTYPES, Program

_STEP: Final = 2
_WEIGHTS: Final = _STEP + len(STEP_INPUTS)


class ProgramNetwork(nn.Cell):
    """Computes the step whose arrays were bound by `bind_inputs`. The Cell's own result is a placeholder.

    The operator gets the addresses of all arrays in one table, because MindSpore runs a graph fastest if the graph has
    no arguments and only one Parameter.

    `operator`: result of `Backend.program`. `weights`, `states`: Parameters in the order of the program. `width`:
    columns of the result. `rows`: whether `bind_inputs` also gets hidden states, which the program reads in place of
    its last weight. `weights` then lacks this weight.
    """

    def __init__(
        self,
        program: Program,
        operator: nn.Cell,
        weights: Sequence[ms.Parameter],
        kv_caches: KVCaches,
        width: int,
        *,
        states: Sequence[ms.Parameter] = (),
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
        self.parameters_and_caches = ms.ParameterTuple([*weights, *caches, *states])
        self._rows_at = _WEIGHTS + len(weights)
        first_cache = self._rows_at + rows
        first_state = first_cache + len(caches)
        self._further_inputs_at = first_state + len(states)
        has_adapters = program.instructions[0, 7] > 0
        self._result_at = self._further_inputs_at + (len(STATE_INPUTS) if states else 0) + int(has_adapters)
        self._addresses = AddressTable(self._result_at + 1)
        encoded = [program.instructions, program.operands]
        storages = [(_WEIGHTS, _storages(weights)), (first_cache, _storages(caches)), (first_state, _storages(states))]
        for first, arrays in ((0, encoded), *storages):
            for number, array in enumerate(arrays, first):
                self._addresses.set_view(number, array)
        self.table = parameter_over(self._addresses.memory, "int64", "addresses")
        self.call_operator = ProgramCall(self._addresses)
        """Runs the program on the arrays of `bind_inputs`, without MindSpore's executor, which takes 60 to 300 us."""
        self.operator = operator

    def construct(self) -> ms.Tensor:
        return self.operator(self.table)

    def bind_inputs(self, arrays: Sequence[Int32Array | Float32Array]) -> Float32Array:
        """Bind the arrays of a step for the next run. Return the array of the result, float32 [S, width], valid until
        the run after the next.

        The arrays are `STEP_INPUTS` of `lowering.step_inputs`, then `STATE_INPUTS` for recurrent states, then
        `ADAPTER_INPUT` for adapters. With `rows`, hidden states come first, float32 [T, H].
        """
        step: Sequence[Array] = arrays
        if self._has_rows:
            rows, *step = arrays
            self._addresses.set_copy(self._rows_at, to_model_dtype(rows, self._dtype))
        of_step, further = step[: len(STEP_INPUTS)], step[len(STEP_INPUTS) :]
        for number, array in enumerate(of_step, _STEP):
            self._addresses.set_copy(number, array)
        for number, array in enumerate(further, self._further_inputs_at):
            self._addresses.set_copy(number, array)
        num_results = len(of_step[-1])
        if num_results != len(self._result):
            self._result = self._result_buffer(num_results)
            self._addresses.set_view(self._result_at, self._result)
        return self._result

    def _result_buffer(self, num_results: int) -> Float32Array:
        if num_results > len(self._memory):
            self._memory = zeroed_array((max(num_results, 2 * len(self._memory)), self._width), "float32")
        result: Float32Array = self._memory[:num_results]
        return result


def _storages(parameters: Sequence[ms.Parameter]) -> list[Array]:
    return [parameter.storage for parameter in parameters]
