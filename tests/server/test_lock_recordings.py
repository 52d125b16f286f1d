"""A folder of recordings belongs to one server at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.errors import ConfigError
from llm_serving.server.app import lock_recordings


def test_recording_folder_is_locked_by_one_server(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    with lock_recordings(folder):
        with (
            pytest.raises(ConfigError, match=f"scheduler_config.record_path: {folder} is used"),
            lock_recordings(folder),
        ):
            pass
        with lock_recordings(tmp_path / "another"):
            pass
    with lock_recordings(folder):
        pass


def test_recording_folder_error_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    used = lock_recordings(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"scheduler_config.record_path: .* cannot be used"), used:
        pass


def test_server_without_recording_locks_nothing() -> None:
    with lock_recordings(None), lock_recordings(None):
        pass
