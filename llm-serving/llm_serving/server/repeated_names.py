"""Names that an object of JSON has twice: whichever counts, the other one would be ignored."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec


def repeated_name(text: bytes, content: Mapping[str, msgspec.Raw]) -> str | None:
    """One that an object has twice, objects in it aside; None: there is none.

    Args:
        text: The object.
        content: What was read of it.
    """
    # A colon stands behind each name; all others are in names and values.
    inside = sum(name.count(":") + bytes(value).count(b":") for name, value in content.items())
    if text.count(b":") <= len(content) + inside:
        return None
    return _first_repeated(text, only_outermost=True)


def repeated_name_within(text: bytes) -> str | None:
    """One that an object, or one in it, has twice; None: there is none."""
    return _first_repeated(text, only_outermost=False)


def _first_repeated(text: bytes, *, only_outermost: bool) -> str | None:
    repeated: str | None = None

    def look(pairs: list[tuple[str, Any]]) -> None:
        """Called for each object, the outermost last."""
        nonlocal repeated
        names = {name for name, _ in pairs}
        found = None if len(names) == len(pairs) else Counter(name for name, _ in pairs).most_common(1)[0][0]
        repeated = found if only_outermost or repeated is None else repeated

    try:
        json.loads(text, object_pairs_hook=look, parse_int=str, parse_float=str)
    except RecursionError:
        return None
    return repeated
