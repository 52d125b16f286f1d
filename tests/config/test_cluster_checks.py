"""Checks of `cluster_config`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving.executor.supervisor import load_settings
from support.gguf_files import write_model
from support.small_model import CONFIG, write_small_model


@pytest.mark.parametrize(
    "given",
    [
        "address=10.0.0.1:6379",
        "cpus_per_replica=2",
        "placement=pack",
        "weights=object_store",
        "master_host=10.0.0.1",
        "secret_file=x",
    ],
)
def test_ray_keys_require_engine_ray(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_object_store_requires_weights_in_the_model_folder() -> None:
    ray, stored = "cluster_config.engine=ray", "cluster_config.weights=object_store"
    assert load_config(None, [ray, stored, "cluster_config.weights_cache_path=/w"]).cluster.weights_cache_path == "/w"
    with pytest.raises(ConfigError, match=r"must come with `cluster_config\.weights: object_store`"):
        load_config(None, [ray, "cluster_config.weights_cache_path=/w"])
    with pytest.raises(ConfigError, match=r"`cluster_config\.weights` must be `path` with `model_config\.mindir_path`"):
        load_config(None, [ray, stored, f"model_config.mindir_path={Path(__file__).parent}"])


def test_gguf_file_is_not_sent_through_the_object_store(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    write_model(model, "llama", CONFIG, 0)
    ray = ["cluster_config.engine=ray", f"model_config.model_path={model}"]
    assert load_config(None, ray).model.model_path == model
    with pytest.raises(ConfigError, match=r"`cluster_config\.weights` must be `path` for a GGUF file"):
        load_config(None, [*ray, "cluster_config.weights=object_store"])


def test_number_of_replicas_defaults_to_the_number_of_agent_ports() -> None:
    ports = "serving_config.agent_ports=[1,2,3]"
    assert load_config(None, [ports]).num_replicas == 3
    assert load_config(None, [ports, "cluster_config.replicas=5"]).num_replicas == 5


def test_ranks_of_a_replica_share_the_cores_and_the_memory_of_the_machine() -> None:
    config = load_config(None, ["cluster_config.replicas=3", "cluster_config.tensor_parallel=2"])
    assert (config.num_replicas, config.num_processes) == (3, 6)
    settings = load_settings(config, 0)
    assert (settings.num_ranks, settings.num_agents) == (2, 6)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("device_config.kernels=plain", r"must be 1 with `device_config\.kernels: plain`: MindSpore's own"),
        ("model_config.implementation=mindformers", r"must be 1 with `model_config\.implementation: mindformers`"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(given: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set: `cluster_config\.tensor_parallel` {rule}.*Given: 2"):
        load_config(None, [given, "cluster_config.tensor_parallel=2"])


def test_ranks_that_ray_places_have_a_core_each() -> None:
    overrides = ["cluster_config.engine=ray", "cluster_config.tensor_parallel=3"]
    assert load_config(None, overrides).cluster.tensor_parallel == 3
    assert load_config(None, [*overrides, "cluster_config.cpus_per_replica=3"]).cluster.cpus_per_replica == 3
    rule = (
        r"`cluster_config\.cpus_per_replica` must be at least 3, one core for each rank of `cluster_config\.tensor_par"
    )
    with pytest.raises(ConfigError, match=rf"{rule}.*Given: 2"):
        load_config(None, [*overrides, "cluster_config.cpus_per_replica=2"])


@pytest.mark.parametrize("given", ["device_config.device_target=Ascend", "device_config.kernels=primitives"])
def test_ranks_may_compute_graphs(given: str) -> None:
    config = load_config(None, [given, "cluster_config.tensor_parallel=2", "serving_config.start_device_id=3"])
    assert [load_settings(config, index).device_id for index in range(2)] == [3, 5]


def test_model_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    write_small_model(tmp_path)
    assert load_config(None, ["cluster_config.tensor_parallel=2"], tmp_path).cluster.tensor_parallel == 2
    rule = r"`cluster_config\.tensor_parallel` must divide the 2 heads of keys and values\. Given: 4"
    with pytest.raises(ConfigError, match=rule):
        load_config(None, ["cluster_config.tensor_parallel=4"], tmp_path)


def test_a_model_whose_files_are_quantised_is_refused(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | quantised))
    rule = r"`cluster_config\.tensor_parallel` must be 1 for a model whose weights are quantised by .*Given: 2"
    with pytest.raises(ConfigError, match=rule):
        load_config(None, ["cluster_config.tensor_parallel=2"], tmp_path)


def test_memory_check_counts_one_rank(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes))
    limit = "device_config.max_device_memory=1750000000"
    with pytest.raises(ConfigError, match="must be at least"):
        load_config(None, [limit], tmp_path)
    load_config(None, [limit, "cluster_config.tensor_parallel=2"], tmp_path)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["roles=[prefill]"], "must name one role for each of 2 replicas. Given: prefill"),
        (
            ["roles=[prefill, prefill]"],
            "must contain `decode` or `both` if it contains `prefill`. Given: prefill, prefill",
        ),
        (
            ["roles=[both, decode]"],
            "must contain `prefill` if it contains `decode`: otherwise no request would be transferred",
        ),
        (
            ["roles=[decode, decode]"],
            "must contain `prefill` if it contains `decode`: otherwise no request would be transferred",
        ),
        (["roles=[prefill, serve]"], "must be a list of both, prefill, decode"),
        (
            ["roles=[prefill, decode]", "tensor_parallel=2"],
            "must contain only `both` with `cluster_config.tensor_parallel: 2`",
        ),
    ],
)
def test_invalid_roles_are_refused(given: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"`cluster_config.roles` {rule}")):
        load_config(None, [f"cluster_config.{each}" for each in ["replicas=2", *given]])


def test_transfer_blocks_require_a_prefill_replica() -> None:
    common = ["cluster_config.replicas=2", "model_config.max_generate_length=1000", "pa_config.block_size=16"]
    with pytest.raises(ConfigError, match=r"needs a replica whose role in `cluster_config\.roles` is `prefill`"):
        load_config(None, [*common, "cluster_config.num_transfer_blocks=8"])
    assert load_config(None, [*common, "cluster_config.roles=[both, both]"]).num_transfer_blocks == 0
    moving = load_config(None, [*common, "cluster_config.roles=[prefill, both]"])
    assert moving.num_transfer_blocks == 4 * 63
    assert load_settings(moving, 0).num_transfer_blocks == 2 * 4 * 63
    on_machines = [*common, "cluster_config.roles=[prefill, both]", "cluster_config.engine=ray"]
    assert load_config(None, on_machines).num_transfer_blocks == 4 * 63


def rank_table(folder: Path, devices: list[int]) -> Path:
    listed = [
        {"device_id": str(device), "device_ip": f"192.1.0.{rank}", "rank_id": str(rank)}
        for rank, device in enumerate(devices)
    ]
    table = {
        "version": "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [{"server_id": "10.0.0.1", "device": listed}],
    }
    path = folder / "ranks.json"
    path.write_text(json.dumps(table))
    return path


ON_TWO_NPUS = [
    "device_config.device_target=Ascend",
    "cluster_config.tensor_parallel=2",
    "serving_config.start_device_id=4",
]


def test_a_rank_table_is_passed_on_to_the_ranks(tmp_path: Path) -> None:
    path = rank_table(tmp_path, [4, 5])
    config = load_config(None, [*ON_TWO_NPUS, f"cluster_config.rank_table_file={path}"])
    assert load_settings(config, 0).rank_table == path


@pytest.mark.parametrize(
    ("devices", "overrides", "rule"),
    [
        ([4, 5], ["device_config.device_target=CPU"], "must be null without `device_config.device_target: Ascend`"),
        ([4], ["cluster_config.tensor_parallel=1"], "must be null with `cluster_config.tensor_parallel: 1`"),
        ([4, 5], ["cluster_config.replicas=2"], "must be null with several replicas"),
        ([4, 5, 6], [], "must have 2 ranks, the value of `cluster_config.tensor_parallel`. Given: 3 ranks"),
        ([5, 4], [], "must have the devices 4 to 5, from `serving_config.start_device_id` on. Given: 5, 4"),
    ],
)
def test_a_rank_table_has_the_ranks_of_the_only_replica(
    devices: list[int], overrides: list[str], rule: str, tmp_path: Path
) -> None:
    path = rank_table(tmp_path, devices)
    given = [*ON_TWO_NPUS, *overrides, f"cluster_config.rank_table_file={path}"]
    with pytest.raises(ConfigError, match=re.escape(f"`cluster_config.rank_table_file` {rule}")):
        load_config(None, given)
