"""A model folder on its way to machines that do not have it: described, in pieces, and kept there by its content.

A model folder in Ray's object store, for machines that do not have it.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ConfigError, ModelError
from llm_serving.executor.cluster.ray_messages import RayWeights

PIECE_BYTES: Final = 2**25
"""Of one file, at most; as much is in memory at a time."""
CACHE: Final = "~/.cache/llm_serving/weights"
"""On every machine, unless the configuration names a folder."""
_DIGEST_BYTES: Final = 20


class WeightFile(msgspec.Struct, frozen=True):
    name: str
    """Below the folder."""
    num_bytes: int


class WeightFiles(msgspec.Struct, frozen=True):
    """What is in a folder."""

    files: tuple[WeightFile, ...]
    digest: str
    """Of all names and contents."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.files)


class _Piece(NamedTuple):
    file: int
    """Its index."""
    content: bytes


def describe(folder: Path) -> WeightFiles:
    """Reads all files of a folder, and those of folders in it; hidden ones are left out.

    Raises:
        ModelError: One cannot be read, or there are none.
    """
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not names:
        raise ModelError(f"{folder}: has no files")
    sizes, digest = [0] * len(names), _Digest()
    for piece in _read(folder, names):
        sizes[piece.file] += len(piece.content)
        digest.add(names[piece.file], piece.content)
    files = tuple(WeightFile(name, size) for name, size in zip(names, sizes, strict=True))
    return WeightFiles(files, digest.end(files))


def read_pieces(folder: Path, files: WeightFiles) -> Iterator[bytes]:
    """The contents of these files, one after the other, a piece at a time; no piece is of two of them.

    Raises:
        ModelError: They are not what they were when they were described.
    """
    names, digest = [each.name for each in files.files], _Digest()
    for piece in _read(folder, names):
        digest.add(names[piece.file], piece.content)
        yield piece.content
    if digest.end(files.files) != files.digest:
        raise ModelError(f"{folder}: its files have changed since the server was started")


def kept(cache: str, files: WeightFiles) -> Path | None:
    """Where a machine keeps these files; None: it does not have them, or something else is there."""
    folder = _folder(cache, files)
    try:
        return folder if folder.is_dir() and describe(folder) == files else None
    except ModelError:
        return None


def keep(cache: str, files: WeightFiles, pieces: Iterable[bytes | memoryview]) -> Path:
    """Writes files to the cache of this machine, checks what was written and keeps it; one process at a time does.

    Args:
        cache: Folder that is made if it is not there.
        files: As they were described where they come from.
        pieces: As `read_pieces` gives them.

    Raises:
        ConfigError: They cannot be kept there, or are not what was described.
    """
    folder = _folder(cache, files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock")):
            if (found := kept(cache, files)) is not None:  # another process has been quicker
                return found
            made = folder.with_suffix(".new")
            for old in (made, folder):
                shutil.rmtree(old, ignore_errors=True)
            try:
                _write(made, files, pieces)
                made.rename(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        what = f"a model of {files.num_bytes / 1e9:,.1f} GB"
        raise ConfigError(
            f"cluster_config.weights_cache_path must have room for {what} on every machine: "
            f"{error.strerror or error}. Given: {cache}"
        ) from error
    return folder


def _write(folder: Path, files: WeightFiles, pieces: Iterable[bytes | memoryview]) -> None:
    digest, source = _Digest(), iter(pieces)
    for each in files.files:
        path = folder / each.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            num_left = each.num_bytes
            while num_left > 0:
                piece = next(source, b"")
                file.write(piece)
                digest.add(each.name, piece)
                num_left -= len(piece) or num_left
    if digest.end(files.files) != files.digest:
        raise ConfigError("the weights that came through Ray's object store are not those that were sent")


class _Digest:
    """Of names and contents, in the order of the files."""

    def __init__(self) -> None:
        self._all = blake2b(digest_size=_DIGEST_BYTES)
        self._name = ""

    def add(self, name: str, content: bytes | memoryview) -> None:
        if name != self._name:
            self._name = name
            self._all.update(f"\0{name}\0".encode())
        self._all.update(content)

    def end(self, files: tuple[WeightFile, ...]) -> str:
        """Sizes too: they tell where one file ends and another begins."""
        self._all.update(msgspec.json.encode(files))
        return self._all.hexdigest()


def _read(folder: Path, names: Iterable[str]) -> Iterator[_Piece]:
    for index, name in enumerate(names):
        with open_regular(folder / name) as file:
            try:
                while content := file.read(PIECE_BYTES):
                    yield _Piece(index, content)
            except OSError as error:
                raise ModelError(f"{folder / name}: cannot be read: {error.strerror}") from None


def _folder(cache: str, files: WeightFiles) -> Path:
    return Path(cache).expanduser() / files.digest


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class StoredWeights:
    """Put there once, when the first machine asks, and kept for those that come later."""

    def __init__(self, ray: Any, weights: RayWeights) -> None:
        """Raises ConfigError: the folder cannot be read."""
        self._ray, self._folder, self._cache = ray, Path(weights.folder), weights.cache
        try:
            self._files = describe(self._folder)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        self._lock = threading.Lock()
        self._pieces: list[Any] | None = None

    def bring(self, actor: Any) -> str:
        """Has the machine of an actor have the folder; returns the path there.

        Raises:
            ConfigError: The store or that machine has no room for it.
            Exception: Ray's own, where the machine is gone.
        """
        files = msgspec.json.encode(self._files)
        found = self._ray.get(actor.find_weights.remote(self._cache, files))
        if found is None:
            try:
                found = self._ray.get(actor.take_weights.remote(self._cache, files, self._put()))
            except self._ray.exceptions.RayTaskError as error:
                raise ConfigError(str(error.cause)) from error
        return str(found)

    def _put(self) -> list[Any]:
        """One at a time: others that ask meanwhile wait for it."""
        with self._lock:
            if self._pieces is None:
                try:
                    self._pieces = [
                        self._ray.put(np.frombuffer(piece, np.uint8))
                        for piece in read_pieces(self._folder, self._files)
                    ]
                except ModelError as error:
                    raise ConfigError(str(error)) from error
                except (self._ray.exceptions.ObjectStoreFullError, self._ray.exceptions.OutOfDiskError) as error:
                    raise ConfigError(
                        f"Ray's object store has no room for {self._files.num_bytes / 1e9:,.1f} GB of weights: "
                        f"start Ray with a larger --object-store-memory or with room on its disk, or have the model "
                        f"at the same path on every machine, with cluster_config.weights: path"
                    ) from error
            return self._pieces
