"""WorkAgents on the machines of a cluster; they connect to the master."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.executor.cluster.listener import Arrival, Listener
from llm_serving.executor.placement import Started
from llm_serving.executor.restart_status import GivenUp
from llm_serving.executor.tensor_parallel import one_link
from llm_serving.executor.worker_process import AgentChannel, AgentProcess
from llm_serving.transport.channel import MAX_FRAME_BYTES
from llm_serving.transport.messages import LoadModel
from llm_serving.transport.shared_memory import InlineArrays
from llm_serving.transport.tls_identity import ClusterIdentity

COME_S: Final = 300.0
"""In which a WorkAgent has to come, however long it takes to load after that."""
COME_WITH_WEIGHTS_S: Final = 3600.0
"""The same where the weights have to come first: whether they do, Ray says."""
LOOK_EVERY_S: Final = 0.2
"""While a WorkAgent is waited for, it is looked whether it lives and is still wanted."""


class Starter(Protocol):
    """Runs programs somewhere in the cluster, and knows what becomes of them."""

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> AgentProcess:
        """Begins to run `python -m llm_serving.work_agent ARGUMENTS`, for each rank of WorkAgent `index`, on the
        machine where it belongs.

        Raises:
            WorkerDiedError: It cannot.
        """

    def close(self) -> None:
        """Gives up what it took."""


class ClusterPlacement:
    """Each WorkAgent has a connection for steps, as each of its ranks has where it is several, and one for blocks where
    they move. They live and end with it: what comes by them is of this start, no other.

    Args:
        host: Address of this machine that the others connect to.
        identity: Of the cluster.
        starter: Runs the processes.
        num_threads: Of the kernels of each rank; None: as this machine would have.
        own_devices: Whether a WorkAgent sees those it was given, one for each rank, as its only ones.
        come_s: In which a WorkAgent has to come.
    """

    def __init__(
        self,
        host: str,
        identity: ClusterIdentity,
        starter: Starter,
        num_threads: int | None = None,
        own_devices: bool = False,
        come_s: float = COME_S,
        clock: Clock = monotonic,
    ) -> None:
        """Raises ConfigError: the address cannot be listened at."""
        try:
            self._listener = Listener(host, identity)
        except OSError as error:
            rule = f"cluster_config.master_host must be an address of this machine: {error.strerror or error}"
            raise ConfigError(f"{rule}. Given: {host}") from None
        if ipaddress.ip_address(self._listener.address[0]).is_unspecified:
            self._listener.close()
            raise ConfigError(f"cluster_config.master_host must be one that others connect to. Given: {host}")
        self._starter = starter
        self._num_threads = num_threads
        self._own_devices = own_devices
        self._come_s = come_s
        self._clock = clock

    def settings(self, settings: LoadModel) -> LoadModel:
        device_id = 0 if self._own_devices else settings.device_id
        return msgspec.structs.replace(
            settings, device_id=device_id, num_threads=self._num_threads or settings.num_threads
        )

    def start(
        self, index: int, settings: LoadModel, log_level: str, timeout_s: float | None, given_up: GivenUp | None
    ) -> Started:
        tokens, blocks_token = [secrets.token_hex(16) for _ in range(settings.num_ranks)], secrets.token_hex(16)
        host, port = self._listener.address
        arguments = ["--index", str(index), "--log-level", log_level, "--connect", f"{host}:{port}"]
        moves = settings.num_transfer_blocks > 0
        if moves:
            arguments += ["--blocks-token", blocks_token]
        channels, blocks = list[AgentChannel](), None
        with contextlib.ExitStack() as expected, contextlib.ExitStack() as undo:
            arrivals = [expected.enter_context(self._listener.expecting(token)) for token in tokens]
            of_blocks = expected.enter_context(self._listener.expecting(blocks_token))
            process = self._starter.start(index, [[*arguments, "--token", token] for token in tokens])
            undo.callback(process.end, None)
            undo.callback(process.kill)
            for arrival in arrivals:
                channels.append(self._await(index, arrival, process, timeout_s, given_up))
                undo.callback(channels[-1].close)
            if moves:
                blocks = self._await(index, of_blocks, process, timeout_s, given_up)
                undo.callback(blocks.close)
            machine = _peer_of(index, channels[0])
            link = one_link(channels)
            undo.pop_all()
        for channel in channels:
            channel.max_frame_bytes = settings.buffer_bytes + MAX_FRAME_BYTES
            channel.send_timeout_s = settings.step_timeout_s
        return Started(process, link, InlineArrays(settings.num_buffers), machine, blocks)

    def close(self) -> None:
        self._listener.close()
        self._starter.close()

    def _await(
        self, index: int, arrival: Arrival, process: AgentProcess, timeout_s: float | None, given_up: GivenUp | None
    ) -> AgentChannel:
        patience_s = self._come_s if timeout_s is None else min(timeout_s, self._come_s)
        deadline = self._clock() + patience_s
        while (channel := arrival.wait(LOOK_EVERY_S)) is None:
            if process.has_ended:
                raise WorkerDiedError(f"WorkAgent {index} ended ({process.described_end}) before it was ready")
            if given_up is not None and given_up.is_set:
                raise WorkerDiedError(f"WorkAgent {index} is not wanted any more")
            if self._clock() > deadline:
                raise WorkerDiedError(
                    f"WorkAgent {index} was not ready within {patience_s:g} s: it has not come to the cluster's port"
                )
        return channel


def _peer_of(index: int, channel: AgentChannel) -> str:
    """Raises WorkerDiedError: it has gone again."""
    try:
        return channel.peer
    except OSError as error:
        raise WorkerDiedError(f"WorkAgent {index} ended before it was ready: {error}") from error
