"""MindFormers YAMLs: the model that they name, parallel ranks, adapters, and files without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from llm_serving.cli.main import main
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections import device
from llm_serving.errors import ConfigError
from support.model_folders import write_config

NEWER = {
    "load_checkpoint": "",
    "load_ckpt_format": "safetensors",
    "use_parallel": False,
    "run_mode": "predict",
    "use_legacy": False,
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "qwen3"},
    "parallel_config": {"data_parallel": 1, "model_parallel": 1},
    "pretrained_model_dir": "weights",
    "model": {"model_config": {"compute_dtype": "bfloat16", "params_dtype": "bfloat16", "rotary_dtype": "bfloat16"}},
    "context": {
        "mode": 0,
        "ascend_config": {"precision_mode": "must_keep_origin_dtype"},
        "max_device_memory": "59GB",
        "save_graphs": False,
    },
    "parallel": {"parallel_mode": "MANUAL_PARALLEL"},
}
"""A YAML of MindFormers 2 for prediction. It names neither a device nor the shape of the model."""


def load(folder: Path, *overrides: str, **changes: Any) -> ServingConfig:
    (folder / "model.yaml").write_text(yaml.safe_dump(NEWER | changes))
    path = folder / "serving.yaml"
    path.write_text("model_config: {model_cfg_path: model.yaml}\n")
    return load_config(path, overrides)


def test_pretrained_model_dir_is_the_model(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "weights")
    config = load(tmp_path)
    assert (config.model.model_path, config.model.model_name) == (folder, "weights")
    assert (config.model.model_dtype, config.device.max_device_memory) == ("bfloat16", 59 * 2**30)
    assert config.sources["model_config.model_path"].startswith(f"{tmp_path}/model.yaml:")
    assert config.model_hint == ""
    other = write_config(tmp_path / "other")
    assert load(tmp_path, f"model_config.model_path={other}").model.model_path == other


def test_load_checkpoint_wins_over_pretrained_model_dir(tmp_path: Path) -> None:
    write_config(tmp_path / "weights")
    trained = write_config(tmp_path / "trained")
    assert load(tmp_path, load_checkpoint="trained").model.model_path == trained
    config = load(tmp_path, load_checkpoint="trained.ckpt")
    assert config.model.model_path is None
    assert "load_checkpoint 'trained.ckpt' is no folder in Hugging Face form" in config.model_hint


def test_missing_pretrained_model_dir_is_named_by_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(tmp_path)
    assert config.model_hint.endswith(
        "pretrained_model_dir 'weights' is no folder in Hugging Face form; set model_config.model_path to one"
    )
    assert config.model_hint in config.notices
    assert main(["serve", "--config", str(tmp_path / "serving.yaml")]) == 2
    assert f"no model to serve: {config.model_hint}" in capsys.readouterr().err


def test_checkpoint_file_as_model_names_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "llama.ckpt").touch()
    command = f"llm-serving convert {tmp_path}/llama.ckpt OUT --to hf --config YAML"
    for model in (tmp_path / "llama.ckpt", tmp_path):
        with pytest.raises(ConfigError, match=command):
            load_config(None, [], model)


@pytest.mark.parametrize(
    ("use_parallel", "count", "expected", "has_notice"),
    [(True, 4, 4, False), (None, 2, 2, False), (False, 4, 1, True), (False, 1, 1, False)],
)
def test_model_parallel_is_tensor_parallel(
    tmp_path: Path, use_parallel: bool | None, count: int, expected: int, has_notice: bool
) -> None:
    config = load(tmp_path, use_parallel=use_parallel, parallel_config={"model_parallel": count, "data_parallel": 1})
    assert config.cluster.tensor_parallel == expected
    assert any("parallel_config.model_parallel: 4 has no effect" in each for each in config.notices) == has_notice
    assert any("parallel_config.data_parallel" in each for each in config.notices)
    assert load(tmp_path, "cluster_config.tensor_parallel=2", use_parallel=True).cluster.tensor_parallel == 2


@pytest.mark.parametrize("kind", ["lora", "slora", "ptuning2", "prefixtuning"])
def test_mindformers_yaml_with_an_adapter_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.yaml:\d+: `model.model_config.pet_config` must be left .*'{kind}'"):
        load(tmp_path, model={"model_config": {"pet_config": {"pet_type": kind, "lora_rank": 8}}})
    load(tmp_path, model={"model_config": {"pet_config": None}})


def test_cpu_on_a_machine_with_npus_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NPU_FOLDER", tmp_path)
    assert not [each for each in load(tmp_path).notices if "NPU" in each]
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    notice = f"CPU, although this machine has 2 NPUs ({tmp_path}/davinci0): set Ascend to serve on them"
    for config in (load(tmp_path), load_config()):
        assert f"default: device_config.device_target: {notice}" in config.notices
    for target in ("CPU", "Ascend"):
        assert not [each for each in load(tmp_path, context={"device_target": target}).notices if "NPU" in each]
