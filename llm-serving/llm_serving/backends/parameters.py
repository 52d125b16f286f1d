"""Parameters in the model dtype: on a CPU in aligned memory of this process, on an NPU in device memory."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import mint
from mindspore.common.np_dtype import bfloat16 as numpy_bfloat16
from numpy.typing import NDArray

from llm_serving.core.dtypes import MODEL_DTYPES, from_bfloat16, round_to_bfloat16
from llm_serving.core.process import release_pages
from llm_serving.core.step import Int32Array

Array = NDArray[Any]
"""float32, float16, or bfloat16 as uint16 bits."""
BlockMemory: TypeAlias = ms.Parameter | Array
_ALIGNMENT = 64
_LARGE_PAGE = 2**21


def to_model_dtype(array: Array, dtype: str) -> Array:
    """Return `array` in the model dtype (bfloat16 as uint16 bits), without a copy if it has that dtype."""
    storage = np.dtype(MODEL_DTYPES[dtype].numpy)
    if array.dtype == storage:
        return array
    values = from_bfloat16(array) if array.dtype == np.uint16 else array
    if dtype == "bfloat16":
        return round_to_bfloat16(np.asarray(values, dtype=np.float32))
    return values.astype(storage)


def zeroed_array(shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeroed memory for a tensor, aligned to a cache line. Large arrays use large pages."""
    storage = np.dtype(MODEL_DTYPES[dtype].numpy)
    elements: Array = zeroed_bytes(int(np.prod(shape)) * storage.itemsize).view(storage).reshape(shape)
    return elements


def zeroed_bytes(size: int) -> NDArray[np.uint8]:
    if size < 2 * _LARGE_PAGE:
        raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
    else:
        pages = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw = np.frombuffer(pages, dtype=np.uint8)
        offset = -raw.ctypes.data % _LARGE_PAGE
        # The part after the last whole large page gets small pages, so that no large page is used only in part.
        with suppress(OSError):  # Linux may be built without large pages
            pages.madvise(mmap.MADV_HUGEPAGE, offset, size // _LARGE_PAGE * _LARGE_PAGE)
    return raw[offset : offset + size]


class WeightMemory:
    """Divides large memory areas among weights, so that small weights also lie in large pages, which are faster."""

    SIZE: Final = 2**26

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        if size >= self.SIZE // 2:
            return zeroed_bytes(size)
        needed = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if needed > self._free.size:
                self._free = zeroed_bytes(self.SIZE)
            taken, self._free = self._free[:size], self._free[needed:]
        return taken


weight_memory: Final = WeightMemory().take


def zeroed_parameter(shape: tuple[int, ...], dtype: str, name: str | None = None) -> ms.Parameter:
    """Return a Parameter of zeros: on an NPU in device memory, else in pages that the system provides on access."""
    if is_on_npu():
        return _parameter_of(mint.zeros(shape, dtype=getattr(ms, dtype)), name)
    return parameter_over(zeroed_array(shape, dtype), dtype, name)


def host_tensor(array: Array, dtype: str) -> ms.Tensor:
    """Return a tensor in host memory that shares the memory of `array`."""
    return ms.Tensor.from_numpy(array.view(numpy_bfloat16) if dtype == "bfloat16" else array)


def parameter_over(array: Array, dtype: str, name: str | None = None) -> ms.Parameter:
    """Return a Parameter with the elements of `array`. On a CPU it shares the array's memory, so the graph sees later
    writes, and its attribute `storage` keeps the array alive. On an NPU the elements are copied to the device.
    """
    tensor = host_tensor(array, dtype)
    if is_on_npu():
        # Otherwise MindSpore copies the array at the first step and also keeps the copy on the host.
        return _parameter_of(tensor.move_to("Ascend", blocking=True), name)
    parameter = _parameter_of(tensor, name)
    parameter.storage = array
    return parameter


def storage_dtype(tensor: ms.Tensor) -> np.dtype[Any]:
    name = str(tensor.dtype).lower()
    return np.dtype("uint16" if name == "bfloat16" else name)


def bytes_of_block(cache: ms.Parameter) -> int:
    shape: tuple[int, ...] = cache.shape
    return math.prod(shape[1:]) * storage_dtype(cache).itemsize


def clear_cache(cache: ms.Parameter) -> None:
    """Zero a cache by returning its pages to the system. Do nothing on an NPU."""
    storage = getattr(cache, "storage", None)
    if isinstance(storage, np.ndarray):  # on an NPU it is a method of MindSpore's Tensor
        release_pages(storage.ctypes.data, storage.nbytes)


def is_on_npu() -> bool:
    return bool(ms.get_context("device_target") == "Ascend")


def _parameter_of(tensor: ms.Tensor, name: str | None) -> ms.Parameter:
    """Return a Parameter that shares the memory of `tensor`. `Parameter(tensor)` would copy it."""
    placeholder = host_tensor(np.zeros(1, storage_dtype(tensor)), str(tensor.dtype).lower())
    named = {} if name is None else {"name": name}
    parameter = ms.Parameter(placeholder, requires_grad=False, **named)
    parameter.assign_value(tensor)
    return parameter


def float32_parameter(array: Array, name: str | None = None) -> ms.Parameter:
    memory = zeroed_array(array.shape, "float32")
    memory[...] = from_bfloat16(array) if array.dtype == np.uint16 else array
    return parameter_over(memory, "float32", name)


def host_blocks(cache: ms.Parameter, num_blocks: int) -> Array:
    """Return zeroed host memory for blocks like those of `cache`. The system provides its pages on first access."""
    return np.zeros((num_blocks, *cache.shape[1:]), storage_dtype(cache))


def copy_blocks_in_memory(source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
    """Copy blocks as `Backend.copy_blocks` does. Between two memories, copy each run of adjacent blocks at once."""
    blocks, copies = _memory(source), _memory(target)
    if blocks is copies:
        for source_block, target_block in pairs.tolist():
            copies[target_block] = blocks[source_block]
        return
    for from_blocks, to_blocks in _neighbours(pairs):
        copies[to_blocks] = blocks[from_blocks]


def _neighbours(pairs: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Split `pairs` into runs in which both block ids step by 1 or by -1. Yield each run as slices (source, target)."""
    steps = np.diff(pairs, axis=0)
    continues = (np.abs(steps) == 1).all(axis=1)
    continues[1:] &= (steps[1:] == steps[:-1]).all(axis=1)
    ends = [*np.flatnonzero(~continues).tolist(), len(pairs) - 1]
    given, first = pairs.tolist(), 0
    for last in ends:
        yield _slice(given[first][0], given[last][0]), _slice(given[first][1], given[last][1])
        first = last + 1


def _slice(first: int, last: int) -> slice:
    if first <= last:
        return slice(first, last + 1)
    return slice(first, None if last == 0 else last - 1, -1)


def _memory(blocks: BlockMemory) -> Array:
    memory: Array = blocks.storage if isinstance(blocks, ms.Parameter) else blocks
    return memory
