"""Creates an output folder that is either complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm_serving.errors import ConfigError
from llm_serving.hub.base import small_files
from llm_serving.models.memory import readable_size

from llm_serving_tools.signals import ended_in_order


def check_absent(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists: OUT must be a new folder")


@contextmanager
def new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to the target if nothing fails. Raise ConfigError on disk errors, and if
    less than `num_bytes` are free.
    """
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} must exist: OUT is first written under a temporary name in it")
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
    """Copy the tokenizer and other small files of a model. `source`: its folder, or a file in the folder."""
    beside = source if source.is_dir() else source.parent
    sizes = {path.name: path.stat().st_size for path in beside.iterdir() if path.is_file()}
    for name in small_files(sizes):
        if not name.endswith(".index.json"):
            shutil.copyfile(beside / name, folder / name)
