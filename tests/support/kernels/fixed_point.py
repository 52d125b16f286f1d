"""Linear layers of bfloat16, computed with 16-bit integers, in NumPy. The bits are those of csrc/fixed_point.h.

This is block floating point (J. H. Wilkinson, Rounding Errors in Algebraic Processes, 1963): numbers that share a
power of two, their unit, are multiplied and summed as integers. All weights of an output share a unit. Activations
share a unit within a row and a block of 128 inputs. It is the smallest unit for which no sum can exceed 32 bits, as the
Cauchy-Schwarz inequality shows.

A bfloat16 that is not much smaller than the largest one with the same unit (for weights: at least 2^-7 of it) is an
exact multiple of the unit; smaller ones are rounded to the nearest multiple. Sums within a block are exact. The sum of
a block and each addition of blocks are rounded to float32. Subnormal numbers count as zero.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Singles = NDArray[np.float32]
Doubles = NDArray[np.float64]
Multiples = NDArray[np.int64]

BLOCK_INPUTS = 128
UNIT_BITS = 14
MIN_EXPONENT = -90

_LANES = 16
_ROUNDING_NORM = np.float32(6)
_SMALLEST_NORMAL = 2.0**-126


def linear(x: Floats, weight: Floats) -> Singles:
    """Multiply x [M, K] by the transposed weight [N, K], both exact bfloat16 values. Return float32 [M, N]."""
    multiples, powers = _weight_multiples(_without_subnormals(weight))
    blocks = [slice(first, first + BLOCK_INPUTS) for first in range(0, x.shape[1], BLOCK_INPUTS)]
    largest = max([1, *(int(np.sum(multiples[:, block] ** 2, axis=1).max(initial=0)) for block in blocks)])
    max_norm = np.float32(2.0**31 * 0.999 / math.sqrt(largest))
    sums = np.zeros((len(x), len(weight)), np.float32)
    for block in blocks:
        row_multiples, row_units = _activation_multiples(_without_subnormals(x[:, block]), max_norm)
        sums = _single(_exact_sums(row_multiples, multiples[:, block]) * row_units[:, None] + sums)
    return _single(sums * powers)


def _weight_multiples(weight: Doubles) -> tuple[Multiples, Doubles]:
    """Return the weights as integer multiples [N, K] of the unit of each output, and 2^14 times these units [N]."""
    powers = np.exp2(_exponents(weight))
    return np.rint(weight / powers[:, None] * 2**UNIT_BITS).astype(np.int64), powers


def _activation_multiples(x: Doubles, max_norm: np.float32) -> tuple[Multiples, Doubles]:
    """Return a block of inputs as integer multiples [M, K] of the unit of each row, and 2^-14 times these units [M].
    The norm of a row of multiples is at most `max_norm`.
    """
    finite = np.all(np.isfinite(x), axis=1)
    x = np.where(finite[:, None], x, 0)
    exponents = _exponents(x)
    values = _single(x / np.exp2(exponents)[:, None])
    with np.errstate(divide="ignore"):
        allowed = (max_norm - _ROUNDING_NORM) / np.sqrt(_sum_of_squares(values))
    units_per_one = np.exp2(np.minimum(_floor_exponents(allowed), UNIT_BITS))
    units = np.where(finite, np.exp2(exponents - UNIT_BITS) / units_per_one, np.nan)
    return np.rint(values * units_per_one[:, None]).astype(np.int64), units


def _exact_sums(x: Multiples, weight: Multiples) -> Doubles:
    """Return the matrix product [M, N] of integers as exact 32-bit sums, rounded to float32 once."""
    assert np.all(np.abs(x) @ np.abs(weight).T < 2**31), "a partial sum of products may need more than 32 bits"
    return (x @ weight.T).astype(np.float32).astype(np.float64)


def _sum_of_squares(values: Singles) -> Singles:
    """Sum the squares of each row in the order of the kernel. Lane j of 16 adds the squares of inputs j, j + 16, j + 32
    and so on. Then lanes j and j + 8 are added, then j and j + 4, j and j + 2, and j and j + 1.
    """
    lanes = np.zeros((len(values), _LANES), np.float32)
    for first in range(0, values.shape[1], _LANES):
        added = values[:, first : first + _LANES].astype(np.float64)
        lanes[:, : added.shape[1]] = _single(added**2 + lanes[:, : added.shape[1]])
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    total: Singles = lanes[:, 0]
    return total


def _exponents(values: Doubles) -> Doubles:
    return np.maximum(_floor_exponents(np.abs(values).max(axis=1, initial=0)), MIN_EXPONENT)


def _floor_exponents(values: Floats) -> Doubles:
    exponents = np.frexp(values)[1] - 1.0
    return np.where(np.isinf(values), np.inf, np.where(values == 0, -np.inf, exponents))


def _without_subnormals(values: Floats) -> Doubles:
    wide = values.astype(np.float64)
    return np.where(np.abs(wide) < _SMALLEST_NORMAL, np.copysign(0.0, wide), wide)


def _single(values: Doubles) -> Singles:
    """Round to float32, with subnormal numbers as zero. A sum has been rounded to float64 before. Here, this gives the
    result of a single rounding (S. A. Figueroa, When is double rounding innocuous?, 1995).
    """
    with np.errstate(over="ignore"):
        return _without_subnormals(values).astype(np.float32)
