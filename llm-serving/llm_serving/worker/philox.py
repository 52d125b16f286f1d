"""Random numbers from a counter: the same (seed, position) gives the same number, whatever was drawn before.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3,
with the constants of that paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: tuple[UInt64Array, ...], key: tuple[UInt64Array, UInt64Array]) -> tuple[UInt64Array, ...]:
    """Ten rounds of Philox on many counters at once.

    Args:
        counter: Four arrays [n] of 32-bit words, each held in 64 bits.
        key: Two arrays [n] of 32-bit words, each held in 64 bits.

    Returns:
        Four arrays [n] of 32-bit random words, each held in 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 -> 64 bit products: the reason to hold words in 64 bits.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_WORD
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def uniform(seeds: UInt64Array, positions: NDArray[Any]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position).

    Args:
        seeds: [n] the key.
        positions: [n] integers >= 0, the counter.
    """
    zero = np.zeros(len(seeds), np.uint64)
    counter = (positions.astype(np.uint64), zero, zero, zero)
    high, low, _, _ = philox4x32(counter, (seeds & _LOW_WORD, seeds >> _WORD_BITS))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))  # 32 + 21 bits
    return bits.astype(np.float64) * 2.0**-53
