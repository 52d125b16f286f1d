"""What the files of a model hold, as two hashes: of its weights and of its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME, weight_files
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME
from llm_serving.text.tokenizer.files import find_vocabulary, parts_of
from llm_serving.text.tokenizer.vocabulary import config_files

PIECE_BYTES: Final = 2**20
"""Read and hashed at a time; threads give way to others meanwhile."""


class FileState(NamedTuple):
    """By which a file is known to be what it was."""

    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises ModelError where the file is not there."""
        try:
            found = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)

    def check(self) -> None:
        """Raises ModelError where the file is not what it was."""
        if FileState.of(self.path) != self:
            raise ModelError(f"{self.path}: has changed since it was loaded")


class ModelFiles(NamedTuple):
    """Files from which answers follow."""

    weights: tuple[FileState, ...]
    """As of `served_weights`."""
    tokenizer: tuple[FileState, ...]

    @classmethod
    def served(cls, model: ModelConfig) -> ModelFiles:
        """Those of the model that a configuration names, as they are now.

        Raises:
            ModelError: One is not there.
        """
        assert model.model_path is not None
        return cls(served_weights(model), _tokenizer(model.model_path, model.tokenizer_path))

    @classmethod
    def of(cls, folder: Path, tokenizer: Path | None) -> ModelFiles:
        """Those of a model folder, or of a GGUF file, as they are now.

        Args:
            folder: The model.
            tokenizer: A tokenizer file or folder in place of the model's own.

        Raises:
            ModelError: One is not there.
        """
        return cls(_weights(folder), _tokenizer(folder, tokenizer))

    def check(self) -> None:
        """Raises ModelError where one is not what it was."""
        for state in (*self.weights, *self.tokenizer):
            state.check()

    @property
    def num_bytes(self) -> int:
        return sum(state.size for state in (*self.weights, *self.tokenizer))


class ContentHashes(NamedTuple):
    weights: str
    tokenizer: str


def content_hashes(files: ModelFiles, on_progress: Callable[[int], None] = lambda num_bytes: None) -> ContentHashes:
    """The hashes of these files' contents; reads every byte of them.

    A hash is SHA-256 over a line for each file, sorted: the SHA-256 of its content, two spaces and its name, as
    `sha256sum` writes them.

    Args:
        files: As they are expected to be.
        on_progress: Told how many bytes more have been read.

    Raises:
        ModelError: One cannot be read, or is not what it was.
    """
    return ContentHashes(_hash(files.weights, on_progress), _hash(files.tokenizer, on_progress))


def served_weights(model: ModelConfig) -> tuple[FileState, ...]:
    """The weights of the model that a configuration names, with config.json, and with graphs that hold weights.

    Raises:
        ModelError: There are none.
    """
    assert model.model_path is not None
    if model.mindir_path is None:
        return _weights(model.model_path)
    graphs = sorted(path for path in model.mindir_path.rglob("*") if path.is_file())
    options = [] if model.mindir_ini is None else [model.mindir_ini]
    return (*_weights(model.model_path), *_states([*graphs, *options]))


def _weights(folder: Path) -> tuple[FileState, ...]:
    if is_gguf(folder):
        return _states([folder])
    return _states([folder / CONFIG_NAME, folder / INDEX_NAME, *weight_files(folder)])


def _tokenizer(folder: Path, tokenizer: Path | None) -> tuple[FileState, ...]:
    if tokenizer is not None and not tokenizer.is_dir():
        vocabulary = tokenizer
    else:
        folder = tokenizer or folder
        vocabulary = folder if is_gguf(folder) else find_vocabulary(folder)
    return _states([*parts_of(vocabulary), *config_files(folder)])


def _states(paths: Sequence[Path]) -> tuple[FileState, ...]:
    return tuple(FileState.of(path) for path in paths if path.exists())


def _hash(states: Sequence[FileState], on_progress: Callable[[int], None]) -> str:
    lines = sorted(f"{_file_hash(state, on_progress)}  {state.path.name}\n" for state in states)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_hash(state: FileState, on_progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open_regular(state.path) as file:
        while part := file.read(PIECE_BYTES):
            digest.update(part)
            on_progress(len(part))
    state.check()
    return digest.hexdigest()
