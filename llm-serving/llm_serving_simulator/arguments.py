"""Checks of arguments that several subcommands of the simulator share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from llm_serving.errors import ConfigError

MAX_SEED: Final = 2**32 - 1


def check_out(path: Path, *read: Path) -> None:
    """Raise ConfigError, before a long computation, if the output cannot be written or is one of the files `read`."""
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(f"{path}: must be a file in an existing folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: must be a writable file")
    if path.exists() and any(each.exists() and path.samefile(each) for each in read):
        raise ConfigError(f"{path}: must not be one of the files that are read")


def seed(written: str) -> int:
    if not written.isdecimal() or int(written) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to {MAX_SEED}. Given: {written!r}")
    return int(written)
