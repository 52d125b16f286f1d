"""Copies of a model folder, which Ray's object store sends to machines that do not have it.

A folder is identified by a digest of its contents. It is sent in pieces and stored in a cache folder on each machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from llm_serving.core.files import open_regular
from llm_serving.errors import ConfigError, ModelError
from llm_serving.executor.cluster.ray_starter import RayWeights

PIECE_BYTES: Final = 2**25
DEFAULT_CACHE: Final = "~/.cache/llm_serving/weights"
_DIGEST_BYTES: Final = 20


class WeightFile(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int


class WeightFiles(msgspec.Struct, frozen=True):
    files: tuple[WeightFile, ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.files)


def describe_folder(folder: Path) -> WeightFiles:
    """Describe the files of a folder and its subfolders, except hidden ones. Raise ModelError if that fails."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not names:
        raise ModelError(f"{folder}: has no files")
    sizes, digest = dict.fromkeys(names, 0), _Digest()
    for name, content in _read(folder, names):
        sizes[name] += len(content)
        digest.add(name, content)
    files = tuple(WeightFile(name, size) for name, size in sizes.items())
    return WeightFiles(files, digest.finish(files))


def read_pieces(folder: Path, files: WeightFiles) -> Iterator[bytes]:
    """Yield the contents of the files in pieces. Raise ModelError if the files have changed."""
    digest = _Digest()
    for name, content in _read(folder, [each.name for each in files.files]):
        digest.add(name, content)
        yield content
    if digest.finish(files.files) != files.digest:
        raise ModelError(f"{folder}: its files have changed since the server started")


def find_cached(cache: str, files: WeightFiles) -> Path | None:
    folder = _folder(cache, files)
    try:
        return folder if folder.is_dir() and describe_folder(folder) == files else None
    except ModelError:
        return None


def store_in_cache(cache: str, files: WeightFiles, pieces: Iterable[bytes | memoryview]) -> Path:
    """Write the files to this machine's cache folder, and verify them. Raise ConfigError if that fails."""
    folder = _folder(cache, files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive_lock(folder.with_suffix(".lock")):
            if (found := find_cached(cache, files)) is not None:  # another process stored them meanwhile
                return found
            incomplete = folder.with_suffix(".new")
            for old in (incomplete, folder):
                shutil.rmtree(old, ignore_errors=True)
            try:
                _write(incomplete, files, pieces)
                incomplete.rename(folder)
            finally:
                shutil.rmtree(incomplete, ignore_errors=True)
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
    if digest.finish(files.files) != files.digest:
        raise ConfigError("the weights received through Ray's object store differ from the weights that were sent")


class _Digest:
    def __init__(self) -> None:
        self._all = blake2b(digest_size=_DIGEST_BYTES)
        self._name = ""

    def add(self, name: str, content: bytes | memoryview) -> None:
        if name != self._name:
            self._name = name
            self._all.update(f"\0{name}\0".encode())
        self._all.update(content)

    def finish(self, files: tuple[WeightFile, ...]) -> str:
        """Return the digest. It includes the sizes of the files, so it depends on where each file ends."""
        self._all.update(msgspec.json.encode(files))
        return self._all.hexdigest()


def _read(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        with open_regular(folder / name) as file:
            try:
                while content := file.read(PIECE_BYTES):
                    yield name, content
            except OSError as error:
                raise ModelError(f"{folder / name}: cannot be read: {error.strerror}") from None


def _folder(cache: str, files: WeightFiles) -> Path:
    return Path(cache).expanduser() / files.digest


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class StoredWeights:
    """A model folder in Ray's object store, uploaded when needed. Raise ConfigError if the folder cannot be read."""

    def __init__(self, ray: Any, weights: RayWeights) -> None:
        self._ray, self._folder, self._cache = ray, Path(weights.folder), weights.cache
        try:
            self._files = describe_folder(self._folder)
        except ModelError as error:
            raise ConfigError(str(error)) from error
        self._lock = threading.Lock()
        self._pieces: list[Any] | None = None

    def deliver(self, actor: Any) -> str:
        """Copy the folder to an actor's machine if needed; return its path there. Raise ConfigError without space."""
        files = msgspec.json.encode(self._files)
        found = self._ray.get(actor.find_weights.remote(self._cache, files))
        if found is None:
            try:
                found = self._ray.get(actor.store_weights.remote(self._cache, files, self._put()))
            except self._ray.exceptions.RayTaskError as error:
                raise ConfigError(str(error.cause)) from error
        return str(found)

    def _put(self) -> list[Any]:
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
