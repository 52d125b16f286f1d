"""Model folders that machines are given: in pieces, checked, kept, found again."""

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
from llm_serving.executor.cluster.ray_messages import RayWeights
from llm_serving.executor.cluster.ray_process import AgentHost
from llm_serving.executor.cluster.weight_files import StoredWeights, describe, keep, kept, read_pieces


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


def test_what_is_kept_is_what_was_there(folder: Path, cache: str) -> None:
    files = describe(folder)
    assert kept(cache, files) is None
    pieces = list(read_pieces(folder, files))
    assert [len(each) for each in pieces] == [2, 10, 10, 10, 5, 10, 10, 10, 5]
    there = keep(cache, files, pieces)
    assert contents(there) == {name: data for name, data in contents(folder).items() if name != ".hidden"}
    assert kept(cache, files) == there
    assert keep(cache, files, iter(())) == there, "nothing is asked for again"


def test_what_is_damaged_is_not_found_and_replaced(folder: Path, cache: str) -> None:
    files = describe(folder)
    there = keep(cache, files, read_pieces(folder, files))
    (there / "config.json").write_bytes(b"[]")
    assert kept(cache, files) is None
    assert keep(cache, files, read_pieces(folder, files)) == there
    assert kept(cache, files) == there


@pytest.mark.parametrize("pieces", [[], [b"{}"], [b"{}", bytes(35), bytes(range(35))]])
def test_what_did_not_come_whole_is_not_kept(folder: Path, cache: str, pieces: list[bytes]) -> None:
    files = describe(folder)
    with pytest.raises(ConfigError, match="are not those that were sent"):
        keep(cache, files, pieces)
    assert kept(cache, files) is None
    assert not [each for each in Path(cache).iterdir() if each.is_dir()]


def test_a_folder_that_changes_meanwhile_is_noticed(folder: Path) -> None:
    files = describe(folder)
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ModelError, match="its files have changed since the server was started"):
        list(read_pieces(folder, files))


def test_names_and_contents_are_what_it_is_known_by(folder: Path) -> None:
    before = describe(folder)
    (folder / "empty").rename(folder / "other")
    assert describe(folder).digest != before.digest
    (folder / "other").rename(folder / "empty")
    assert describe(folder) == before


def test_a_folder_without_files_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no files"):
        describe(tmp_path)


def test_a_place_where_nothing_can_be_kept_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cluster_config\.weights_cache_path must have room for a model of 0\.0 GB"):
        keep(str(tmp_path / "file"), describe(folder), [])


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


def test_machines_that_lack_a_folder_get_it_and_it_is_stored_once(ray: Any, folder: Path, tmp_path: Path) -> None:
    caches = [str(tmp_path / name) for name in "ab"]
    weights = StoredWeights(ray, RayWeights(str(folder), caches[0]))
    first = weights.bring(Actor())
    assert contents(Path(first))["config.json"] == b"{}"
    assert len(ray.stored) == 9
    assert weights.bring(Actor()) == first
    weights._cache = caches[1]
    assert contents(Path(weights.bring(Actor()))) == contents(Path(first))
    assert len(ray.stored) == 9
    again = StoredWeights(ray, RayWeights(str(folder), caches[0]))
    assert again.bring(Actor()) == first
    assert len(ray.stored) == 9, "a machine that keeps it needs nothing of the next server"


def test_a_full_store_is_told_with_what_to_do(ray: Any, folder: Path, cache: str) -> None:
    ray.room = 3
    weights = StoredWeights(ray, RayWeights(str(folder), cache))
    with pytest.raises(ConfigError, match=r"no room for 0\.0 GB of weights: start Ray with a larger --object-store"):
        weights.bring(Actor())
    ray.room = 100
    assert weights.bring(Actor())


def test_a_machine_without_room_is_told(ray: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    weights = StoredWeights(ray, RayWeights(str(folder), str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"weights_cache_path must have room"):
        weights.bring(Actor())


def test_a_folder_that_is_not_there_is_told_at_the_start(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no files"):
        StoredWeights(ray, RayWeights(str(tmp_path / "none"), str(tmp_path)))
