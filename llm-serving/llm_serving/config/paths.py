"""Paths in the configuration: how relative paths are resolved, and what may exist at each path."""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from llm_serving.errors import ConfigError
from llm_serving.formats.folder import how_to_convert_file
from llm_serving.hub import why_not_a_name
from llm_serving.models.gguf import gguf_models, is_gguf

PACKAGE_FOLDER: Final = Path(__file__).resolve().parents[1]
PROJECT_FOLDER: Final = PACKAGE_FOLDER.parents[1]
DEMO_WORD: Final = "demo"
DEMO_FOLDER: Final = PACKAGE_FOLDER / "demo_model"


def search_folders(yaml_folder: Path | None) -> tuple[Path, ...]:
    """Return the folders to search for a relative path: folder of the YAML, working folder, project root."""
    own = () if yaml_folder is None else (yaml_folder,)
    return tuple(dict.fromkeys(folder.resolve() for folder in (*own, Path.cwd(), PROJECT_FOLDER)))


def find(path: Path, folders: Sequence[Path]) -> Path | None:
    try:
        path = path.expanduser()
        return next((found for folder in folders if (found := folder / path).exists()), None)
    except (OSError, RuntimeError, ValueError):  # a path that is too long, has a null byte or an unknown user's `~`
        return None


def resolve(path: Path, folders: Sequence[Path], key: str, where: str) -> Path:
    """Return the absolute path of the first match, else raise ConfigError with the key and the folders searched."""
    found = find(path, folders)
    if found is None:
        searched = "" if path.is_absolute() else f"; searched in {', '.join(map(str, folders))}"
        raise ConfigError(f"{where}: {key}: {path} {_why_missing(path, folders)}{searched}")
    return found


def _why_missing(path: Path, folders: Sequence[Path]) -> str:
    for folder in folders:
        try:
            os.stat(folder / path.expanduser())  # noqa: PTH116
        except PermissionError:
            return "may not be looked at"
        except (OSError, RuntimeError, ValueError):
            continue
    return "does not exist"


def resolve_model(path: Path, folders: Sequence[Path], key: str, where: str, written: str | None = None) -> Path | None:
    """Return the folder or the GGUF file of a model; None for a missing path that can be a model's name on a hub.

    The path `demo` means the shipped model. A path such as `./a/b` cannot be a name. Raise ConfigError, with `key` and
    `where`, if the path is neither a model nor a name. `written`: the path as the YAML has it.
    """
    if str(path) == DEMO_WORD:
        if not (DEMO_FOLDER / "config.json").exists():
            raise ConfigError(f"{where}: {key}: the demo model is missing; scripts/train_demo_model.py makes it")
        return DEMO_FOLDER
    found = find(path, folders)
    if found is None:
        why = why_not_a_name(written or str(path), folders)
        if why is None:
            return None
        searched = "" if path.is_absolute() else f"; searched in {', '.join(map(str, folders))}; {why}"
        raise ConfigError(f"{where}: {key}: {written or path} {_why_missing(path, folders)}{searched}")
    if found.is_dir():
        return _single_gguf_file(found, f"{where}: {key}") or found
    if not is_gguf(found):
        rule = f"must be a folder in Hugging Face form, or a GGUF file{how_to_convert_file(found)}"
        raise ConfigError(f"{where}: {key}: {path} {rule}")
    return found


def _single_gguf_file(folder: Path, where: str) -> Path | None:
    if not os.access(folder, os.R_OK | os.X_OK) or (folder / "config.json").exists():
        return None
    files = gguf_models(folder)
    if len(files) > 1:
        names = ", ".join(each.name for each in files)
        raise ConfigError(f"{where}: {folder} has {len(files)} models. Name one of these files: {names}")
    return files[0] if files else None


class Kind(Enum):
    """What must exist at a path of the configuration. A symbolic link counts as its target."""

    FILE = "a file that may be read"
    FOLDER = "a folder that may be read"
    FILE_OR_FOLDER = "a file or a folder that may be read"
    MADE_FILE = "a file that may be written, or a place where one, and the folders above it, can be made"
    LOG = "a file that may be written, a place in a folder where one can be made, or -"
    MADE_FOLDER = "a folder that may be written, or a place where one, and those above it, can be made"

    def broken_by(self, path: Path) -> str | None:
        """Return why a path is not of this kind, or None if it is. Return None also for a missing input: `resolve`
        reports it. Do not open the file, because opening a pipe would block.
        """
        if self is Kind.LOG and path == Path("-"):
            return None
        try:
            mode = _mode(path)
            if mode is None:
                return self._why_not_creatable(path)
            if not any(is_kind(mode) for is_kind in _ALLOWED[self]):
                return f"{_name_of(mode)} is there"
            access = os.R_OK if self in _READ else os.W_OK
            if not os.access(path, access | (os.X_OK if stat.S_ISDIR(mode) else 0)):
                return f"it may not be {'read' if self in _READ else 'written'}"
        except OSError as error:
            return f"{error.strerror}"
        return None

    def _why_not_creatable(self, path: Path) -> str | None:
        if self in _READ:
            return None
        for parent in path.absolute().parents:
            mode = _mode(parent)
            if mode is not None:
                if not stat.S_ISDIR(mode):
                    return f"{parent} is no folder but {_name_of(mode)}"
                return None if os.access(parent, os.W_OK | os.X_OK) else f"nothing may be made in {parent}"
            if self is Kind.LOG:
                return f"there is no folder {parent}"
        return None


CREATED: Final = (Kind.MADE_FILE, Kind.LOG, Kind.MADE_FOLDER)
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
    try:
        return os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def _name_of(mode: int) -> str:
    return next((name for name, is_kind in _NAMES.items() if is_kind(mode)), "something else")
