"""A folder of recordings is one server's at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.errors import ConfigError
from llm_serving.server.app import recordings_held


def test_a_folder_of_recordings_has_one_server_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    with recordings_held(folder):
        with (
            pytest.raises(ConfigError, match=f"scheduler_config.record_path: {folder} is used"),
            recordings_held(folder),
        ):
            pass
        with recordings_held(tmp_path / "another"):
            pass
    with recordings_held(folder):
        pass


def test_a_folder_of_recordings_that_cannot_be_made_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    used = recordings_held(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"scheduler_config.record_path: .* cannot be used"), used:
        pass


def test_without_recordings_nothing_is_held() -> None:
    with recordings_held(None), recordings_held(None):
        pass
