"""Folders from which administrators may load adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.config.sections.lora import LoraConfig


@pytest.mark.parametrize("given", ["circle/a", "../outside", ".", "missing", "a\0b", "x" * 5000])
def test_a_folder_that_is_outside_lora_folder_or_cannot_be_opened_is_none(tmp_path: Path, given: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "circle").symlink_to(inside / "circle")
    (tmp_path / "outside").mkdir()
    assert LoraConfig(lora_folder=inside).folder_of(given) is None
