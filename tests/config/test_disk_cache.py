"""`pa_config.disk_cache_path`: what it needs, and what it cannot be combined with."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import models
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError
from llm_serving.executor.supervisor import load_settings


def load(folder: Path, *settings: str, model: Path = Path("demo")) -> ServingConfig:
    return load_config(None, [f"pa_config.disk_cache_path={folder / 'cache'}", *settings], model)


def test_without_a_folder_there_are_no_blocks_for_the_disk() -> None:
    config = load_config(None, [], Path("demo"))
    assert (config.num_disk_blocks, config.num_transfer_blocks) == (0, 0)
    assert load_settings(config, 0).pa.disk_cache_path is None


def test_the_longest_request_can_be_read_while_another_one_is_written(tmp_path: Path) -> None:
    config = load(tmp_path, "model_config.max_generate_length=100", "pa_config.disk_cache_bytes=2GB")
    assert (config.num_disk_blocks, config.num_transfer_blocks) == (7, 14)
    settings = load_settings(config, 0)
    assert settings.pa.disk_cache_path == tmp_path / "cache"
    assert settings.pa.disk_cache_bytes == config.pa.disk_cache_bytes > 10**9
    assert not (tmp_path / "cache").exists(), "the WorkAgent creates it"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("scheduler_config.prefix_caching=false", "blocks are found by the hashes of prefix caching"),
        ("cluster_config.tensor_parallel=2", "each rank has a part of a block"),
        ("cluster_config.engine=ray", "only WorkAgents of this machine use its disk"),
    ],
)
def test_settings_that_exclude_a_disk_cache(tmp_path: Path, setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"`pa_config\.disk_cache_path` must be null with .*: {reason}\. Given: "):
        load(tmp_path, setting)


def test_roles_exclude_a_disk_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both need the transfer buffer"):
        load(tmp_path, "cluster_config.replicas=2", "cluster_config.roles=[prefill, decode]")


def test_models_without_shared_blocks_exclude_a_disk_cache(tmp_path: Path) -> None:
    models.write("lfm2", tmp_path / "model")
    with pytest.raises(ConfigError, match="must be null for a model with fixed-size states: only KV blocks are stored"):
        load(tmp_path, model=tmp_path / "model")


def test_notice_says_that_layers_with_a_window_keep_their_blocks(tmp_path: Path) -> None:
    for name in ("gemma3", "qwen3"):
        models.write(name, tmp_path / name)
    notices = [load(tmp_path, model=tmp_path / name).notices for name in ("gemma3", "qwen3")]
    assert ["layers with a sliding window keep all their blocks" in "".join(each) for each in notices] == [True, False]
