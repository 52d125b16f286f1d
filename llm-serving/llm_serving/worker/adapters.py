"""The LoRA adapters of a WorkAgent: all in host memory, and copies of those in use where the network reads them."""

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
from llm_serving.formats.peft import PeftAdapter, number_of, read_adapter
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.network.adapters import PANEL, AdaptedLinear, AdapterLimits, check_adapter, padded_to_panels, panels
from llm_serving.network.operations import Weight


class _Stored(NamedTuple):
    a: Sequence[Array]
    b: Array
    ranks: Sequence[int]


class AdapterMemory:
    """Holds LoRA adapters in host memory, and copies them to slots: ranges of the Parameters that steps read."""

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
        self._host: dict[int, Future[list[_Stored]]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._slots: dict[int, int] = {}

    def set(self, number: int, folder: str) -> None:
        """Read an adapter into host memory in a thread. If `folder` is empty, drop the adapter from host memory. A copy
        in a slot of the network stays.
        """
        if folder:
            self._host[number] = self._reader.submit(self._read, Path(folder), number)
        else:
            self._host.pop(number, None)

    def read(self, number: int, folder: Path) -> None:
        self._host[number] = self._reader.submit(self._read, folder)
        self._host[number].result()

    def _read(self, folder: Path, number: int | None = None) -> list[_Stored]:
        """Read an adapter. Raise ModelError if its files have changed since the server derived `number` from them."""
        adapter = read_adapter(folder)
        if number is not None and number_of(adapter.fingerprint) != number:
            raise ModelError(f"{folder}: has changed since the adapter was loaded: unload it, and load it again")
        check_adapter(adapter, self._linears, self._experts, self.limits.max_rank)
        return [self._matrices(adapter, linear) for linear in self._linears]

    def slots_of_tokens(self, adapters: Int32Array, query_lens: Int32Array) -> Int32Array:
        """Copy each adapter of a step to its slot, unless it is there. Return the slot of each token, [T], or -1 for
        none. `adapters` [B, 2] holds the adapter number (0 if there is none) and the slot of each row. It is empty if
        no row has an adapter. Raise WorkerError if an adapter is not in host memory, or shares its slot with another.
        """
        if not len(adapters):
            return np.full(int(query_lens.sum()), -1, np.int32)
        if len(adapters) != len(query_lens):
            raise WorkerError(
                f"adapters must have one entry per row. Given: {len(adapters)} for {len(query_lens)} rows"
            )
        wanted = {(number, slot) for number, slot in adapters.tolist() if number}
        if len({slot for _, slot in wanted}) < len(wanted):
            raise WorkerError(f"each adapter of a step must have its own slot. Given (number, slot): {sorted(wanted)}")
        for number, slot in sorted(wanted):
            if self._slots.get(slot) != number:
                self._load(number, slot)
        return np.repeat(np.where(adapters[:, 0] > 0, adapters[:, 1], -1).astype(np.int32), query_lens)

    def _load(self, number: int, slot: int) -> None:
        if number not in self._host or not 0 <= slot < self.limits.max_loras:
            last = self.limits.max_loras - 1
            raise WorkerError(
                f"adapter {number} is not in host memory, or its slot is not from 0 to {last}. Given: slot {slot}"
            )
        try:
            adapter = self._host[number].result()
        except ModelError as error:
            raise WorkerError(f"adapter {number} cannot be read: {error}") from None
        self._slots.pop(slot, None)
        for stored, parameters, ranks in zip(adapter, self._parameters, self._ranks, strict=True):
            if self._as_program:
                _load_panels(slot, stored, parameters, ranks)
            else:
                _load_columns(slot, self.limits.max_loras, stored, parameters)
        self._slots[slot] = number

    def _matrices(self, adapter: PeftAdapter, linear: AdaptedLinear) -> _Stored:
        parts = linear.matrices(adapter.modules)
        ranks = [len(each.a) for each in parts]
        if not self._as_program:
            ((a, b),) = parts
            return _Stored([to_model_dtype(a, self._dtype)], to_model_dtype(b, self._dtype), ranks)
        in_pairs = self._dtype == "bfloat16"
        own = np.zeros((len(linear.part_of_panel), padded_to_panels(max(ranks)), PANEL), np.float32)
        for number, each in enumerate(parts):
            at = np.flatnonzero(np.array(linear.part_of_panel) == number)
            own[at, : padded_to_panels(ranks[number])] = panels(each.b, in_pairs=in_pairs)[at]
        a_panels = [to_model_dtype(panels(each.a, in_pairs=in_pairs), self._dtype) for each in parts]
        return _Stored(a_panels, to_model_dtype(own, self._dtype), ranks)


def _load_panels(slot: int, stored: _Stored, parameters: Sequence[ms.Parameter], ranks: Any) -> None:
    a, b = (parameter.storage for parameter in parameters)
    for first, of_part in zip(range(0, a.shape[1], a.shape[1] // len(stored.a)), stored.a, strict=True):
        a[slot, first : first + len(of_part)] = of_part
    b[slot, :, : stored.b.shape[1]] = stored.b
    ranks.storage[slot] = stored.ranks


def _load_columns(slot: int, slots: int, stored: _Stored, parameters: Sequence[ms.Parameter]) -> None:
    """Copy an adapter to `slot` in a network of MindSpore Cells, where one matrix A and one matrix B hold all `slots`.
    A slot is a range of rows of A and of columns of B. Beyond the adapter's rank it holds zeros.
    """
    a, b = parameters
    width = a.shape[0] // slots
    (of_a,), of_b = stored.a, stored.b
    first, used = slot * width, len(of_a)
    rows, columns = np.zeros((width, a.shape[1]), of_a.dtype), np.zeros((b.shape[0], width), of_b.dtype)
    rows[:used], columns[:, :used] = of_a, of_b
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
