"""The context length of a model folder, including RoPE scaling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_json
from llm_serving.models.spec import ModelSpec
from llm_serving.network.rope import Rotary, Scaling

MAX_FILE_BYTES: Final = 2**26
MAX_POSITIONS: Final = 2**31 - 1


@dataclass(frozen=True)
class ContextLengths:
    """The `default` and `maximum` context length in tokens. `reason`: how RoPE scaling made the maximum longer."""

    default: int
    maximum: int
    reason: str = ""


def context_lengths(spec: ModelSpec, folder: Path) -> ContextLengths:
    """Return the context lengths of a model in Hugging Face format. Raise ModelError if a file cannot be read.

    RoPE scaling of kind `linear` or `dynamic` multiplies `max_position_embeddings` by `factor`. `yarn` multiplies the
    original training length. `dynamic` changes only contexts beyond `max_position_embeddings`, so it raises only the
    maximum: a user must request longer contexts. For other kinds, and if some layers have no scaling, both lengths are
    `max_position_embeddings`. `model_max_length` of tokenizer_config.json limits a scaled length.
    """
    own = spec.max_position_embeddings
    scaling = _smallest_scaling(spec.network.rotaries, own)
    if scaling is None or (scaled := _scaled_length(scaling, own)) <= own:
        return ContextLengths(own, own)
    reason = f"{scaling.first(own)} x {scaling.factor:g} by rope scaling {scaling.kind}"
    path = folder / "tokenizer_config.json"
    config = read_json(path, MAX_FILE_BYTES) if path.exists() else None
    limit = _number(config.get("model_max_length")) if isinstance(config, dict) else None
    if limit is not None and limit < scaled:
        scaled = max(int(limit), own)
        reason += ", at most model_max_length"
    if scaled == own:
        return ContextLengths(own, own)
    return ContextLengths(own if scaling.kind == "dynamic" else scaled, scaled, reason)


def _smallest_scaling(rotaries: Iterable[Rotary], own: int) -> Scaling | None:
    scalings = [each.scaling for each in rotaries]
    found = [each for each in scalings if each is not None and each.first(own) is not None]
    return min(found, key=lambda each: _scaled_length(each, own)) if found and len(found) == len(scalings) else None


def _scaled_length(scaling: Scaling, own: int) -> int:
    first = scaling.first(own)
    return own if first is None else min(int(first * scaling.factor), MAX_POSITIONS)


def _number(value: Any) -> float | None:
    given = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if given and 0 < value < MAX_POSITIONS else None
