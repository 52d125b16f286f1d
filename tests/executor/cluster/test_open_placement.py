"""The cluster resources that a configuration requires."""

from __future__ import annotations

import pytest
from llm_serving.config import load_config
from llm_serving.executor.cluster import placement as placement_module
from llm_serving.executor.cluster.ray_starter import RayRequirements
from llm_serving.executor.supervisor import load_settings


class Starter:
    """A fake of `RayStarter`."""

    host = "127.0.0.1"
    requirements: list[RayRequirements]

    def __init__(self, requirements: RayRequirements, secret_file: str) -> None:
        self.requirements.append(requirements)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "cpus", "num_threads", "num_devices", "device_id"),
    [
        (["cluster_config.cpus_per_replica=5"], 5, 5, 0, 1),
        (["cluster_config.cpus_per_replica=5", "cluster_config.tensor_parallel=2"], 5, 2, 0, 2),
        (["device_config.num_threads=3", "cluster_config.tensor_parallel=2"], 6, 3, 0, 2),
        (["cluster_config.replicas=8", "cluster_config.tensor_parallel=4"], 4, 1, 0, 4),
        (["cluster_config.tensor_parallel=4", "device_config.device_target=Ascend"], 4, 1, 4, 0),
        (["cluster_config.replicas=8", "device_config.device_target=Ascend"], 1, 1, 1, 0),
    ],
)
def test_a_replica_requires_resources_for_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch, given: list[str], cpus: int, num_threads: int, num_devices: int, device_id: int
) -> None:
    monkeypatch.setattr(placement_module.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(Starter, "requirements", [], raising=False)
    monkeypatch.setattr(placement_module, "RayStarter", Starter)
    config = load_config(None, ["cluster_config.engine=ray", *given])
    with placement_module.open_placement(config) as placement:
        assert isinstance(placement, placement_module.ClusterPlacement)
        settings = placement.settings(load_settings(config, 1))
    (requirements,) = Starter.requirements
    assert (requirements.cpus, requirements.num_devices) == (cpus, num_devices)
    assert (settings.device.num_threads, settings.device_id) == (num_threads, device_id)
