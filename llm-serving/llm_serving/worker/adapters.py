"""The LoRA adapters of a WorkAgent: their matrices in host memory, and copies in the slots that the network reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import to_model_dtype
from llm_serving.core.step import Int32Array
from llm_serving.errors import ModelError, WorkerError
from llm_serving.formats.peft import PeftAdapter, fingerprint, number_of, read_adapter
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.models.adapters import AdapterLimits, check_adapter
from llm_serving.network.adapters import AdaptedLinear, LowRankChange, panels
from llm_serving.network.operations import Weight


class _Matrices(NamedTuple):
    """An adapter's matrices for one linear operation, in the layout of a slot and the model dtype."""

    a: Array
    b: Array
    rank: int


class AdapterMemory:
    """Adapters in host memory by number, and the adapter slots of the network.

    Args:
        parameters: Weight -> the Parameters of the slots.
        as_program: Whether a program reads the slots; otherwise, Cells read them.
    """

    def __init__(
        self,
        linears: Sequence[AdaptedLinear],
        experts: Sequence[str],
        parameters: Mapping[Weight, Sequence[ms.Parameter]],
        dtype: str,
        limits: AdapterLimits,
        *,
        as_program: bool,
    ) -> None:
        self.limits = limits
        self._linears, self._experts, self._dtype, self._as_program = linears, experts, dtype, as_program
        self._parameters = [[parameters[each][0] for each in (linear.a, linear.b)] for linear in linears]
        self._ranks = [parameters[linear.ranks][0] if as_program else None for linear in linears]
        self._host: dict[int, Future[list[_Matrices]]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._slots: dict[int, int] = {}
        """Slot -> number of the adapter that it holds."""

    def set(self, number: int, folder: str) -> None:
        """Read an adapter into host memory in another thread. If `folder` is empty, drop the adapter from host memory;
        a slot may still hold it.
        """
        if folder:
            self._host[number] = self._reader.submit(self._read_same, number, Path(folder))
        else:
            self._host.pop(number, None)

    def read(self, number: int, folder: Path) -> None:
        """Read an adapter into host memory under any number. Raise ModelError if it cannot be served."""
        self._host[number] = self._reader.submit(self._read, folder)
        self._host[number].result()

    def _read_same(self, number: int, folder: Path) -> list[_Matrices]:
        """Read an adapter. Raise ModelError if its files no longer have the number that they had when it was loaded."""
        matrices = self._read(folder)
        if number_of(fingerprint(folder)) != number:
            raise ModelError(f"{folder}: has changed since the adapter was loaded: unload it, and load it again")
        return matrices

    def _read(self, folder: Path) -> list[_Matrices]:
        adapter = read_adapter(folder)
        check_adapter(adapter, self._linears, self._experts, self.limits.max_rank)
        return [self._matrices(adapter, linear) for linear in self._linears]

    def slots_of_tokens(self, adapters: Int32Array, query_lens: Int32Array) -> Int32Array:
        """Return the slot of each token, [T]; -1: the token uses no adapter.

        `adapters` [B, 2]: number and slot of the adapter of each row; number 0: no adapter; an empty array: no row has
        one. Adapters that are not in their slot are first copied there. Raise WorkerError if one is not in host memory,
        or if rows name different adapters for a slot.
        """
        if not len(adapters):
            return np.full(int(query_lens.sum()), -1, np.int32)
        if len(adapters) != len(query_lens):
            raise WorkerError(
                f"adapters must have one entry per row. Given: {len(adapters)} for {len(query_lens)} rows"
            )
        wanted = {(number, slot) for number, slot in adapters.tolist() if number}
        if len({slot for _, slot in wanted}) < len(wanted):
            raise WorkerError("adapters must give each slot to one adapter in a step")
        for number, slot in sorted(wanted):
            if self._slots.get(slot) != number:
                self._load(number, slot)
        return np.repeat(np.where(adapters[:, 0] > 0, adapters[:, 1], -1).astype(np.int32), query_lens)

    def _load(self, number: int, slot: int) -> None:
        if number not in self._host or not 0 <= slot < self.limits.max_loras:
            raise WorkerError(f"adapter {number} is not in host memory, or slot {slot} does not exist")
        try:
            adapter = self._host[number].result()
        except ModelError as error:
            raise WorkerError(f"adapter {number} cannot be read: {error}") from None
        self._slots.pop(slot, None)
        for matrices, parameters, ranks in zip(adapter, self._parameters, self._ranks, strict=True):
            if self._as_program:
                _load_panels(slot, matrices, parameters, ranks)
            else:
                _load_columns(slot, self.limits.max_loras, matrices, parameters)
        self._slots[slot] = number

    def _matrices(self, adapter: PeftAdapter, linear: AdaptedLinear) -> _Matrices:
        changes = {
            name: LowRankChange(to_float32(each.a.read()), to_float32(each.b.read()), each.scale)
            for name in linear.modules
            if (each := adapter.modules.get(name)) is not None
        }
        a, b = linear.matrices(changes)
        if self._as_program:
            n, rank = b.shape
            columns = np.zeros((rank, linear.b.shape[2]), np.float32)
            columns[:, :n] = b.T
            return _Matrices(to_model_dtype(panels(a), self._dtype), to_model_dtype(columns, self._dtype), rank)
        return _Matrices(to_model_dtype(a, self._dtype), to_model_dtype(b, self._dtype), len(a))


def _load_panels(slot: int, matrices: _Matrices, parameters: Sequence[ms.Parameter], ranks: Any) -> None:
    a, b = (parameter.storage for parameter in parameters)
    a[slot, : len(matrices.a)] = matrices.a
    b[slot, : matrices.rank] = matrices.b
    ranks.storage[slot] = matrices.rank


def _load_columns(slot: int, slots: int, matrices: _Matrices, parameters: Sequence[ms.Parameter]) -> None:
    """Write an adapter into the slot of a graph of Cells: the slot's rows of A and columns of B. Fill them with zeros
    beyond the adapter's rank.
    """
    a, b = parameters
    width = a.shape[0] // slots
    first, used = slot * width, matrices.rank
    rows, columns = np.zeros((width, a.shape[1]), matrices.a.dtype), np.zeros((b.shape[0], width), matrices.b.dtype)
    rows[:used], columns[:, :used] = matrices.a, matrices.b
    if hasattr(a, "storage"):
        a.storage[first : first + width] = rows
        b.storage[:, first : first + width] = columns
        return
    dtype = a.dtype
    a[first : first + width] = _tensor(rows, dtype)
    b[:, first : first + width] = _tensor(columns, dtype)


def _tensor(array: Array, dtype: Any) -> ms.Tensor:
    if array.dtype == np.uint16:
        array = to_float32(array)
    return ms.Tensor(array).astype(dtype)
