"""Section `cluster_config`: its keys and their checks."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.paths import Kind
from llm_serving.config.rules import TEXT, choice, choices, integer, option, path
from llm_serving.config.values import Values
from llm_serving.core.enums import EngineName, ImplementationName, RoleName, SpreadName, WeightsName
from llm_serving.errors import ConfigError
from llm_serving.models.gguf import is_gguf
from llm_serving.models.spec import ModelSpec
from llm_serving.network.sharding import sharding_violation

RANK_TABLE_VERSIONS = ("1.0", "1.2")
"""Values of `version`: for an Atlas A2, and for an A3, whose devices also have a `super_device_id`."""


class RankDevice(NamedTuple):
    rank: int
    device: int
    """Index of the device on its machine."""


def read_rank_table(path: Path) -> list[RankDevice]:
    """Return the ranks of a rank table in order. Raise ConfigError if HCCL could not use the table, or if it does not
    have exactly one machine, because all ranks of a replica run on one machine.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} must be a rank table of HCCL in JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must be a rank table of HCCL, a JSON object. Given: {str(table)[:100]}")
    if table.get("version") not in RANK_TABLE_VERSIONS:
        raise _rank_table_error(path, "version", f"must be {' or '.join(RANK_TABLE_VERSIONS)}", table.get("version"))
    if table.get("status") != "completed":
        raise _rank_table_error(path, "status", 'must be "completed"', table.get("status"))
    servers = table.get("server_list")
    if not isinstance(servers, list) or len(servers) != 1 or not isinstance(servers[0], dict):
        given = f"{len(servers)} machines" if isinstance(servers, list) else servers
        raise _rank_table_error(path, "server_list", "must have one machine: all ranks of a replica run on it", given)
    if str(table.get("server_count")) != "1":
        raise _rank_table_error(path, "server_count", "must be 1, the length of server_list", table.get("server_count"))
    devices = servers[0].get("device")
    if not isinstance(devices, list) or not all(isinstance(each, dict) for each in devices):
        raise _rank_table_error(path, "server_list[0].device", "must be a list of devices", devices)
    found = sorted(_device(path, f"server_list[0].device[{index}]", each) for index, each in enumerate(devices))
    ranks = [each.rank for each in found]
    if ranks != list(range(len(ranks))):
        raise _rank_table_error(path, "rank_id", f"must be 0 to {len(ranks) - 1}, each once", ranks)
    if len({each.device for each in found}) < len(found):
        raise _rank_table_error(path, "device_id", "must differ from rank to rank", [each.device for each in found])
    return found


def _device(path: Path, place: str, device: dict[str, Any]) -> RankDevice:
    numbers = [_number(path, f"{place}.{field}", device.get(field)) for field in ("rank_id", "device_id")]
    address = device.get("device_ip")
    try:
        ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError:
        raise _rank_table_error(path, f"{place}.device_ip", "must be the IP address of the device", address) from None
    return RankDevice(*numbers)


def _number(path: Path, field: str, value: Any) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).isdecimal():
        raise _rank_table_error(path, field, "must be a whole number, at least 0", value)
    return int(value)


def _rank_table_error(path: Path, field: str, rule: str, value: Any) -> ConfigError:
    return ConfigError(f"{path}: `{field}` {rule}. Given: {value}")


WITH_RAY: Final = ("cluster_config.engine", EngineName.RAY.value)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster_config`: replicas, ranks, and the machines that WorkAgents run on."""

    engine: str = option(EngineName.LOCAL.value, choice(tuple(EngineName)))
    """Which process starts the WorkAgents. `local`: the master, on its own machine. `ray`: a Ray cluster (`pip install
    -e 'llm-serving[ray]'`); the master and the WorkAgents then communicate over TCP with TLS."""
    replicas: int | None = option(None, integer(1, 4096))
    """Number of replicas of the model. null: one for each entry of `serving_config.agent_ports`."""
    tensor_parallel: int = option(1, integer(1, 16))
    """Number of ranks (processes) of one replica, on one machine. Each computes, and keeps in its KV cache, its part of
    the attention heads; on Ascend each has a device of its own."""
    rank_table_file: Path | None = option(None, path(Kind.FILE), expert=True)
    """Rank table of HCCL, as MindFormers and MindIE use it: a JSON file with the devices of the ranks, for one replica
    with `tensor_parallel` above 1 on Ascend. Rank r must have the device `serving_config.start_device_id` + r. null:
    the ranks find each other's devices themselves."""
    roles: tuple[str, ...] | None = option(None, choices(tuple(RoleName)))
    """Prefill/decode disaggregation: the role of each replica, such as [prefill, decode]. `prefill`: computes prompts,
    then transfers the request and its KV blocks to a replica with another role. `decode`: receives such requests.
    `both`: computes its own requests, and receives others. null: all replicas are `both`."""
    address: str | None = option(None, TEXT, only_with=WITH_RAY)
    """Address of the Ray cluster, such as "10.0.0.1:6379". `auto`: a cluster that runs on this machine. null: the
    master starts Ray on its own machine."""
    secret_file: Path | None = option(None, path(Kind.FILE), only_with=WITH_RAY)
    """File with the secret of the cluster, at least 32 characters, at this path on every machine. The master and a
    WorkAgent accept only peers that know it. Required with `address`. null: the master generates a secret."""
    master_host: str | None = option(None, TEXT, expert=True, only_with=WITH_RAY)
    """Address of this machine that the WorkAgents connect to. null: the address by which Ray knows this machine, or
    127.0.0.1 if the master started Ray."""
    placement: str = option(SpreadName.SPREAD.value, choice(tuple(SpreadName)), expert=True, only_with=WITH_RAY)
    """How Ray distributes the WorkAgents. `spread`: over many machines. `pack`: over as few as possible."""
    cpus_per_replica: int | None = option(None, integer(1, 4096), expert=True, only_with=WITH_RAY)
    """CPU cores that one replica reserves in Ray and divides among its ranks; at least one for each rank. null:
    `device_config.num_threads` for each rank, or the cores of this machine divided by the number of replicas."""
    weights: str = option(WeightsName.PATH.value, choice(tuple(WeightsName)), expert=True, only_with=WITH_RAY)
    """Where a machine reads the weights. `path`: in the model folder, which is at the same path on every machine.
    `object_store`: the master sends its model folder through Ray's object store."""
    weights_cache_path: str | None = option(
        None, TEXT, expert=True, only_with=("cluster_config.weights", WeightsName.OBJECT_STORE.value)
    )
    """Folder on every machine for the received weights. null: `~/.cache/llm_serving/weights`."""
    num_transfer_blocks: int | None = option(None, integer(1), expert=True)
    """Number of KV blocks in the transfer buffer of each `prefill` replica. While it is full, a request continues on
    the replica that computed its prompt. null: enough for four requests of `model_config.max_generate_length`, or for
    fewer if the layers form groups. A block takes memory from its first use."""


_FOR_RANKS: Final = (
    ("model_config.mindir_path", None, "exported graphs are for a single process"),
    ("model_config.implementation", ImplementationName.NATIVE, "MindFormers' networks are for a single process"),
)
"""(key, the only value allowed with several ranks, reason)."""
_FOR_ROLES: Final = (
    ("cluster_config.tensor_parallel", 1, "ranks do not transfer KV blocks"),
    ("model_config.mindir_path", None, "the KV cache inside an exported graph cannot be read"),
    ("model_config.batching_strategy", "continuous", "a static batch ends on the replica where it started"),
)
"""(key, the only value allowed with transfers between replicas, reason)."""
_OUTSIDE_MODEL: Final = ("model_config.mindir_path", "scheduler_config.draft_model_path")
"""Keys of files outside the model's folder, which `weights: object_store` does not send."""


def check_cluster(values: Values, spec: ModelSpec | None) -> None:
    if values["cluster_config.address"] is not None and values["cluster_config.secret_file"] is None:
        rule = "must come with `cluster_config.secret_file`, a file that all machines have"
        raise values.error("cluster_config.address", rule)
    if values["cluster_config.weights"] == WeightsName.OBJECT_STORE:
        _check_sent_weights(values)
    if values["cluster_config.tensor_parallel"] > 1:
        _check_ranks(values, spec)
    if values["cluster_config.rank_table_file"] is not None:
        _check_rank_table(values)
    _check_roles(values)


def _check_rank_table(values: Values) -> None:
    name, ranks_key = "cluster_config.rank_table_file", "cluster_config.tensor_parallel"
    num_ranks, first = values[ranks_key], values["serving_config.start_device_id"]
    if values["device_config.device_target"] != "Ascend":
        raise values.error(name, "must be null without `device_config.device_target: Ascend`: HCCL joins NPUs only")
    if num_ranks == 1:
        raise values.error(name, f"must be null with `{ranks_key}: 1`: only several ranks use a rank table")
    if _num_replicas(values) > 1:
        raise values.error(name, "must be null with several replicas: the table has the ranks of one replica")
    ranks = read_rank_table(values[name])
    if len(ranks) != num_ranks:
        raise values.error(name, f"must have {num_ranks} ranks, the value of `{ranks_key}`", f"{len(ranks)} ranks")
    devices = [each.device for each in ranks]
    if devices != list(range(first, first + num_ranks)):
        rule = f"must have the devices {first} to {first + num_ranks - 1}, from `serving_config.start_device_id` on"
        raise values.error(name, rule, ", ".join(map(str, devices)))


def _num_replicas(values: Values) -> int:
    num_replicas: int = values["cluster_config.replicas"] or len(values["serving_config.agent_ports"])
    return num_replicas


def _check_sent_weights(values: Values) -> None:
    name, model = "cluster_config.weights", values["model_config.model_path"]
    if model is not None and is_gguf(model):
        raise values.error(name, "must be `path` for a GGUF file: only folders are sent")
    for outside in _OUTSIDE_MODEL:
        if values[outside] is not None:
            raise values.error(name, f"must be `path` with `{outside}`: only files of the model's folder are sent")


def _check_ranks(values: Values, spec: ModelSpec | None) -> None:
    name, cpus_key = "cluster_config.tensor_parallel", "cluster_config.cpus_per_replica"
    count, cpus = values[name], values[cpus_key]
    for other, needed, why in _FOR_RANKS:
        if values[other] != needed:
            raise values.error(name, f"must be 1 with `{other}: {values[other]}`: {why}")
    if values["device_config.kernels"] == "plain":
        rule = "must be 1 with `device_config.kernels: plain`: MindSpore's own operations are for a single process"
        raise values.error(name, rule)
    if cpus is not None and cpus < count:
        raise values.error(cpus_key, f"must be at least {count}, one core for each rank of `{name}`")
    if spec is None:
        return
    if spec.scheme is not None:
        raise values.error(name, f"must be 1 for a model whose weights are quantised by {spec.scheme.description}")
    if (unmet := sharding_violation(spec.network, count)) is not None:
        raise values.error(name, unmet)


def _check_roles(values: Values) -> None:
    name, blocks_key = "cluster_config.roles", "cluster_config.num_transfer_blocks"
    roles = values[name]
    if RoleName.PREFILL not in (roles or ()) and values[blocks_key] is not None:
        raise values.error(blocks_key, f"needs a replica whose role in `{name}` is `prefill`")
    if roles is None:
        return
    given = ", ".join(roles)
    num_replicas = _num_replicas(values)
    if len(roles) != num_replicas:
        raise values.error(name, f"must name one role for each of {num_replicas} replicas", given)
    if set(roles) == {RoleName.BOTH}:
        return
    if RoleName.PREFILL not in roles:
        raise values.error(
            name, "must contain `prefill` if it contains `decode`: otherwise no request would be transferred", given
        )
    if set(roles) == {RoleName.PREFILL}:
        raise values.error(name, "must contain `decode` or `both` if it contains `prefill`", given)
    for other, needed, why in _FOR_ROLES:
        if values[other] != needed:
            raise values.error(name, f"must contain only `both` with `{other}: {values[other]}`: {why}", given)
