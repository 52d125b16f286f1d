"""By what a model is known from another of the same shape, without all of it being read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME, weight_files
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME

WHOLE_BYTES: Final = 2**20
"""A file of no more is read whole."""
SAMPLE_BYTES: Final = 4096
EVERY_BYTES: Final = 2**22
"""Of a longer one a sample in so many bytes is, and its end: 16 MB of a model of 16 GB."""


def sketch_of(model: Path) -> str:
    """A hash over names and sizes of the files of a model, and over samples of what they hold.

    Args:
        model: Folder or GGUF file, wherever it lies.

    Raises:
        ModelError: One cannot be read, or there are none.
    """
    names = [model] if is_gguf(model) else [model / CONFIG_NAME, model / INDEX_NAME, *weight_files(model)]
    sketch = hashlib.sha256()
    for path in sorted(each for each in names if each.exists()):
        _add(sketch, path)
    return sketch.hexdigest()


def _add(sketch: hashlib._Hash, path: Path) -> None:
    with open_regular(path) as file:
        try:
            size = file.seek(0, 2)
            sketch.update(f"\0{path.name} {size}\0".encode())
            width, every = (size, max(size, 1)) if size <= WHOLE_BYTES else (SAMPLE_BYTES, EVERY_BYTES)
            for start in (*range(0, size, every), max(0, size - SAMPLE_BYTES)):
                file.seek(start)
                sketch.update(file.read(width))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
