"""How long a context a model folder allows, where rotary frequencies are stretched."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.rope import Rotary, Scaling

MAX_FILE_BYTES: Final = 2**26
MAX_POSITIONS: Final = 2**31 - 1


@dataclass(frozen=True)
class Positions:
    """Tokens of a context.

    Attributes:
        usual: Where nobody asks for another length.
        most: What the model allows.
        reason: Words for a reader, where the configuration's own number is stretched; else empty.
    """

    usual: int
    most: int
    reason: str = ""


def positions_of(spec: ModelSpec, folder: Path) -> Positions:
    """The positions of a model in Hugging Face form.

    `linear` stretches the model's own positions by `factor`, `yarn` those that it was first trained on; `dynamic` does
    for contexts that are longer than the model's own, so that one asks for them. The others have the stretched number
    in `max_position_embeddings`, and so has a model of which some layers turn as they were trained. What is stretched
    ends at `model_max_length` of the tokenizer's config.

    Args:
        spec: The model.
        folder: Its folder.

    Raises:
        ModelError: A file of the folder cannot be read.
    """
    own = spec.max_position_embeddings
    scaling = _least_stretched(spec.network.rotaries, own)
    if scaling is None or (stretched := _stretched(scaling, own)) <= own:
        return Positions(own, own)
    reason = f"{scaling.first(own)} x {scaling.factor:g} by rope scaling {scaling.kind}"
    limit = _number(_read(folder / "tokenizer_config.json").get("model_max_length"))
    if limit is not None and limit < stretched:
        stretched = max(int(limit), own)
        reason += ", at most model_max_length"
    if stretched == own:
        return Positions(own, own)
    return Positions(own if scaling.kind == "dynamic" else stretched, stretched, reason)


def _least_stretched(rotaries: Iterable[Rotary], own: int) -> Scaling | None:
    """Of all kinds of rotation that a model has; None where one of them is not stretched."""
    scalings = [each.scaling for each in rotaries]
    found = [each for each in scalings if each is not None and each.first(own) is not None]
    return min(found, key=lambda each: _stretched(each, own)) if found and len(found) == len(scalings) else None


def _stretched(scaling: Scaling, own: int) -> int:
    first = scaling.first(own)
    return own if first is None else min(int(first * scaling.factor), MAX_POSITIONS)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(read_regular(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _number(value: Any) -> float | None:
    given = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if given and 0 < value < MAX_POSITIONS else None
