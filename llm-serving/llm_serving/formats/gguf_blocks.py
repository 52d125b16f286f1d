"""The quantized block types of GGUF, dequantized in NumPy (layouts: ggml-common.h of ggml).

    Q4_0   32 elements    d f16, 16 bytes: low halves are the first 16, high halves the others      (q - 8) d
    Q4_1   32 elements    d f16, m f16, 16 bytes as of Q4_0                                         q d + m
    Q5_0   32 elements    d f16, fifth bits u32, 16 bytes as of Q4_0                                (q - 16) d
    Q5_1   32 elements    d f16, m f16, fifth bits u32, 16 bytes as of Q4_0                         q d + m
    Q8_0   32 elements    d f16, 32 int8                                                            q d
    Q4_K   256 elements   d f16, m f16, 12 bytes of scales and minima, 128 bytes                    q d s - m n
    Q5_K   256 elements   the same with 32 bytes of fifth bits before the last                      q d s - m n
    Q6_K   256 elements   128 bytes of low halves, 64 of upper bits, 16 int8 of scales, d f16       (q - 32) d s

s and n belong to groups of 32 elements, in Q6_K of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.formats.quantized_tensor import QuantizedTensor, check_scales
from llm_serving.formats.stored_tensor import Array

Uint8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]

_AT_ONCE: Final = 2**22


@dataclass(frozen=True)
class BlockType:
    """A block type.

    Attributes:
        elements: Elements of a block.
        num_bytes: Bytes of a block.
        unpack: [n, num_bytes] blocks -> quantized values and scales, or float32 values [n, elements].
        bits: Bits of the quantized values; 0: `unpack` returns float32 values.
        group: Elements that share a scale.
    """

    name: str
    elements: int
    num_bytes: int
    unpack: Callable[[Uint8Array], Any]
    bits: int = 0
    group: int = 32

    def unpacked(self, rows: Array) -> QuantizedTensor | Array:
        """[out, bytes of a row] -> the matrix"""
        out = len(rows)
        width = rows.shape[1] // self.num_bytes * self.elements
        if self.bits:
            qvalues, scales = self.unpack(np.asarray(rows).reshape(-1, self.num_bytes))
            of_rows = np.ascontiguousarray(qvalues.reshape(out, width))
            return QuantizedTensor(of_rows, scales.reshape(out, -1), None, self.bits, min(self.group, max(1, width)))
        values = np.empty((out, width), np.float32)
        step = max(1, _AT_ONCE // max(1, width))
        for start in range(0, out, step):
            part = np.asarray(rows[start : start + step])
            values[start : start + step] = self.unpack(part.reshape(-1, self.num_bytes)).reshape(len(part), width)
        return values


def _halves(blocks: Uint8Array, start: int) -> Float32Array:
    """Return the float16 scale [n, 1] at a byte offset."""
    scales = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
    check_scales(scales)
    return scales


def _low_then_high(packed: Uint8Array) -> Uint8Array:
    """[..., n] bytes -> [..., 2 n] values: low halves, then high halves"""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Uint8Array) -> tuple[Uint8Array, Float32Array]:
    return _low_then_high(blocks[:, 2:]), _halves(blocks, 0)


def _q4_1(blocks: Uint8Array) -> Float32Array:
    values: Float32Array = _low_then_high(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _five_bits(blocks: Uint8Array) -> Uint8Array:
    """[n, 20] fifth bits and low four bits -> [n, 32] values"""
    fifth = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    return _low_then_high(blocks[:, 4:]) | fifth << np.uint8(4)


def _q5_0(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    return (_five_bits(blocks[:, 2:]) - np.uint8(16)).view(np.int8), _halves(blocks, 0)


def _q5_1(blocks: Uint8Array) -> Float32Array:
    values: Float32Array = _five_bits(blocks[:, 4:]) * _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q8_0(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0)


def _q6_k(blocks: Uint8Array) -> tuple[NDArray[np.int8], Float32Array]:
    # Half a block has 128 elements in four runs of 32: a byte of low halves serves two runs, one of upper bits four.
    low = _low_then_high(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    qvalues = (low | upper << 4) - np.uint8(32)
    scales = _halves(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return qvalues.view(np.int8), scales


def _scales_and_minima(packed: Uint8Array) -> tuple[Float32Array, Float32Array]:
    """[n, 12] -> two arrays [n, 8, 1] of 6-bit values: four in the low bits of bytes, the others split between
    bytes.
    """
    first, second, both = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, both & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], axis=1)
    return scales[..., None].astype(np.float32), minima[..., None].astype(np.float32)


def _of_runs(blocks: Uint8Array, qvalues: Uint8Array) -> Float32Array:
    """[n, 8, 32] quantized values -> values, with the scales and minima at the start of a block"""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scales *= _halves(blocks, 0)[..., None]
    minima *= _halves(blocks, 2)[..., None]
    values: Float32Array = qvalues * scales
    values -= minima
    return values


def _q4_k(blocks: Uint8Array) -> Float32Array:
    return _of_runs(blocks, _low_then_high(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Uint8Array) -> Float32Array:
    qvalues = _low_then_high(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _of_runs(blocks, (qvalues | fifth << 4).astype(np.uint8))


BLOCKS: Final[Mapping[int, BlockType]] = {
    2: BlockType("Q4_0", 32, 18, _q4_0, bits=4),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0, bits=8),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0, bits=8),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k, bits=8, group=16),
}
