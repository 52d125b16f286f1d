"""Writes tensors as safetensors or as a MindSpore checkpoint, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.formats import mindspore_ckpt
from llm_serving.formats.folder import INDEX_NAME, SINGLE_NAME
from llm_serving.formats.stored_tensor import PACKED_DTYPES, Array

MAX_SHARD_BYTES: Final = 5_000_000_000
_AT_ONCE: Final = 2**24
_MAX_CONTENT_BYTES: Final = 2**29
_DTYPES: Final[Mapping[np.dtype[np.generic], str]] = {
    **{np.dtype(dtype.numpy): dtype.safetensors for dtype in MODEL_DTYPES.values()},
    **{np.dtype(PACKED_DTYPES[name]): name for name in ("I8", "I32", "I64")},
}
_CHECKPOINT_DTYPES: Final[Mapping[np.dtype[np.generic], str]] = {
    np.dtype(dtype.numpy): dtype.checkpoint for dtype in MODEL_DTYPES.values()
}

Advance = Callable[[int], object]


class TensorSource(NamedTuple):
    """A tensor to write. `read` is called when the tensor is written; the writer keeps no reference to the result."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_safetensors(
    folder: Path, tensors: list[TensorSource], advance: Advance, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write safetensors files, and an index if there are several. Each has at most `max_shard_bytes` or one tensor."""
    shards = list(_shards(tensors, max_shard_bytes))
    names = [SINGLE_NAME]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.num_bytes for each in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, advance)


def write_checkpoint(path: Path, tensors: list[TensorSource], advance: Advance) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            array = tensor.read().reshape(-1)
            step = _MAX_CONTENT_BYTES // tensor.dtype.itemsize
            for start in range(0, max(array.size, 1), step):
                _write_value(file, tensor, array[start : start + step], advance)


def _shards(tensors: list[TensorSource], max_bytes: int) -> Iterator[list[TensorSource]]:
    shard: list[TensorSource] = []
    for tensor in tensors:
        if shard and sum(each.num_bytes for each in shard) + tensor.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write_shard(file: BinaryIO, tensors: list[TensorSource], advance: Advance) -> None:
    # transformers requires this metadata.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        dtype, end = _DTYPES[tensor.dtype], at + tensor.num_bytes
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    file.write(len(content).to_bytes(8, "little") + content)
    for tensor in tensors:
        _write_array(file, tensor.read().reshape(-1), advance)


def _write_value(file: BinaryIO, tensor: TensorSource, part: Array, advance: Advance) -> None:
    dims = b"".join(mindspore_ckpt.number(1, length) for length in tensor.shape)
    before = (
        dims
        + mindspore_ckpt.content(2, _CHECKPOINT_DTYPES[tensor.dtype].encode())
        + mindspore_ckpt.opening(3, part.nbytes)
    )
    head = (
        mindspore_ckpt.content(1, tensor.name.encode()) + mindspore_ckpt.opening(2, len(before) + part.nbytes) + before
    )
    file.write(mindspore_ckpt.opening(1, len(head) + part.nbytes) + head)
    _write_array(file, part, advance)


def _write_array(file: BinaryIO, array: Array, advance: Advance) -> None:
    step = _AT_ONCE // array.itemsize
    for start in range(0, array.size, step):
        piece = np.ascontiguousarray(array[start : start + step])
        file.write(piece.data)
        advance(piece.nbytes)
