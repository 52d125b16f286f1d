"""Codes of 4 and 8 bits in words of 32, the lowest bits first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Uint8Array = NDArray[np.uint8]


def per_word(bits: int) -> int:
    """Codes in a word."""
    return 32 // bits


def codes_of_words(words: NDArray[Any], bits: int) -> Uint8Array:
    """[..., n] words of 32 bits -> [..., n * per_word(bits)] codes."""
    return codes_of_bytes(np.ascontiguousarray(words).view(np.uint8), bits)


def codes_of_bytes(packed: Uint8Array, bits: int) -> Uint8Array:
    """[..., n] bytes -> [..., n * 8 // bits] codes, the low half of a byte first."""
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def words_of_codes(codes: Uint8Array, bits: int) -> NDArray[np.int32]:
    """The way back: [..., n] codes -> [..., ceil(n / per_word(bits))] words, the last filled up with zeros."""
    missing = -codes.shape[-1] % per_word(bits)
    if missing:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], missing), np.uint8)], axis=-1)
    packed = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(packed).view(np.int32)
