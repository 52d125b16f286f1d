"""Which files of a model are wanted, and which of them a folder lacks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from llm_serving.formats.folder import INDEX_NAME, SINGLE_NAME, indexed_names
from llm_serving.models.pooling import MODULES_NAME, POOLING_FILES
from llm_serving.models.spec import CONFIG_NAME

TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "*.tiktoken", "merges.txt")
"""Patterns of files of which one is enough to read and write text."""
_SMALL: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TEMPLATE: Final = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_MAX_SMALL_BYTES: Final = 2**27


def small_files(sizes: Mapping[str, int]) -> list[str]:
    """Configuration and tokenizer, config.json first: what decides whether the model can be served.

    Args:
        sizes: File name -> bytes of all that a hub has. Of files in folders only `POOLING_FILES` and templates are
            wanted.
    """
    wanted = [name for name in sizes if _matches(name, _SMALL) or name in POOLING_FILES or _TEMPLATE.fullmatch(name)]
    names = [name for name in wanted if sizes[name] <= _MAX_SMALL_BYTES]
    unwanted = [name for name in names if name.endswith(".index.json") and name != INDEX_NAME]
    return sorted(set(names) - set(unwanted), key=lambda name: (name != CONFIG_NAME, name))


def weight_files(names: Collection[str], index: Path) -> list[str]:
    """The safetensors files to have, in order; none where the model has its weights in another form only.

    A hub may have the weights a second time, in another form or cut in other pieces: the index counts, then the file
    with the usual name.

    Args:
        names: Of all files there are.
        index: Where the index is, if `names` has one.

    Raises:
        ModelError: As `indexed_names`.
    """
    if INDEX_NAME in names:
        return indexed_names(index)
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    return sorted(name for name in names if _matches(name, ("*.safetensors",)))


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks of what a server wants of it, by name or by pattern.

    Raises:
        ModelError: Its index is none.
    """
    names = [path.name for path in folder.iterdir() if path.exists()] if folder.is_dir() else []
    missing = [] if CONFIG_NAME in names else [CONFIG_NAME]
    if not any(_matches(name, TOKENIZERS) for name in names):
        missing.append("a tokenizer")
    if MODULES_NAME in names:
        missing += [name for name in POOLING_FILES if not (folder / name).exists()]
    weights = weight_files(names, folder / INDEX_NAME)
    return missing + ([name for name in weights if name not in names] if weights else ["*.safetensors"])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
