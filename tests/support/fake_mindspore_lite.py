"""A fake of mindspore_lite that runs MINDIR files with the operator library and checks its arguments."""

from __future__ import annotations

import configparser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train.mind_ir_pb2 import ModelProto, TensorProto

TYPES = {TensorProto.INT32: ("int32", ms.int32), TensorProto.FLOAT: ("float32", ms.float32)}


class Tensor:
    """A tensor that copies its data, as a device does."""

    def __init__(self, array: Any) -> None:
        assert isinstance(array, np.ndarray), "a tensor is made of an array"
        assert array.flags.c_contiguous, "its elements lie in order"
        self._array = array.copy()

    def get_data_to_numpy(self) -> Any:
        return self._array


class Model:
    """The graph of one file."""

    built: ClassVar[list[SimpleNamespace]] = []
    """Options of every file that was loaded."""

    def build_from_file(self, path: str, kind: str, context: Any, config_path: str = "") -> None:
        assert kind == "MINDIR"
        assert Path(path).suffix == ".mindir"
        assert (context.target, context.ascend.provider) == (["Ascend"], "ge")
        options = configparser.ConfigParser()
        if config_path:
            assert options.read(config_path), f"{config_path} cannot be read"
        proto = ModelProto()
        proto.ParseFromString(Path(path).read_bytes())
        self._inputs = [
            SimpleNamespace(name=each.name, shape=list(each.tensor[0].dims), dtype=TYPES[each.tensor[0].data_type][0])
            for each in proto.graph.input
        ]
        open_ended = [
            ms.Tensor(
                shape=[None if size < 0 else size for size in each.tensor[0].dims],
                dtype=TYPES[each.tensor[0].data_type][1],
            )
            for each in proto.graph.input
        ]
        self._graph = nn.GraphCell(ms.load(path))
        self._graph.set_inputs(*open_ended)
        sections = {name: dict(options[name]) for name in options.sections()}
        options = SimpleNamespace(
            name=Path(path).name, device_id=context.ascend.device_id, rank_id=context.ascend.rank_id, options=sections
        )
        self.built.append(options)

    def get_inputs(self) -> list[Any]:
        return self._inputs

    def predict(self, tensors: list[Tensor]) -> list[Tensor]:
        arrays = [each.get_data_to_numpy() for each in tensors]
        assert len(arrays) == len(self._inputs)
        for array, expected in zip(arrays, self._inputs, strict=True):
            assert array.dtype == expected.dtype, expected.name
            assert array.ndim == len(expected.shape), expected.name
            sizes = zip(array.shape, expected.shape, strict=True)
            assert all(size == fixed or fixed < 0 for size, fixed in sizes), expected.name
        return [Tensor(self._graph(*(ms.Tensor(array) for array in arrays)).asnumpy())]


def fake_package() -> ModuleType:
    """Return the module to put into `sys.modules` as `mindspore_lite`."""
    package = ModuleType("mindspore_lite")
    package.Context = lambda: SimpleNamespace(ascend=SimpleNamespace())  # type: ignore[attr-defined]
    package.ModelType = SimpleNamespace(MINDIR="MINDIR")  # type: ignore[attr-defined]
    package.DataType = SimpleNamespace(INT32="int32", FLOAT32="float32")  # type: ignore[attr-defined]
    package.Tensor, package.Model = Tensor, Model  # type: ignore[attr-defined]
    Model.built = []
    return package
