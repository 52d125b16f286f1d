from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.models.weight_reader import EVERY_BYTES, WHOLE_BYTES, weight_fingerprint
from support.small_model import write_small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_model(tmp_path / "model")
    return tmp_path / "model"


def other_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_weight_fingerprint_of_a_copy_is_equal_whatever_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    assert weight_fingerprint(folder) == weight_fingerprint(tmp_path / "copy")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_weight_fingerprint_covers_every_byte_of_a_small_file(folder: Path, name: str, at: int) -> None:
    before = weight_fingerprint(folder)
    assert (folder / name).stat().st_size <= WHOLE_BYTES
    other_byte(folder / name, at)
    assert weight_fingerprint(folder) != before


@pytest.mark.parametrize("at", [0, EVERY_BYTES, 2 * EVERY_BYTES + 5, -1])
def test_weight_fingerprint_samples_a_large_file(tmp_path: Path, at: int) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(2 * EVERY_BYTES + 100_000))
    before = weight_fingerprint(model)
    other_byte(model, at)
    assert weight_fingerprint(model) != before


def test_weight_fingerprint_covers_the_file_size(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    sketches = set()
    for size in (0, 1, 2, WHOLE_BYTES, WHOLE_BYTES + 1):
        model.write_bytes(bytes(size))
        sketches.add(weight_fingerprint(model))
    assert len(sketches) == 5


def test_weight_fingerprint_fails_for_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no"):
        weight_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError):
        weight_fingerprint(tmp_path)
