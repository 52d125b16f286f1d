"""A folder of recordings or of recorded requests belongs to one server at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from llm_serving.core.files import lock_folder
from llm_serving.errors import ConfigError

KEY = "scheduler_config.record_path"


def test_a_folder_is_locked_by_one_server(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    lock = lock_folder(folder, KEY)
    with pytest.raises(ConfigError, match=f"{KEY}: {folder} is used"):
        lock_folder(folder, KEY)
    os.close(lock_folder(tmp_path / "another", KEY))
    os.close(lock)
    os.close(lock_folder(folder, KEY))


def test_the_error_of_a_folder_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{KEY}: .* cannot be used"):
        lock_folder(tmp_path / "file" / "below", KEY)
