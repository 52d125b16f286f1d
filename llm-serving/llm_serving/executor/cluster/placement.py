"""Starts WorkAgents on the machines of a cluster, from which they connect to the master."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import EngineName, WeightsName
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.executor.cluster.listener import Listener
from llm_serving.executor.cluster.ray_starter import RayRequirements, RayStarter, RayWeights
from llm_serving.executor.cluster.weight_files import DEFAULT_CACHE
from llm_serving.executor.placement import LocalPlacement, Placement, StartedAgent
from llm_serving.executor.tensor_parallel import join_channels
from llm_serving.executor.worker_process import AgentChannel, AgentProcess, StartCancellation
from llm_serving.transport.channel import MAX_FRAME_BYTES
from llm_serving.transport.messages import LoadModel
from llm_serving.transport.shared_memory import InlineArrays, transfer_memory
from llm_serving.transport.tls_identity import ClusterIdentity, read_secret

CONNECT_TIMEOUT_S: Final = 300.0
"""Seconds within which a new WorkAgent must connect. It loads the model after that."""
WEIGHTS_TRANSFER_TIMEOUT_S: Final = 3600.0
"""`CONNECT_TIMEOUT_S` of a WorkAgent whose machine first receives the weights."""
POLL_INTERVAL_S: Final = 0.2


class ClusterPlacement:
    """Starts WorkAgents in a cluster and waits for their connections. Each connection presents its own random token.

    Each rank has a connection for steps, and each replica has one more if blocks are transferred. `host`: address of
    this machine to which WorkAgents connect; raise ConfigError if it is unusable. `own_devices`: whether a WorkAgent
    sees only its own devices, numbered from 0.
    """

    def __init__(
        self,
        host: str,
        identity: ClusterIdentity,
        starter: RayStarter,
        num_threads: int | None = None,
        own_devices: bool = False,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        clock: Clock = monotonic,
    ) -> None:
        try:
            self._listener = Listener(host, identity)
        except OSError as error:
            rule = f"cluster_config.master_host must be an address of this machine: {error.strerror or error}"
            raise ConfigError(f"{rule}. Given: {host}") from None
        if ipaddress.ip_address(self._listener.address[0]).is_unspecified:
            self._listener.close()
            raise ConfigError(
                f"cluster_config.master_host must be an address that the other machines can connect to. Given: {host}"
            )
        self._starter = starter
        self._num_threads = num_threads
        self._own_devices = own_devices
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock

    def settings(self, settings: LoadModel) -> LoadModel:
        device_id = 0 if self._own_devices else settings.device_id
        device = replace(settings.device, num_threads=self._num_threads or settings.device.num_threads)
        return msgspec.structs.replace(settings, device_id=device_id, device=device)

    def start(
        self,
        index: int,
        settings: LoadModel,
        log_level: str,
        timeout_s: float | None,
        cancellation: StartCancellation,
    ) -> StartedAgent:
        settings = self.settings(settings)
        tokens, blocks_token = [secrets.token_hex(16) for _ in range(settings.num_ranks)], secrets.token_hex(16)
        host, port = self._listener.address
        arguments = ["--index", str(index), "--log-level", log_level, "--connect", f"{host}:{port}"]
        transfers_blocks = settings.num_transfer_blocks > 0
        if transfers_blocks:
            arguments += ["--blocks-token", blocks_token]
        channels, blocks = list[AgentChannel](), None
        with contextlib.ExitStack() as expecting, contextlib.ExitStack() as undo:
            expected_channels = [expecting.enter_context(self._listener.expect(token)) for token in tokens]
            expected_blocks = expecting.enter_context(self._listener.expect(blocks_token))
            process = self._starter.start(index, [[*arguments, "--token", token] for token in tokens])
            undo.callback(process.wait_or_kill, None)
            undo.callback(process.kill)
            for expected in expected_channels:
                channels.append(self._await(index, expected, process, timeout_s, cancellation))
                undo.callback(channels[-1].close)
            if transfers_blocks:
                blocks = self._await(index, expected_blocks, process, timeout_s, cancellation)
                undo.callback(blocks.close)
            machine = _peer_of(index, channels[0])
            link = join_channels(channels)
            undo.pop_all()
        for channel in channels:
            channel.max_frame_bytes = settings.buffer_bytes + MAX_FRAME_BYTES
            channel.send_timeout_s = settings.step_timeout_s
        return StartedAgent(process, link, InlineArrays(settings.num_buffers), settings, machine, blocks)

    def close(self) -> None:
        self._listener.close()
        self._starter.close()

    def _await(
        self,
        index: int,
        expected: SimpleQueue[AgentChannel],
        process: AgentProcess,
        timeout_s: float | None,
        cancellation: StartCancellation,
    ) -> AgentChannel:
        limit_s = self._connect_timeout_s if timeout_s is None else min(timeout_s, self._connect_timeout_s)
        deadline = self._clock() + limit_s
        while True:
            with contextlib.suppress(Empty):
                return expected.get(timeout=POLL_INTERVAL_S)
            if process.has_exited:
                raise WorkerDiedError(f"WorkAgent {index} exited ({process.exit_description}) before it was ready")
            if cancellation.is_cancelled:
                raise WorkerDiedError(f"the start of WorkAgent {index} was cancelled")
            if self._clock() > deadline:
                why = "it has not connected to the cluster's port"
                raise WorkerDiedError(f"WorkAgent {index} was not ready within {limit_s:g} s: {why}")


def _peer_of(index: int, channel: AgentChannel) -> str:
    try:
        return channel.peer
    except OSError as error:
        raise WorkerDiedError(f"WorkAgent {index} exited before it was ready: {error}") from error


@contextmanager
def open_placement(config: ServingConfig) -> Iterator[Placement]:
    """Yield the configured placement, or raise ConfigError. Its WorkAgents must exit before the context ends."""
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
    if config.cluster.secret_file is not None:
        yield config.cluster.secret_file
        return
    with tempfile.TemporaryDirectory(prefix="llm-serving-") as folder:  # its mode is 0700
        path = Path(folder) / "secret"
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
        yield path
