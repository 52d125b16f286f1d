"""A model is known from another of the same shape, wherever it lies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.models.weight_reader import EVERY_BYTES, WHOLE_BYTES, sketch_of
from support.small_model import write_small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_model(tmp_path / "model")
    return tmp_path / "model"


def other_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_copy_elsewhere_is_the_same_model_and_its_tokenizer_is_no_part_of_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    assert sketch_of(folder) == sketch_of(tmp_path / "copy")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_any_byte_of_a_small_file_counts(folder: Path, name: str, at: int) -> None:
    before = sketch_of(folder)
    assert (folder / name).stat().st_size <= WHOLE_BYTES
    other_byte(folder / name, at)
    assert sketch_of(folder) != before


@pytest.mark.parametrize("at", [0, EVERY_BYTES, 2 * EVERY_BYTES + 5, -1])
def test_samples_of_a_large_file_count(tmp_path: Path, at: int) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(2 * EVERY_BYTES + 100_000))
    before = sketch_of(model)
    other_byte(model, at)
    assert sketch_of(model) != before


def test_a_longer_file_is_another_one(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    sketches = set()
    for size in (0, 1, 2, WHOLE_BYTES, WHOLE_BYTES + 1):
        model.write_bytes(bytes(size))
        sketches.add(sketch_of(model))
    assert len(sketches) == 5


def test_what_cannot_be_read_has_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no"):
        sketch_of(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError):
        sketch_of(tmp_path)
