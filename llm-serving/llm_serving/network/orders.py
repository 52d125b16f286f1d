"""Row and column orders of weights. Entry i is the index of the tensor's row or column; -1 means zeros."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def padded_order(unpadded: int, multiple: int) -> list[int]:
    """Return the order 0, 1, ..., unpadded - 1, then -1 up to a multiple of `multiple`."""
    return [i if i < unpadded else -1 for i in range(-(-unpadded // multiple) * multiple)]


def repeated_order(count: int, size: int, order: Sequence[int]) -> list[int]:
    """Repeat an order in each of `count` consecutive blocks of `size` elements."""
    return [-1 if i < 0 else block * size + i for block in range(count) for i in order]


def parts_order(start: int, groups: int, widths: Sequence[int]) -> list[int]:
    """Return the order from [group][part] to [part][group]. `start`: first element. `widths`: elements of each part."""
    elements = np.arange(start, start + groups * sum(widths)).reshape(groups, -1)
    parts = np.split(elements, np.cumsum(widths)[:-1], axis=1)
    return [each for part in parts for each in part.reshape(-1).tolist()]


def order_of(numbers: Sequence[int] | None, size: int) -> tuple[int, ...] | None:
    """Return an order in the form of `Weight.rows`; None: it keeps all `size` rows or columns unchanged."""
    order = None if numbers is None else shared_order(tuple(numbers))
    return None if order is None or _is_unchanged(order, size) else order


@lru_cache(64)
def _is_unchanged(order: tuple[int, ...], size: int) -> bool:
    return order == tuple(range(size))


@lru_cache(64)
def shared_order(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return one tuple for all equal permutations, which saves memory for layers of the same shape."""
    return order
