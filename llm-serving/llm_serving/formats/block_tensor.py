"""Quantized matrices in blocks, as GGUF files store them. Reading a file rounds none of its numbers.

value = scale * (qvalue - zero) - minimum

Each group of 16 or 32 columns has a scale and, in some block types, a minimum. In types with blocks of 32 columns,
scales and minima are float16. In types with blocks of 256 columns, they are integers. Each block then has two float16
factors, called units: one for its scales and one for its minima.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor

Float32Array = NDArray[np.float32]

UNIT_COLUMNS: Final = 256
PANEL_ROWS: Final = 16
"""Number of weight rows that kernels pack together, as a panel. Only the last stacked tensor may end inside one."""
_AT_ONCE: Final = 2**22


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A matrix [out, in] in quantized blocks. Raise ModelError if a scale, minimum or unit is infinite or NaN.

    Attributes:
        qvalues: Quantized values of 4, 5, 6 or 8 bits (`bits`), uint8 [out, in].
        group_size: Number of columns in a group, 16 or 32. It divides `in`.
        zero: Quantized value that represents 0. It is 0 if there are minima.
        scales: [out, groups]; float16, or int8 with `units`.
        minima: [out, groups]; float16, or uint8 with `minimum_units`. None if all minima are 0.
        units, minimum_units: Factors of integer `scales` and `minima`, float16 [out, in / 256]; otherwise None.
    """

    qvalues: NDArray[np.uint8]
    bits: int
    group_size: int
    zero: int
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    units: NDArray[np.float16] | None = None
    minimum_units: NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        for numbers in (self.scales, self.minima, self.units, self.minimum_units):
            if numbers is not None and numbers.dtype == np.float16 and not np.isfinite(numbers).all():
                found = numbers[~np.isfinite(numbers)][0]
                raise ModelError(f"scales and minima of blocks must be finite numbers. Found: {found}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.qvalues.shape
        return rows, columns

    def group_scales(self) -> Float32Array:
        return self._numbers(self.scales, self.units)

    def group_minima(self) -> Float32Array | None:
        """Return minima [out, groups], or None if all are 0. An integer minimum times its unit is exact in float32."""
        return None if self.minima is None else self._numbers(self.minima, self.minimum_units)

    def _numbers(self, numbers: NDArray[Any], units: NDArray[np.float16] | None) -> Float32Array:
        values: Float32Array = numbers.astype(np.float32)
        if units is not None:
            values *= np.repeat(units.astype(np.float32), UNIT_COLUMNS // self.group_size, axis=1)
        return values

    def dequantized(self) -> Float32Array:
        """Return scale * (qvalue - zero) - minimum, [out, in]. Product and difference are rounded to float32."""
        out, width = self.shape
        values = np.empty((out, width), np.float32)
        step = max(1, _AT_ONCE // max(1, width))
        for start in range(0, out, step):
            rows = self.select(np.arange(start, min(out, start + step)))
            part = rows.qvalues.astype(np.float32).reshape(len(rows.qvalues), -1, self.group_size)
            part -= self.zero
            part *= rows.group_scales()[..., None]
            if (minima := rows.group_minima()) is not None:
                part -= minima[..., None]
            values[start : start + step] = part.reshape(-1, width)
        return values

    def select(self, rows: NDArray[np.integer[Any]]) -> BlockTensor:
        """Return the rows with these indices, in this order. A negative index gives a row of zeros, for padding."""
        known, zeros = np.maximum(rows, 0), rows < 0

        def of(numbers: NDArray[Any] | None) -> Any:
            if numbers is None:
                return None
            chosen = numbers[known]
            chosen[zeros] = 0
            return chosen

        return replace(
            self,
            qvalues=self.qvalues[known],
            scales=of(self.scales),
            minima=of(self.minima),
            units=of(self.units),
            minimum_units=of(self.minimum_units),
        )

    def as_quantized(self) -> QuantizedTensor | None:
        """Return the values as a `QuantizedTensor`. Return None if there are minima, which that class lacks."""
        if self.minima is not None:
            return None
        if self.bits == 4 and self.zero == 8:
            return QuantizedTensor(self.qvalues, self.group_scales(), None, 4, self.group_size)
        qvalues = (self.qvalues - np.uint8(self.zero)).view(np.int8)
        return QuantizedTensor(qvalues, self.group_scales(), None, 8, self.group_size)
