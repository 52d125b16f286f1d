"""The parts of a network, ready to be called: compiled here, or read as files of MindSpore's graph engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.lowering.lower import Lowered
from llm_serving.lowering.mindir import graph_file, inputs_of
from llm_serving.lowering.step import STEP_INPUTS, dynamic_inputs
from llm_serving.models.spec import ModelSpec
from llm_serving.worker.compiled_network import CompiledNetwork
from llm_serving.worker.lite_network import LiteNetwork, load_lite


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
