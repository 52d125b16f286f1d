"""Which of several suspects make something fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def find_culprits(suspects: Sequence[T], passes: Callable[[Sequence[T]], bool]) -> list[T]:
    """The suspects that fail alone, found by halving: about 2 log2(n) trials a culprit.

    Args:
        suspects: Of something that failed when they took part in it together.
        passes: Whether it goes well with these only.

    Returns:
        In the order of `suspects`. Empty if the failure does not come again, or only comes of a combination.
    """
    if passes(suspects):
        return []
    if len(suspects) == 1:
        return list(suspects)
    half = len(suspects) // 2
    return find_culprits(suspects[:half], passes) + find_culprits(suspects[half:], passes)
