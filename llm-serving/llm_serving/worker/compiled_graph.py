"""Networks as compiled graphs: compiled by MindSpore, or read from MINDIR files by mindspore_lite (`backend: ge`)."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from llm_serving.backends.parameters import is_on_npu
from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.errors import ConfigError, KernelError
from llm_serving.lowering.lower import Lowered
from llm_serving.lowering.mindir import graph_file, inputs_of
from llm_serving.lowering.program import ProgramNetwork
from llm_serving.lowering.step_inputs import ADAPTER_INPUT, STEP_INPUTS, dynamic, dynamic_inputs
from llm_serving.models.spec import ModelSpec

try:
    from mindspore.graph.api import _cell_graph_executor
except ImportError:  # this release of MindSpore has no such name
    _cell_graph_executor = None


LITE_PACKAGE: Final = "mindspore_lite"
MAX_STARTED: Final = 2
_DECODE_PHASE: Final = "increment"


class CompiledNetwork:
    """One graph for batches of every shape.

    `Cell.__call__` takes 160 µs, 140 of them to check the arguments. These always have the same types and numbers of
    dimensions, so this class calls the compiled graph directly, by private names of MindSpore. If a release lacks them,
    it calls the Cell.

    Args:
        inputs: Arguments for `Cell.set_inputs`. If None, the arguments of a step.
        is_decode: Whether the graph computes decode steps. On Ascend, MindSpore then keeps the shapes, kernel arguments
            and memory of a step, and uses them again for the next step with the same shapes.
    """

    def __init__(self, network: nn.Cell, inputs: Sequence[ms.Tensor] | None = None, *, is_decode: bool = False) -> None:
        network.set_train(False)
        if not isinstance(network, ProgramNetwork):
            network.set_inputs(*(dynamic_inputs() if inputs is None else inputs))
        if is_decode:
            network.phase = _DECODE_PHASE
        self._network = network
        self._execute: Any = getattr(_cell_graph_executor, "_graph_executor", None)
        self._phase: str | None = None
        self._pins = is_on_npu()
        self._inputs: deque[tuple[ms.Tensor, ...]] = deque(maxlen=MAX_STARTED)
        self._sources: deque[ms.Tensor] = deque(maxlen=2 * MAX_STARTED)

    @property
    def num_compilations(self) -> int:
        return len(self._network.compile_cache)

    def __call__(self, arrays: Sequence[Any]) -> NDArray[Any]:
        """Run the graph and return its result. The arrays (or results of `submit`) must not change during the call. If
        one CPU operator computes the whole network, the next call overwrites the result. In that case, the first call
        compiles and runs the graph with MindSpore, and later calls run the operator directly.
        """
        if isinstance(self._network, ProgramNetwork):
            result = self._network.bind_inputs(arrays)
            if self.num_compilations:  # the graph has been compiled
                self._network.call_operator()
            else:
                self._network().asnumpy()  # `asnumpy` waits until the operator has ended
            return result
        values: NDArray[Any] = self.submit(arrays).asnumpy()
        return values

    def submit(self, arrays: Sequence[Any]) -> Any:
        """Start the graph and return its result, which a device may still compute. If one CPU operator computes the
        whole network, wait for the result.
        """
        if isinstance(self._network, ProgramNetwork):
            return self(arrays)
        tensors = tuple([each if isinstance(each, ms.Tensor) else self._tensor(each) for each in arrays])
        self._inputs.append(tensors)  # the device may copy them after this returns
        return self._run(tensors)

    def on_device(self, array: NDArray[Any]) -> ms.Tensor:
        """Return an array as a tensor for `submit`. On an NPU, several steps can use it without a new copy."""
        tensor = self._tensor(array)
        self._sources.append(tensor)  # as in `submit`
        return tensor.to("Ascend", non_blocking=True) if self._pins else tensor

    def _tensor(self, array: NDArray[Any]) -> ms.Tensor:
        """Return an array as a tensor, pinned on an NPU, so that the host need not wait while it is copied."""
        tensor = ms.Tensor.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self._pins else tensor

    def _run(self, tensors: tuple[ms.Tensor, ...]) -> Any:
        if self._phase is not None:
            return self._execute(tensors, self._phase)
        result = self._network(*tensors)
        if self._execute is not None and self.num_compilations == 1:
            (self._phase,) = self._network.compile_cache
        return result


def load_lite() -> Any:
    try:
        return importlib.import_module(LITE_PACKAGE)
    except ImportError as error:
        raise KernelError(f"model_config.backend: ge needs {LITE_PACKAGE}, which is not installed: {error}") from None


class LiteNetwork:
    """The graph in a MINDIR file, which mindspore_lite computes on an NPU. It is called like a `CompiledNetwork`. `ini`
    is a file with options of the graph engine. The constructor raises ConfigError if the arguments of the graph differ
    from `names` and the examples `inputs` in name, type or number of dimensions.
    """

    num_compilations = 1

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
        expected = [
            f"{name} {str(each.dtype).lower()} of {len(each.shape)}" for name, each in zip(names, inputs, strict=True)
        ]
        found = [_describe_argument(lite, each) for each in self._model.get_inputs()]
        if found != expected:
            raise ConfigError(
                f"{path} must have the arguments {', '.join(expected)} dimensions, as `llm-serving export` writes it. "
                f"Found: {', '.join(found)}"
            )

    def submit(self, arrays: Sequence[Int32Array | Float32Array]) -> NDArray[Any]:
        return self(arrays)

    def __call__(self, arrays: Sequence[Int32Array | Float32Array]) -> NDArray[Any]:
        tensors = [self._lite.Tensor(np.ascontiguousarray(array)) for array in arrays]
        (result,) = self._model.predict(tensors)
        values: NDArray[Any] = result.get_data_to_numpy()
        return values


def _describe_argument(lite: Any, tensor: Any) -> str:
    types = {lite.DataType.INT32: "int32", lite.DataType.FLOAT32: "float32"}
    return f"{tensor.name.split(':')[-1]} {types.get(tensor.dtype, tensor.dtype)} of {len(tensor.shape)}"


StepNetwork = CompiledNetwork | LiteNetwork


class StepNetworks(NamedTuple):
    logits: StepNetwork | None
    states: StepNetwork
    head: StepNetwork
    prompts: StepNetwork | None = None
    tokens: CompiledNetwork | None = None


def compile_networks(
    lowered: Lowered, hidden: int, num_prompt_rows: int = 0, *, has_adapters: bool = False
) -> StepNetworks:
    """Return the graphs of a network, each compiled at its first call. `hidden`: width of hidden states.
    `num_prompt_rows`: maximum number of prompts in a step of whole prompts, or 0 for no graph of such steps.
    """
    prompts, tokens = lowered.of_prompts, lowered.of_tokens
    slots = dynamic([ADAPTER_INPUT]) if has_adapters else []
    return StepNetworks(
        None if lowered.logits is None else CompiledNetwork(lowered.logits),
        CompiledNetwork(lowered.states, [*dynamic_inputs(), *slots]),
        CompiledNetwork(lowered.head, lowered.head_inputs(hidden)),
        None if prompts is None else CompiledNetwork(prompts, [*dynamic_inputs(num_prompt_rows), *slots]),
        None if tokens is None else CompiledNetwork(tokens, dynamic(tokens.inputs), is_decode=True),
    )


def load_networks(spec: ModelSpec, folder: Path, ini: Path | None, device_id: int) -> StepNetworks:
    """Return the graphs that `llm-serving export` wrote to `folder`. Raise ConfigError if they do not fit `spec`."""
    lite = load_lite()
    names = [name for name, _ in STEP_INPUTS]
    states, head = (
        LiteNetwork(lite, graph_file(folder, graph), ini, device_id, given, inputs_of(spec, graph))
        for graph, given in (("states", names), ("head", ["states", *names]))
    )
    return StepNetworks(None, states, head)
