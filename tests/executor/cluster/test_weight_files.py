"""Distribution of model folders to machines of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llm_serving.errors import ConfigError, ModelError
from llm_serving.executor.cluster import weight_files
from llm_serving.executor.cluster.ray_process import AgentHost
from llm_serving.executor.cluster.ray_starter import RayWeights
from llm_serving.executor.cluster.weight_files import (
    StoredWeights,
    describe_folder,
    find_cached,
    read_pieces,
    store_in_cache,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "empty").touch()
    (folder / "part" / "model.safetensors").write_bytes(bytes(range(35)))
    (folder / "linked.safetensors").symlink_to(folder / "part" / "model.safetensors")
    (folder / ".hidden").write_bytes(b"x")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_stored_weight_files_equal_the_originals(folder: Path, cache: str) -> None:
    files = describe_folder(folder)
    assert find_cached(cache, files) is None
    pieces = list(read_pieces(folder, files))
    assert [len(each) for each in pieces] == [2, 10, 10, 10, 5, 10, 10, 10, 5]
    there = store_in_cache(cache, files, pieces)
    assert contents(there) == {name: data for name, data in contents(folder).items() if name != ".hidden"}
    assert find_cached(cache, files) == there
    assert store_in_cache(cache, files, iter(())) == there, "nothing is requested again"


def test_damaged_weight_files_are_replaced(folder: Path, cache: str) -> None:
    files = describe_folder(folder)
    there = store_in_cache(cache, files, read_pieces(folder, files))
    (there / "config.json").write_bytes(b"[]")
    assert find_cached(cache, files) is None
    assert store_in_cache(cache, files, read_pieces(folder, files)) == there
    assert find_cached(cache, files) == there


@pytest.mark.parametrize("pieces", [[], [b"{}"], [b"{}", bytes(35), bytes(range(35))]])
def test_incomplete_weight_files_are_not_stored(folder: Path, cache: str, pieces: list[bytes]) -> None:
    files = describe_folder(folder)
    with pytest.raises(ConfigError, match="differ from the weights that were sent"):
        store_in_cache(cache, files, pieces)
    assert find_cached(cache, files) is None
    assert not [each for each in Path(cache).iterdir() if each.is_dir()]


def test_changed_weight_folder_is_detected(folder: Path) -> None:
    files = describe_folder(folder)
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ModelError, match="its files have changed since the server started"):
        list(read_pieces(folder, files))


def test_weight_files_digest_covers_names_and_contents(folder: Path) -> None:
    before = describe_folder(folder)
    (folder / "empty").rename(folder / "other")
    assert describe_folder(folder).digest != before.digest
    (folder / "other").rename(folder / "empty")
    assert describe_folder(folder) == before


def test_weight_folder_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no files"):
        describe_folder(tmp_path)


def test_weight_file_error_names_an_unwritable_cache_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cluster_config\.weights_cache_path must have room for a model of 0\.0 GB"):
        store_in_cache(str(tmp_path / "file"), describe_folder(folder), [])


class FullError(Exception):
    pass


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Actor:
    """An `AgentHost` whose methods are called as those of an actor."""

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            try:
                return getattr(AgentHost(), name)(*arguments)
            except ConfigError as error:
                raise TaskError(error) from error

        return SimpleNamespace(remote=remote)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stored: list[np.ndarray[Any, Any]] = []

    def put(array: np.ndarray[Any, Any]) -> int:
        if len(stored) == ray.room:
            raise FullError
        stored.append(array)
        return len(stored) - 1

    ray = SimpleNamespace(
        room=100,
        stored=stored,
        put=put,
        get=lambda value: stored[value] if isinstance(value, int) else value,
        exceptions=SimpleNamespace(ObjectStoreFullError=FullError, OutOfDiskError=FullError, RayTaskError=TaskError),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return ray


def test_weights_are_uploaded_once_and_delivered_to_each_machine(ray: Any, folder: Path, tmp_path: Path) -> None:
    caches = [str(tmp_path / name) for name in "ab"]
    weights = StoredWeights(ray, RayWeights(str(folder), caches[0]))
    first = weights.deliver(Actor())
    assert contents(Path(first))["config.json"] == b"{}"
    assert len(ray.stored) == 9
    assert weights.deliver(Actor()) == first
    weights._cache = caches[1]
    assert contents(Path(weights.deliver(Actor()))) == contents(Path(first))
    assert len(ray.stored) == 9
    again = StoredWeights(ray, RayWeights(str(folder), caches[0]))
    assert again.deliver(Actor()) == first
    assert len(ray.stored) == 9, "a machine that keeps it needs nothing of the next server"


def test_a_full_object_store_is_reported_with_advice(ray: Any, folder: Path, cache: str) -> None:
    ray.room = 3
    weights = StoredWeights(ray, RayWeights(str(folder), cache))
    with pytest.raises(ConfigError, match=r"no room for 0\.0 GB of weights: start Ray with a larger --object-store"):
        weights.deliver(Actor())
    ray.room = 100
    assert weights.deliver(Actor())


def test_a_machine_without_disk_space_is_reported(ray: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    weights = StoredWeights(ray, RayWeights(str(folder), str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"weights_cache_path must have room"):
        weights.deliver(Actor())


def test_a_missing_model_folder_is_reported_at_start(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no files"):
        StoredWeights(ray, RayWeights(str(tmp_path / "none"), str(tmp_path)))
