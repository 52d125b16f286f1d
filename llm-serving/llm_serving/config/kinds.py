"""What may lie where a key leads: of which kind it must be, and what the server must be allowed to do with it."""

import os
import stat
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final


class Kind(Enum):
    """What a path of the configuration must be. Symbolic links count as what they lead to."""

    FILE = "a file that may be read"
    FOLDER = "a folder that may be read"
    FILE_OR_FOLDER = "a file or a folder that may be read"
    MADE_FILE = "a file that may be written, or a place where one, and the folders above it, can be made"
    LOG = "a file that may be written, a place in a folder where one can be made, or -"
    MADE_FOLDER = "a folder that may be written, or a place where one, and those above it, can be made"

    def broken_by(self, path: Path) -> str | None:
        """Why a path is not of this kind; None: it is. Opens nothing: a pipe is not waited for, a device not woken.

        What is missing is no reason where it is to be read: `resolve` looked for it in several folders.
        """
        if self is Kind.LOG and path == Path("-"):
            return None
        try:
            there = _mode(path)
            if there is None:
                return self._why_not_made(path)
            if not any(is_kind(there) for is_kind in _ALLOWED[self]):
                return f"{_name_of(there)} is there"
            wanted = os.R_OK if self in _READ else os.W_OK
            if not os.access(path, wanted | (os.X_OK if stat.S_ISDIR(there) else 0)):
                return f"it may not be {'read' if self in _READ else 'written'}"
        except OSError as error:
            return f"{error.strerror}"
        return None

    def _why_not_made(self, path: Path) -> str | None:
        if self in _READ:
            return None
        for above in path.absolute().parents:
            there = _mode(above)
            if there is not None:
                if not stat.S_ISDIR(there):
                    return f"{above} is no folder but {_name_of(there)}"
                return None if os.access(above, os.W_OK | os.X_OK) else f"nothing may be made in {above}"
            if self is Kind.LOG:
                return f"there is no folder {above}"
        return None


MADE: Final = (Kind.MADE_FILE, Kind.LOG, Kind.MADE_FOLDER)
"""What may be missing: it is made."""
_READ: Final = (Kind.FILE, Kind.FOLDER, Kind.FILE_OR_FOLDER)
_ALLOWED: Final[Mapping[Kind, tuple[Callable[[int], bool], ...]]] = {
    Kind.FILE: (stat.S_ISREG,),
    Kind.FOLDER: (stat.S_ISDIR,),
    Kind.FILE_OR_FOLDER: (stat.S_ISREG, stat.S_ISDIR),
    Kind.MADE_FILE: (stat.S_ISREG,),
    Kind.LOG: (stat.S_ISREG,),
    Kind.MADE_FOLDER: (stat.S_ISDIR,),
}
_NAMES: Final[Mapping[str, Callable[[int], bool]]] = {
    "a file": stat.S_ISREG,
    "a folder": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def _mode(path: Path) -> int | None:
    """None: nothing is there; also where a file is among the folders above it, which is found there."""
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def _name_of(mode: int) -> str:
    return next((name for name, is_kind in _NAMES.items() if is_kind(mode)), "something else")
