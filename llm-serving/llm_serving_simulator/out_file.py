"""A file that a command writes: whole, or as it was before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llm_serving.errors import ConfigError


def write_out(path: Path, text: str) -> None:
    """Writes a file; where that fails or is broken off, what stood there still does.

    Of two that write it at once the later one wins. A link, a pipe or a device, and a file in a folder that nothing may
    be put into, is not replaced but written to.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
        if is_plain and os.access(path.parent, os.W_OK):
            _replace(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
