"""Weights that replace served ones must have their architecture, configuration and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_serving.errors import ModelError
from llm_serving.models.spec import ModelSpec
from llm_serving.models.weight_reader import check_replacement
from support.small_model import write_small_model


def write(folder: Path, **changes: object) -> Path:
    write_small_model(folder, **changes)
    return folder


def test_equal_folders_replace_each_other(tmp_path: Path) -> None:
    served, other = write(tmp_path / "served"), write(tmp_path / "other", _name_or_path="elsewhere")
    check_replacement(other, ModelSpec.from_folder(served))
    check_replacement(served, ModelSpec.from_folder(other))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rms_norm_eps": 1e-3}, "`rms_norm_eps` of config.json must be None, as served. Given: 0.001"),
        ({"num_hidden_layers": 1}, "`num_hidden_layers` of config.json must be 2, as served. Given: 1"),
        ({"architectures": ["MistralForCausalLM"]}, "the architecture must be LlamaForCausalLM, as served. Given: Mis"),
    ],
)
def test_errors_name_the_first_difference(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    served, other = write(tmp_path / "served"), write(tmp_path / "other", **changes)
    with pytest.raises(ModelError, match=error.replace("(", r"\(")):
        check_replacement(other, ModelSpec.from_folder(served))


def test_a_folder_with_other_shapes_is_refused(tmp_path: Path) -> None:
    served, other = write(tmp_path / "served"), write(tmp_path / "other", intermediate_size=128)
    (other / "config.json").write_text(json.dumps(json.loads((served / "config.json").read_text())))
    with pytest.raises(ModelError, match="shape"):
        check_replacement(other, ModelSpec.from_folder(served))
