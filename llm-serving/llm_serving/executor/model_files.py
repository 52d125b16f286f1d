"""The files of a model: sizes and times, content hashes, and a check that all WorkAgents have read the same files."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.files import open_regular
from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME, weight_files
from llm_serving.formats.gguf import files_of
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import CONFIG_NAME
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.text.tokenizer.tokenizer import find_vocabulary, parts_of
from llm_serving.text.tokenizer.vocabulary import config_files

if TYPE_CHECKING:
    from llm_serving.executor.supervisor import WorkAgentProcess

CHUNK_BYTES: Final = 2**20


class FileState(NamedTuple):
    path: Path
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        try:
            found = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)

    def check(self) -> None:
        if FileState.of(self.path) != self:
            raise ModelError(f"{self.path}: has changed since it was loaded")


class ModelFiles(NamedTuple):
    weights: tuple[FileState, ...]
    tokenizer: tuple[FileState, ...]

    @classmethod
    def served(cls, model: ModelConfig) -> ModelFiles:
        return cls(served_weights(model), _tokenizer(model.folder, model.tokenizer_path))

    @classmethod
    def of(cls, folder: Path, tokenizer: Path | None) -> ModelFiles:
        """Record the model's files; `tokenizer` replaces the one in `folder`. Raise ModelError if one is missing."""
        return cls(_weights(folder), _tokenizer(folder, tokenizer))

    def check(self) -> None:
        for state in (*self.weights, *self.tokenizer):
            state.check()

    @property
    def num_bytes(self) -> int:
        return sum(state.size for state in (*self.weights, *self.tokenizer))


class ContentHashes(NamedTuple):
    weights: str
    tokenizer: str


def content_hashes(files: ModelFiles, on_progress: Callable[[int], None] = lambda num_bytes: None) -> ContentHashes:
    """Hash the complete contents of these files. Raise ModelError if one cannot be read or has changed.

    A hash is the SHA-256 of sorted lines, one for each file, as `sha256sum` writes them: the SHA-256 of its content,
    two spaces, its name. `on_progress` is called with the number of bytes read since the previous call.
    """
    return ContentHashes(_hash(files.weights, on_progress), _hash(files.tokenizer, on_progress))


async def hash_in_thread(files: ModelFiles) -> ContentHashes:
    """Return `content_hashes(files)`. A daemon thread computes it, maybe for minutes; an exit does not wait for it."""
    hashes: Future[ContentHashes] = Future()
    hashes.set_running_or_notify_cancel()

    def run() -> None:
        try:
            hashes.set_result(content_hashes(files))
        except Exception as error:  # noqa: BLE001  raised to the caller
            hashes.set_exception(error)

    threading.Thread(target=run, name="hashing", daemon=True).start()
    return await asyncio.wrap_future(hashes)


def served_weights(model: ModelConfig) -> tuple[FileState, ...]:
    """Return size and time of weight files, config.json and exported graphs. Raise ModelError without weight files."""
    if model.mindir_path is None:
        return _weights(model.folder)
    graphs = sorted(path for path in model.mindir_path.rglob("*") if path.is_file())
    options = [] if model.mindir_ini is None else [model.mindir_ini]
    return (*_weights(model.folder), *_states([*graphs, *options]))


def _weights(folder: Path) -> tuple[FileState, ...]:
    if is_gguf(folder):
        return _states(files_of(folder))
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
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            on_progress(len(chunk))
    state.check()
    return digest.hexdigest()


class SameFiles:
    """Checks that all WorkAgents of a server read the same model, because one may continue the answer of another.
    Thread-safe.

    The files that the first WorkAgent read are the reference. A WorkAgent on another machine reports a fingerprint of
    its files, which must equal that of the master's files.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._reference: tuple[FileState, ...] = ()
        self._fingerprint = ""

    def start_checked(self, start: Callable[[], WorkAgentProcess]) -> WorkAgentProcess:
        """Start a WorkAgent. If its files differ from those of the first one, kill it and raise ModelError."""
        files = served_weights(self.model)
        self._check(files)
        agent = start()
        try:
            for each in files:
                each.check()
            with self._lock:
                self._reference = self._reference or files
                self._check(files)
                self._check_other_machine(agent)
        except ModelError:
            agent.kill()
            raise
        return agent

    def _check_other_machine(self, agent: WorkAgentProcess) -> None:
        if not agent.loaded.model:
            return
        path = self.model.folder
        self._fingerprint = self._fingerprint or weight_fingerprint(path)
        if agent.loaded.model != self._fingerprint:
            raise ModelError(
                f"{path}: differs between {agent.machine} and the master's machine: copy the same files there, or "
                f"set `cluster_config.weights: object_store`"
            )

    def _check(self, files: tuple[FileState, ...]) -> None:
        if self._reference and files != self._reference:
            path = min(each.path for each in {*files} ^ {*self._reference})
            raise ModelError(
                f"{path}: has changed since the first WorkAgent read it, so responses would be inconsistent: restore "
                f"the file, or restart the server"
            )
