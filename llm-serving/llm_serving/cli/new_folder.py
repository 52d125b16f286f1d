"""A folder that a command writes: whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm_serving.cli.arguments import ended_in_order
from llm_serving.errors import ConfigError
from llm_serving.hub.base import small_files
from llm_serving.models.memory import readable_size


def check_absent(target: Path) -> None:
    """Raises:
    ConfigError: There is something of that name.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: OUT must be a folder that does not")


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """A folder that gets the target's name at the end; it is removed where something fails or ends the command.

    Args:
        target: What does not exist.
        num_bytes: That will be written, about.

    Raises:
        ConfigError: There is no folder for it, or no room, or a file cannot be read or written.
    """
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} must exist: OUT is written beside its name first")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ConfigError(f"{parent} must have {readable_size(num_bytes)} free. Found: {readable_size(free)}")
    folder = parent / f".{target.name}.{os.getpid()}"
    with ended_in_order():
        try:
            folder.mkdir()
            try:
                yield folder
                for path in filter(Path.is_file, folder.rglob("*")):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                folder.rename(target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"{target} was not written: {error.filename or folder}: {error.strerror}") from error


def copy_small_files(source: Path, folder: Path) -> None:
    """Copies the tokenizer and the like of a model.

    Args:
        source: The folder of the model, or a file in it.
        folder: Gets the copies.
    """
    beside = source if source.is_dir() else source.parent
    sizes = {path.name: path.stat().st_size for path in beside.iterdir() if path.is_file()}
    for name in small_files(sizes):
        if not name.endswith(".index.json"):
            shutil.copyfile(beside / name, folder / name)
