"""Where a relative path of a YAML leads."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llm_serving.errors import ConfigError
from llm_serving.formats.folder import how_to_convert_file
from llm_serving.hub import why_no_name
from llm_serving.models.gguf import SUFFIX, is_gguf

PACKAGE_FOLDER: Final = Path(__file__).resolve().parents[1]
PROJECT_FOLDER: Final = PACKAGE_FOLDER.parents[1]
DEMO_WORD: Final = "demo"
DEMO_FOLDER: Final = PACKAGE_FOLDER / "demo_model"
REFERENCE_YAML: Final = PACKAGE_FOLDER / "config" / "serving.yaml"
"""Every key with its default; in a checkout a link to configs/serving.yaml, in an installed package a file."""


def search_folders(yaml_folder: Path | None) -> tuple[Path, ...]:
    """Folders a relative path is looked up in, in order.

    The YAML's own folder, then the folder the command runs in, then the project's top folder. The last two serve older
    files, whose paths count from the folder their server was started in, such as `configs/llama/model.yaml`.
    """
    own = () if yaml_folder is None else (yaml_folder,)
    return tuple(dict.fromkeys(folder.resolve() for folder in (*own, Path.cwd(), PROJECT_FOLDER)))


def find(path: Path, folders: Sequence[Path]) -> Path | None:
    """The first place where the path exists, absolute; None if there is none."""
    try:
        path = path.expanduser()
        return next((found for folder in folders if (found := folder / path).exists()), None)
    except (OSError, RuntimeError, ValueError):  # a name too long, a home folder nobody has, a null byte
        return None


def resolve(path: Path, folders: Sequence[Path], key: str, where: str) -> Path:
    """Like `find`, but a missing path is an error that names the key and the folders searched."""
    found = find(path, folders)
    if found is None:
        searched = "" if path.is_absolute() else f"; searched in {', '.join(map(str, folders))}"
        what = "may not be looked at" if _is_forbidden(path, folders) else "does not exist"
        raise ConfigError(f"{where}: {key}: {path} {what}{searched}")
    return found


def _is_forbidden(path: Path, folders: Sequence[Path]) -> bool:
    for folder in folders:
        try:
            os.stat(folder / path.expanduser())  # noqa: PTH116
        except PermissionError:
            return True
        except (OSError, RuntimeError, ValueError):
            continue
    return False


def resolve_model(path: Path, folders: Sequence[Path], key: str, where: str, written: str | None = None) -> Path | None:
    """Folder of a model; the word `demo` is the model that ships with the package. A folder wins over a hub's name.

    Args:
        path: As given.
        folders: Where a relative path is looked up.
        key: Names it in errors.
        where: Where it was given.
        written: The same as text, in which `./a/b` is not `a/b`.

    Returns:
        The folder, or the GGUF file, also where it is the only one of a folder without config.json; None: there is
        none, and what is written can be the name of a model at a hub.

    Raises:
        ConfigError: There is no such folder, and no hub has such names.
    """
    if str(path) == DEMO_WORD:
        if not (DEMO_FOLDER / "config.json").exists():
            raise ConfigError(f"{where}: {key}: the demo model is missing; scripts/train_demo_model.py makes it")
        return DEMO_FOLDER
    found = find(path, folders)
    if found is None:
        why = why_no_name(written or str(path), folders)
        if why is None:
            return None
        searched = "" if path.is_absolute() else f"; searched in {', '.join(map(str, folders))}; {why}"
        what = "may not be looked at" if _is_forbidden(path, folders) else "does not exist"
        raise ConfigError(f"{where}: {key}: {written or path} {what}{searched}")
    if found.is_dir():
        return _file_of(found) or found
    if not is_gguf(found):
        what = f"must be a folder in Hugging Face form, or a GGUF file{how_to_convert_file(found)}"
        raise ConfigError(f"{where}: {key}: {path} {what}")
    return found


def _file_of(folder: Path) -> Path | None:
    """The one GGUF file of a folder that holds nothing else of a model; of one that may not be read none is known."""
    if not os.access(folder, os.R_OK | os.X_OK) or (folder / "config.json").exists():
        return None
    files = list(folder.glob(f"*{SUFFIX}"))
    return files[0] if len(files) == 1 else None
