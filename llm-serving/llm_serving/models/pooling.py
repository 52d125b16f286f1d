"""How the vector of a text comes of a model: what the folder of an embedding model says of that.

The files are those of sentence-transformers: `modules.json` lists what follows the transformer, a folder for each.
"""

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
"""Files in folders that belong to such a model, where they usually are."""
_MAX_BYTES: Final = 2**20
_MODE: Final = "pooling_mode_"
_LAST: Final = "lasttoken"


@dataclass(frozen=True, slots=True)
class Pooling:
    """The vector of a text is the last hidden state of its last token, behind the final norm."""

    normalises: bool = True
    """Whether vectors are brought to length 1 where the request says nothing."""
    alone: bool = False
    """Whether this is all the model is for: its head, if it has one, was not trained to go on with a text."""


def served_pooling(mode: str, folder: Path) -> Pooling | None:
    """How texts become vectors; None: they do not.

    Args:
        mode: `model_config.pooling`.
        folder: Of the model.

    Raises:
        ModelError: As `pooling_in`.
    """
    if mode == "auto":
        return pooling_in(folder)
    return Pooling(alone=is_embedding_model(folder)) if mode == "last" else None


def is_embedding_model(folder: Path) -> bool:
    """Whether a folder says of itself that vectors are what it is for."""
    return (folder / MODULES_NAME).exists()


def pooling_in(folder: Path) -> Pooling | None:
    """What a folder says; None: it is that of a model that generates.

    Raises:
        ModelError: A file cannot be read, or it asks for what is not served; the text says what.
    """
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
    return Pooling(normalises, alone=True)


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
    """Newer folders have one key, older ones a flag for each mode, `pooling_mode_cls_token` and the like."""
    if isinstance(named := config.get("pooling_mode"), str):
        return [named.removesuffix("_token")]
    return [key.removeprefix(_MODE) for key, value in config.items() if key.startswith(_MODE) and value is True]


def _read(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
