"""How long a context a model folder allows, where rotary frequencies are stretched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError

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


def positions_of(folder: Path, own: int) -> Positions:
    """The positions of a model in Hugging Face form.

    `linear` stretches the model's own positions by `factor`, `yarn` those that it was first trained on; `dynamic` does
    for contexts that are longer than the model's own, so that one asks for them. The others have the stretched number
    in `max_position_embeddings`. What is stretched ends at `model_max_length` of the tokenizer's config.

    Args:
        folder: The model folder.
        own: `max_position_embeddings`.

    Raises:
        ModelError: A file of the folder cannot be read.
    """
    config = _read(folder / "config.json")
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or str(config.get("model_type", "")).startswith("gemma3"):
        return Positions(own, own)  # Gemma 3 stretches some layers only, up to its own number
    kind = scaling.get("rope_type", scaling.get("type"))
    factor, original = _number(scaling.get("factor")), _number(scaling.get("original_max_position_embeddings"))
    if kind not in ("linear", "dynamic", "yarn") or factor is None:
        return Positions(own, own)
    first = int(original) if kind == "yarn" and original is not None else own
    stretched = min(int(first * factor), MAX_POSITIONS)
    if stretched <= own:
        return Positions(own, own)
    reason = f"{first} x {factor:g} by rope scaling {kind}"
    limit = _number(_read(folder / "tokenizer_config.json").get("model_max_length"))
    if limit is not None and limit < stretched:
        stretched = max(int(limit), own)
        reason += ", at most model_max_length"
    if stretched == own:
        return Positions(own, own)
    return Positions(own if kind == "dynamic" else stretched, stretched, reason)


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
