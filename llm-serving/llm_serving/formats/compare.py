"""Whether the tensors that are there are those that a model wants; told all at once, before one is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from llm_serving.errors import ModelError

MOST_LISTED: Final = 5
"""Of what an error lists."""

DERIVED: Final = re.compile(r"(^|\.)rotary_(pos_)?emb\.inv_freq$|(^|\.)freqs_(cos|sin)$")
"""Tables that some exporters write beside the weights."""

Shape = tuple[int, ...]


def check_tensors(
    where: str, wanted: Mapping[str, Shape], found: Mapping[str, Shape], spare: Mapping[str, Shape] | None = None
) -> None:
    """Compares names and shapes.

    Args:
        where: Names the folder in the error.
        wanted: By the configuration of the model.
        found: In its files, by the same names.
        spare: What may be there and is not needed, such as a tied head that was written twice.

    Raises:
        ModelError: Some are missing, too many or of another shape; of each kind some are named.
    """
    allowed = {**wanted, **(spare or {})}
    missing = [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    extra = [f"{name} {list(found[name])}" for name in found if name not in allowed and not DERIVED.search(name)]
    misshapen = [
        f"{name} must be {list(shape)}, found {list(found[name])}"
        for name, shape in allowed.items()
        if name in found and found[name] != shape
    ]
    kinds = (("missing", missing), ("no place for", extra), ("of another shape", misshapen))
    told = [f"  {kind}: {listed(each)}" for kind, each in kinds if each]
    if told:
        raise ModelError("\n".join([f"{where} does not hold the model of its config.json", *told]))


def listed(texts: list[str]) -> str:
    """How many, and the first of them."""
    more = f"; and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return f"{len(texts)}: {'; '.join(texts[:MOST_LISTED])}{more}"
