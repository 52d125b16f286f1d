"""A MINDIR file that mindspore_lite computes on Ascend, by its graph engine (`model_config.backend: ge`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import Float32Array, Int32Array
from llm_serving.errors import ConfigError, KernelError

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
