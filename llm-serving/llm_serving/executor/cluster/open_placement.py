"""Creates the placement that the configuration selects."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import EngineName, WeightsName
from llm_serving.executor.cluster.placement import CONNECT_TIMEOUT_S, WEIGHTS_TRANSFER_TIMEOUT_S, ClusterPlacement
from llm_serving.executor.cluster.ray_messages import RayRequirements, RayWeights
from llm_serving.executor.cluster.ray_starter import RayStarter
from llm_serving.executor.cluster.weight_files import DEFAULT_CACHE
from llm_serving.executor.placement import LocalPlacement, Placement
from llm_serving.transport.shared_memory import transfer_memory
from llm_serving.transport.tls_identity import ClusterIdentity, read_secret


@contextmanager
def open_placement(config: ServingConfig) -> Iterator[Placement]:
    """Yield the placement. Its WorkAgents must exit before the context ends. Raise ConfigError if it is unusable."""
    if config.cluster.engine == EngineName.LOCAL:
        with transfer_memory() if config.num_transfer_blocks else contextlib.nullcontext() as transfer_fd:
            yield LocalPlacement(transfer_fd)
        return
    with _secret_file(config) as path, contextlib.closing(_on_ray(config, path)) as placement:
        yield placement


def _on_ray(config: ServingConfig, secret_file: Path) -> ClusterPlacement:
    cluster, device = config.cluster, config.device
    cores = len(os.sched_getaffinity(0))
    ranks = cluster.tensor_parallel
    num_threads = device.num_threads or max(1, (cluster.cpus_per_replica or cores // config.num_replicas) // ranks)
    cpus = cluster.cpus_per_replica or num_threads * ranks
    identity = ClusterIdentity(read_secret(secret_file))
    num_devices = ranks if device.device_target == "Ascend" else 0
    weights = None
    if cluster.weights == WeightsName.OBJECT_STORE:
        weights = RayWeights(str(config.model.model_path), cluster.weights_cache_path or DEFAULT_CACHE)
    requirements = RayRequirements(cluster.address, config.num_replicas, cpus, cluster.placement, num_devices, weights)
    starter = RayStarter(requirements, str(secret_file.absolute()))
    try:
        host = cluster.master_host or ("127.0.0.1" if cluster.address is None else starter.host)
        return ClusterPlacement(
            host,
            identity,
            starter,
            num_threads,
            own_devices=num_devices > 0,
            connect_timeout_s=CONNECT_TIMEOUT_S if weights is None else WEIGHTS_TRANSFER_TIMEOUT_S,
        )
    except BaseException:
        starter.close()
        raise


@contextmanager
def _secret_file(config: ServingConfig) -> Iterator[Path]:
    """Yield the configured file with the cluster's secret, or a temporary one that only this user can read."""
    if config.cluster.secret_file is not None:
        yield config.cluster.secret_file
        return
    with tempfile.TemporaryDirectory(prefix="llm-serving-") as folder:  # its mode is 0700
        path = Path(folder) / "secret"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        yield path
