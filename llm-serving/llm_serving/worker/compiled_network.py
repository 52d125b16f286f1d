"""A network compiled once and then called without the checks of `Cell.__call__`.

Those checks (signature, types, the key of the compilation) take about 140 of the 160 microseconds of a call at every
step and cannot find anything: the arguments are always int32 arrays of the same ranks. MindSpore offers the shorter
way under private names only; where a release lacks them the ordinary call serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.lowering.program import NetworkOfProgram
from llm_serving.lowering.step import dynamic_inputs

try:
    from mindspore.graph.api import _cell_graph_executor
except ImportError:  # another release
    _cell_graph_executor = None


class CompiledNetwork:
    """One graph for batches of every shape.

    Args:
        network: The arguments of a step first of all, or what `inputs` says.
        inputs: Its arguments, as for `Cell.set_inputs`; of no meaning for one that runs a program.
    """

    def __init__(self, network: nn.Cell, inputs: Sequence[ms.Tensor] | None = None) -> None:
        network.set_train(False)
        if not isinstance(network, NetworkOfProgram):
            network.set_inputs(*(dynamic_inputs() if inputs is None else inputs))
        self._network = network
        self._execute: Any = getattr(_cell_graph_executor, "_graph_executor", None)
        self._phase: str | None = None

    @property
    def num_compilations(self) -> int:
        return len(self._network.compile_cache)

    def __call__(self, arrays: Sequence[Int32Array | Float32Array]) -> NDArray[Any]:
        """Runs the graph; the first call compiles it.

        Args:
            arrays: The arguments; not copied, so nobody may write them until this returns.

        Returns:
            The result; of a program it is valid until the next call.
        """
        if isinstance(self._network, NetworkOfProgram):
            result = self._network.place(arrays)
            float(self._run(()))  # waits until it is there, in a tenth of the time of `asnumpy`
            return result
        tensors = tuple([ms.Tensor.from_numpy(np.ascontiguousarray(array)) for array in arrays])
        values: NDArray[Any] = self._run(tensors).asnumpy()
        return values

    def _run(self, tensors: tuple[ms.Tensor, ...]) -> ms.Tensor:
        if self._phase is not None:
            return self._execute(tensors, self._phase)
        result = self._network(*tensors)
        if self._execute is not None and self.num_compilations == 1:
            (self._phase,) = self._network.compile_cache
        return result
