"""What `cluster_config` must and must not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError


@pytest.mark.parametrize(
    "given", ["address=10.0.0.1:6379", "cpus_per_replica=2", "placement=pack", "master_host=10.0.0.1", "secret_file=x"]
)
def test_keys_of_ray_mean_nothing_without_it(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    key = given.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"--set: `cluster_config\.{key}` must come with `cluster_config\.engine: ray`"
    ):
        load_config(None, [f"cluster_config.{given}"])


def test_a_cluster_of_several_machines_needs_a_secret(tmp_path: Path) -> None:
    overrides = ["cluster_config.engine=ray", "cluster_config.address=10.0.0.1:6379"]
    with pytest.raises(ConfigError, match=r"`cluster_config\.address` must come with `cluster_config\.secret_file`"):
        load_config(None, overrides)
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    config = load_config(None, [*overrides, f"cluster_config.secret_file={secret}"])
    assert config.cluster.secret_file == secret


def test_replicas_are_counted_by_ports_unless_said() -> None:
    ports = "serving_config.agent_ports=[1,2,3]"
    assert load_config(None, [ports]).num_replicas == 3
    assert load_config(None, [ports, "cluster_config.replicas=5"]).num_replicas == 5
