"""Numbers that are the same on every machine and with every NumPy: raw bits of a counter, and arithmetic that is exact.

Philox (Salmon et al. 2011) gives the bits, keyed by a text. NumPy promises the bits of its generators, not of the
distributions made of them, so those are made here.
"""

import hashlib
import math

import numpy as np


def bits(key: str, count: int) -> np.ndarray:
    """Return [count] random uint64 numbers that depend only on the key."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(count)


def integers(key: str, count: int, low: int, high: int) -> np.ndarray:
    """`key` -> [count] of low <= x < high, int32. The remainder is uniform enough for ranges of some hundred."""
    return (bits(key, count) % np.uint64(high - low)).astype(np.int32) + np.int32(low)


def bell(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Close to normal, mean 0 and variance 1, float64: sums of four uniform numbers of 16 bits, so within 3.5."""
    parts = bits(key, math.prod(shape)).view(np.uint16).reshape(-1, 4).astype(np.float64)
    return ((parts.sum(axis=1) - 2 * 65535) / (65536 * math.sqrt(4 / 12))).reshape(shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite numbers -> bits of the nearest bfloat16, ties to even, uint16."""
    as_bits = values.astype(np.float32).view(np.uint32)
    last = (as_bits >> np.uint32(16)) & np.uint32(1)
    return ((as_bits + np.uint32(0x7FFF) + last) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(stored: np.ndarray) -> np.ndarray:
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
