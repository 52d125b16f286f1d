"""A network compiled once and then called without the checks of `Cell.__call__`.

Those checks (signature, types, the key of the compilation) take about 140 of the 160 microseconds of a call at every
step and cannot find anything: the arguments are always int32 arrays of the same ranks. MindSpore offers the shorter
way under private names only; where a release lacks them the ordinary call serves.

A MINDIR file that mindspore_lite computes on Ascend, by its graph engine (`model_config.backend: ge`).

The parts of a network, ready to be called: compiled here, or read as files of MindSpore's graph engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.errors import ConfigError, KernelError
from llm_serving.lowering.lower import Lowered
from llm_serving.lowering.mindir import graph_file, inputs_of
from llm_serving.lowering.program import ProgramNetwork
from llm_serving.lowering.step_inputs import STEP_INPUTS, dynamic_inputs
from llm_serving.models.spec import ModelSpec

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
        if not isinstance(network, ProgramNetwork):
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
        if isinstance(self._network, ProgramNetwork):
            result = self._network.bind_inputs(arrays)
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


PACKAGE = "mindspore_lite"


def load_lite() -> Any:
    """The package, which is no dependency of this project: it comes with the software of a device.

    Raises:
        KernelError: It is not installed.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise KernelError(f"model_config.backend: ge needs {PACKAGE}, which is not installed: {error}") from None


class LiteNetwork:
    """Called as a `CompiledNetwork` is.

    Args:
        lite: From `load_lite`.
        path: The file.
        ini: Options of the graph engine, as older servers have them; None: none.
        device_id: Of the NPU.
        names: Of its arguments, in order.
        inputs: The arguments, of every shape: number of dimensions and type count.

    Raises:
        ConfigError: The file has other arguments.
    """

    num_compilations = 1
    """The graph engine compiles when the file is read."""

    def __init__(
        self,
        lite: Any,
        path: Path,
        ini: Path | None,
        device_id: int,
        names: Sequence[str],
        inputs: Sequence[ms.Tensor],
    ) -> None:
        context = lite.Context()
        context.target = ["Ascend"]
        context.ascend.device_id = device_id
        context.ascend.rank_id = 0
        context.ascend.provider = "ge"
        self._lite = lite
        self._model = lite.Model()
        self._model.build_from_file(str(path), lite.ModelType.MINDIR, context, "" if ini is None else str(ini))
        wanted = [
            f"{name} {str(each.dtype).lower()} of {len(each.shape)}" for name, each in zip(names, inputs, strict=True)
        ]
        found = [_told(lite, each) for each in self._model.get_inputs()]
        if found != wanted:
            raise ConfigError(
                f"{path} must have the arguments {', '.join(wanted)} dimensions, as `llm-serving export` writes it. "
                f"Found: {', '.join(found)}"
            )

    def __call__(self, arrays: Sequence[Int32Array | Float32Array]) -> NDArray[Any]:
        """Runs the graph.

        Args:
            arrays: The arguments.

        Returns:
            The result, copied from the device.
        """
        tensors = [self._lite.Tensor(np.ascontiguousarray(array)) for array in arrays]
        (result,) = self._model.predict(tensors)
        values: NDArray[Any] = result.get_data_to_numpy()
        return values


def _told(lite: Any, tensor: Any) -> str:
    """As an argument is wanted; a file has the name of its graph before the name of an argument."""
    types = {lite.DataType.INT32: "int32", lite.DataType.FLOAT32: "float32"}
    return f"{tensor.name.split(':')[-1]} {types.get(tensor.dtype, tensor.dtype)} of {len(tensor.shape)}"


class Network(Protocol):
    """One graph for batches of every shape."""

    @property
    def num_compilations(self) -> int:
        """Graphs compiled so far."""

    def __call__(self, arrays: Sequence[Int32Array | Float32Array]) -> NDArray[Any]:
        """Arguments -> the result; nobody may write the arguments until this returns."""


class Networks(NamedTuple):
    """As `Lowered`."""

    logits: Network | None
    states: Network
    head: Network
    of_prompts: Network | None = None


def compiled(lowered: Lowered, hidden: int, num_prompt_rows: int = 0) -> Networks:
    """Networks that are compiled when they are first called.

    Args:
        lowered: The parts.
        hidden: Numbers of a state.
        num_prompt_rows: Most requests of a step of whole prompts.
    """
    prompts = lowered.of_prompts
    return Networks(
        None if lowered.logits is None else CompiledNetwork(lowered.logits),
        CompiledNetwork(lowered.states),
        CompiledNetwork(lowered.head, lowered.head_inputs(hidden)),
        None if prompts is None else CompiledNetwork(prompts, dynamic_inputs(num_prompt_rows)),
    )


def of_files(spec: ModelSpec, folder: Path, ini: Path | None, device_id: int) -> Networks:
    """Networks that `lowering.mindir.export` wrote, computed by mindspore_lite.

    Raises:
        ConfigError: A file has other arguments than those of a step.
        KernelError: mindspore_lite is not installed.
    """
    lite = load_lite()
    names = [name for name, _ in STEP_INPUTS]
    states, head = (
        LiteNetwork(lite, graph_file(folder, graph), ini, device_id, given, inputs_of(spec, graph))
        for graph, given in (("states", names), ("head", ["states", *names]))
    )
    return Networks(None, states, head)
