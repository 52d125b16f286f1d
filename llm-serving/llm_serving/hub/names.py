"""What is the name of a model at a hub, and what is a path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_NAME: Final = re.compile(rf"{_PART}/{_PART}")
_FILE_ENDINGS: Final = (".safetensors", ".json", ".ckpt", ".bin", ".pt", ".pth", ".gguf", ".yaml", ".yml", ".git")
_REVISION: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,254}[A-Za-z0-9_-])?")

NAME_FORM: Final = "the name of a model at a hub is owner/name, such as Qwen/Qwen3-0.6B"


def why_no_name(text: str, folders: Sequence[Path]) -> str | None:
    """Why a text that is no existing path is no name of a model at a hub either; None where it is one.

    Args:
        text: As the operator wrote it.
        folders: Where a relative path would have been looked up.
    """
    if text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text:
        return "it is written as a path"
    if not _NAME.fullmatch(text) or "--" in text or ".." in text:
        return NAME_FORM
    if text.lower().endswith(_FILE_ENDINGS):
        return "it ends as a file does"
    owner = text.partition("/")[0]
    if any((folder / owner).is_dir() for folder in folders):
        return f"there is a folder {owner} here, so it is read as a path"
    return None


def is_revision(text: str) -> bool:
    """Whether a hub may have a branch, tag or commit of this name; it becomes part of URLs and of paths."""
    return _REVISION.fullmatch(text) is not None and ".." not in text and "//" not in text
