"""The pooling of an embedding model, as `modules.json` of sentence-transformers specifies it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_serving.core.files import read_regular
from llm_serving.errors import ModelError, shorten

MODULES_NAME: Final = "modules.json"
POOLING_FILES: Final = ("1_Pooling/config.json",)
"""Usual paths of pooling files."""
_MAX_BYTES: Final = 2**20
_MODE: Final = "pooling_mode_"
_LAST: Final = "lasttoken"


@dataclass(frozen=True, slots=True)
class Pooling:
    """Last-token pooling: the embedding of a text is the hidden state of its last token after the final norm."""

    normalises: bool = True
    """Whether embeddings are normalised to length 1 by default."""
    embedding_only: bool = False
    """Whether the model serves only embeddings, because its LM head, if any, was not trained to generate text."""


def resolve_pooling(mode: str, folder: Path) -> Pooling | None:
    """Return the pooling that `model_config.pooling` (`mode`) selects, or None; raise ModelError as `read_pooling`."""
    if mode == "auto":
        return read_pooling(folder)
    return Pooling(embedding_only=is_embedding_model(folder)) if mode == "last" else None


def is_embedding_model(folder: Path) -> bool:
    return (folder / MODULES_NAME).exists()


def read_pooling(folder: Path) -> Pooling | None:
    """Read the pooling of a folder; None for a generative model. Raise ModelError for an invalid or unknown one."""
    path = folder / MODULES_NAME
    if not path.exists():
        return None
    modules = _read(path)
    if not isinstance(modules, list):
        raise ModelError(f"{path}: must be a list of modules. Given: {shorten(modules)}")
    normalises = False
    for module in modules:
        place, kind = (module.get("path"), module.get("type")) if isinstance(module, dict) else (None, None)
        if not isinstance(place, str) or not isinstance(kind, str):
            raise ModelError(f"{path}: each module must have `path` and `type`. Given: {shorten(module)}")
        name = kind.rsplit(".", 1)[-1]
        if name == "Pooling":
            _check_pooling(_inside(folder, place, path) / "config.json")
        elif name == "Normalize":
            normalises = True
        elif name != "Transformer":
            raise ModelError(f"{path}: module {name} is not served, only Transformer, Pooling and Normalize")
    return Pooling(normalises, embedding_only=True)


def _inside(folder: Path, place: str, path: Path) -> Path:
    if place in (".", "..") or Path(place).name != place:
        raise ModelError(f"{path}: `path` of a module must name a folder beside it. Given: {shorten(place)}")
    return folder / place


def _check_pooling(path: Path) -> None:
    if not path.exists():
        raise ModelError(f"{path} is missing, which {MODULES_NAME} names: it says how vectors are pooled")
    config = _read(path)
    if not isinstance(config, Mapping):
        raise ModelError(f"{path}: must be a JSON object. Given: {shorten(config)}")
    modes = _modes(config)
    if modes != [_LAST]:
        raise ModelError(
            f"{path}: pooling mode {' + '.join(modes) or 'none'} is not served, only {_LAST}; "
            f"`model_config.pooling: last` takes the last token all the same"
        )


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Return the pooling modes, which newer folders state in one key, older ones in a flag per mode."""
    if isinstance(named := config.get("pooling_mode"), str):
        return [named.removesuffix("_token")]
    return [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]


def _read(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
