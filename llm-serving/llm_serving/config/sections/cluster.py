"""Section `cluster_config`."""

from dataclasses import dataclass
from pathlib import Path

from llm_serving.config.kinds import Kind
from llm_serving.config.rules import choice, choices, integer, option, path, text
from llm_serving.core.enums import EngineName, RoleName, SpreadName, WeightsName


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Section `cluster_config`: the machines that WorkAgents run on."""

    engine: str = option(EngineName.LOCAL.value, choice(tuple(EngineName)))
    """Who starts WorkAgents. `local`: the master, on its own machine. `ray`: a Ray cluster (`pip install
    -e 'llm-serving[ray]'`); steps then travel by TCP under TLS."""

    address: str | None = option(None, text())
    """Of the Ray cluster, as in "10.0.0.1:6379"; `auto` finds one that runs on this machine. None: the master starts
    Ray on its own machine, for itself."""

    replicas: int | None = option(None, integer(1, 4096))
    """Copies of the model, each served by a WorkAgent of `tensor_parallel` processes. None: as many as
    `serving_config.agent_ports` has entries."""

    tensor_parallel: int = option(1, integer(1, 16))
    """Processes that compute one replica together, each with its share of heads, of feed-forward columns and of the
    KV cache: all on one machine, on Ascend each with a device of its own."""

    roles: tuple[str, ...] | None = option(None, choices(tuple(RoleName)))
    """Of each replica in turn. `prefill`: requests begin there; once their prompt is computed they move, with keys and
    values, to a replica that is not. `decode`: requests move there. `both`: those that begin there end there, and
    others may move there. None: all are `both`."""

    num_transfer_blocks: int | None = option(None, integer(1))
    """Blocks of memory by which each `prefill` replica hands requests over: shared on one machine, of each WorkAgent
    where `engine` is `ray`. While there is no room a request goes on where it is. None: as many as four requests of
    `model_config.max_generate_length` fill. Pages are taken when they are first written."""

    cpus_per_replica: int | None = option(None, integer(1, 4096))
    """Cores that a replica asks Ray for, and computes with unless `device_config.num_threads` says otherwise: at least
    one for each of its ranks, which share them. None: `device_config.num_threads` for each rank, or this machine's
    cores shared between the replicas."""

    placement: str = option(SpreadName.SPREAD.value, choice(tuple(SpreadName)))
    """`spread`: WorkAgents on as many machines as there are. `pack`: on as few as will do."""

    weights: str = option(WeightsName.PATH.value, choice(tuple(WeightsName)))
    """Where machines have the weights from. `path`: each has the model folder at the path that it has here.
    `object_store`: the master's goes through Ray's object store to those that do not keep it yet."""

    weights_cache_path: str | None = option(None, text())
    """Folder of every machine in which they are kept then, by their content. None: `~/.cache/llm_serving/weights`."""

    master_host: str | None = option(None, text())
    """Address of this machine that WorkAgents connect to. None: the one Ray knows it by; where the master started Ray,
    127.0.0.1."""

    secret_file: Path | None = option(None, path(Kind.FILE))
    """File with the cluster's secret, at least 32 characters, at this path on every machine: who has it is let in, and
    nobody else. Must be given with `address`. None: the master makes one for as long as it lives."""
