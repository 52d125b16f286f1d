"""Starts WorkAgents, makes them load the model, and replaces a WorkAgent that exits."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.enums import SpeculativeMethodName
from llm_serving.core.fingerprint import ComputeFingerprint, code_fingerprint
from llm_serving.core.process import resident_bytes
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    LLMServingError,
    ModelError,
    ProtocolError,
    WorkerDiedError,
)
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.executor import RemoteExecutor, RestartFailedError
from llm_serving.executor.placement import LocalPlacement, Placement
from llm_serving.executor.tensor_parallel import AgentLink
from llm_serving.executor.worker_process import AgentProcess, RestartStatus, StartCancellation
from llm_serving.log import get_logger
from llm_serving.network.caches import MAX_GROUPS
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import max_step_bytes
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    AgentMessage,
    Failed,
    Hello,
    Loaded,
    LoadModel,
    Progress,
    Shutdown,
    Welcome,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers

NUM_BUFFERS = 2
"""Buffers for the arrays of steps: one for the step that runs, one for the next."""

_EXIT_TIMEOUT_S = 5.0
FIRST_DELAY_S: Final = 0.1
MAX_DELAY_S: Final = 5.0
MIN_RESTART_TIMEOUT_S: Final = 20.0
RESTART_TIMEOUT_FACTOR: Final = 3.0
"""Time limit of the first restart attempt, as a multiple of the duration of the first start."""
LOCAL_PLACEMENT: Final = LocalPlacement()

logger = get_logger(__name__)


@dataclass(slots=True)
class WorkAgentProcess:
    index: int
    process: AgentProcess
    channel: AgentLink
    buffers: SharedBuffers | InlineArrays
    loaded: Loaded
    machine: str = ""
    block_link: BlockLink | None = None
    _closed: bool = False

    def stop(self) -> None:
        """Ask the WorkAgent to exit, kill it after `_EXIT_TIMEOUT_S`, and free its memory."""
        if not self._closed:
            with contextlib.suppress(ChannelClosedError):
                self.channel.send(Shutdown())
            self.process.wait_or_kill(_EXIT_TIMEOUT_S)
            self._close()

    def kill(self) -> None:
        if not self._closed:
            _kill_and_wait(self.process)
            self._close()

    def _close(self) -> None:
        self._closed = True
        if self.block_link is not None:
            self.block_link.close()
        self.channel.close()
        self.buffers.close()


def start_work_agent(
    config: ServingConfig,
    index: int,
    on_progress: Callable[[str], None],
    previous: Loaded | None = None,
    timeout_s: float | None = None,
    cancellation: StartCancellation | None = None,
    placement: Placement = LOCAL_PLACEMENT,
) -> WorkAgentProcess:
    """Start WorkAgent `index` and wait until its model is loaded.

    `previous`: what the replaced WorkAgent had loaded, if any; the new one gets as many KV blocks. `timeout_s` limits
    the whole start, `load_timeout_s` the time between two messages. Kill the WorkAgent if `on_progress` raises an
    exception or the start is cancelled. Raise ModelError if the model cannot be loaded, WorkerDiedError if the
    WorkAgent exited, exceeded a limit or was cancelled.
    """
    settings = load_settings(config, index)
    if previous is not None:
        settings = settings.with_blocks(previous.num_blocks, previous.num_swap_blocks)
    cancellation = cancellation or StartCancellation()
    started = placement.start(index, settings, config.serving.log_level, timeout_s, cancellation)
    process, channel, buffers, settings, machine, blocks = started
    with contextlib.ExitStack() as undo:
        undo.callback(buffers.close)
        undo.callback(channel.close)
        if blocks is not None:
            undo.callback(blocks.close)
        undo.callback(_kill_and_wait, process)
        try:
            with cancellation.on_cancel(process.kill):
                loaded = _load(index, channel, settings, on_progress, timeout_s, config.serving.load_timeout_s)
            if cancellation.is_cancelled:  # cancelled after `Loaded` arrived
                raise WorkerDiedError(f"the start of WorkAgent {index} was cancelled")
        except ChannelClosedError as error:
            _kill_and_wait(process)
            why = process.exit_description
            raise WorkerDiedError(f"WorkAgent {index} exited ({why}) before it was ready") from error
        undo.pop_all()
    link = None
    if blocks is not None:
        assert isinstance(channel, Channel)  # several ranks have no block channel
        link = BlockLink(blocks, loaded.block_bytes, settings.step_timeout_s, channel)
    return WorkAgentProcess(index, process, channel, buffers, loaded, machine, link)


def _load(
    index: int,
    channel: AgentLink,
    settings: LoadModel,
    on_progress: Callable[[str], None],
    timeout_s: float | None,
    silence_s: float,
) -> Loaded:
    """Check that the WorkAgent runs the master's code (an upgrade may replace files), then let it load the model."""
    deadline = math.inf if timeout_s is None else monotonic() + timeout_s

    def receive() -> AgentMessage:
        left_s = deadline - monotonic()
        try:
            return channel.receive(min(left_s, silence_s))
        except DeadlineExceededError as error:
            if left_s <= silence_s:
                raise WorkerDiedError(f"WorkAgent {index} was not ready within {timeout_s:g} s") from error
            rule = f"reported no progress for {silence_s:g} s while it loaded (serving_config.load_timeout_s)"
            raise WorkerDiedError(f"WorkAgent {index} {rule}") from error

    channel.send(Hello(PROTOCOL_VERSION))
    welcome = receive()
    if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
        raise ProtocolError(f"WorkAgent {index} does not support version {PROTOCOL_VERSION} of the protocol")
    if welcome.code_fingerprint != code_fingerprint():
        raise ProtocolError(
            f"WorkAgent {index} runs different code (fingerprint {welcome.code_fingerprint[:12]}) than the master "
            f"(fingerprint {code_fingerprint()[:12]}): install the same version on every machine, or restart the server"
        )
    channel.send(settings)
    while isinstance(answer := receive(), Progress):
        on_progress(f"WorkAgent {index}: {answer.text}")
    if isinstance(answer, Failed):
        raise ModelError(answer.error)
    if not isinstance(answer, Loaded):
        raise ProtocolError(f"WorkAgent {index} must answer LoadModel with Loaded. Received: {type(answer).__name__}")
    return answer


def load_settings(config: ServingConfig, index: int) -> LoadModel:
    max_tokens, num_threads = config.scheduler.max_prefill_tokens, config.device.num_threads
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_processes)
    return LoadModel(
        model=config.model,
        pa=replace(config.pa, disk_cache_path=(folder := config.pa.disk_cache_path) and folder.absolute()),
        device=replace(config.device, num_threads=num_threads),
        quant=config.quant,
        lora=config.lora,
        max_num_batched_tokens=max_tokens,
        device_id=config.serving.start_device_id + index * config.cluster.tensor_parallel,
        num_agents=config.num_processes,
        num_buffers=NUM_BUFFERS,
        buffer_bytes=max_step_bytes(
            max_tokens,
            config.model.decode_batch_size,
            config.model.max_generate_length,
            config.pa.block_size,
            _max_draft_tokens(config),
            MAX_GROUPS if config.groups_layers else 1,
        ),
        step_timeout_s=config.serving.step_timeout_s,
        draft_model_path=config.scheduler.draft_model_path,
        uses_mtp=config.scheduler.speculative_method == SpeculativeMethodName.MTP,
        num_transfer_blocks=config.num_replicas * config.num_transfer_blocks,
        num_ranks=config.cluster.tensor_parallel,
        rank_table=config.cluster.rank_table_file,
        memory_share=config.memory_share,
        log_name="" if config.origin is None else config.origin.row or "",
        groups_layers=config.groups_layers,
    )


def _max_draft_tokens(config: ServingConfig) -> int:
    scheduler = config.scheduler
    if scheduler.speculative_method == "none":
        return 0
    return min(scheduler.max_prefill_tokens, config.model.decode_batch_size * scheduler.num_speculative_tokens)


def _kill_and_wait(process: AgentProcess) -> None:
    process.kill()
    process.wait_or_kill(None)


StartFunction = Callable[[Loaded | None, float | None], WorkAgentProcess]
"""(what the replaced WorkAgent had loaded, timeout in seconds) -> a WorkAgent that is ready."""


class ConsistencyCheck:
    """Checks that all WorkAgents have the same `ComputeFingerprint`, so that answers are bit-identical. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reference: tuple[int, ComputeFingerprint] | None = None

    def check(self, agent: WorkAgentProcess) -> WorkAgentProcess:
        """Return the WorkAgent. If its fingerprint differs from the first one's, kill it and raise WorkerDiedError."""
        with self._lock:
            if self._reference is None:
                self._reference = agent.index, agent.loaded.compute_fingerprint
            first, expected = self._reference
        found = agent.loaded.compute_fingerprint
        if found == expected:
            return agent
        agent.kill()
        names = ", ".join(
            f"{name} is {ours}, not {theirs}"
            for name in ComputeFingerprint.__struct_fields__
            if (ours := getattr(found, name)) != (theirs := getattr(expected, name))
        )
        raise WorkerDiedError(
            f"WorkAgent {agent.index} would compute different answers than WorkAgent {first}: {names}"
        )


def restart_delay_s(attempt: int) -> float:
    """Return the seconds to wait before an attempt, numbered from 0: first 0 s, then doubling up to `MAX_DELAY_S`."""
    return 0.0 if attempt == 0 else min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 60), MAX_DELAY_S)


def restart_timeout_s(load_s: float, num_failed: int) -> float:
    """Return the maximum seconds of a restart attempt after `num_failed` failures.

    The limit is short at first, because a WorkAgent may hang while it loads. Each failure doubles it, because the
    machine may have become slow. `load_s`: seconds of the first start.
    """
    return max(MIN_RESTART_TIMEOUT_S, RESTART_TIMEOUT_FACTOR * load_s) * 2.0 ** min(num_failed, 60)


class SupervisedExecutor(RemoteExecutor):
    """Runs steps on a WorkAgent. When it exits, `restart` replaces it.

    The constructor starts a first WorkAgent. If this exits before it is ready, the constructor tries again, at most
    `max_restarts` times. It raises WorkerDiedError if each attempt exits, ConfigError if the model cannot be loaded.
    `restart` has no such limit, but `restarts_exhausted` is True after more than `max_restarts` restarts without a
    completed step. `pause(seconds)` waits before a restart, and returns True if restarts were cancelled meanwhile.
    """

    def __init__(
        self,
        start: StartFunction,
        step_timeout_s: float,
        max_restarts: int,
        clock: Clock = monotonic,
        pause: Callable[[float], bool] | None = None,
        cancellation: StartCancellation | None = None,
        *,
        index: int = 0,
    ) -> None:
        self._start = start
        self._index = index
        self._step_timeout_s = step_timeout_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._cancellation = StartCancellation() if cancellation is None else cancellation
        self._pause = self._cancellation.wait if pause is None else pause
        self._adapters: dict[int, str] = {}
        self._connect(self._start_first())
        self.loaded = self._agent.loaded

    @property
    def restarts_exhausted(self) -> bool:
        return self.num_restarts > self._max_restarts

    @property
    def machine(self) -> str:
        return self._agent.machine

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self._agent.process.pids)

    @property
    def block_link(self) -> BlockLink | None:
        return self._agent.block_link

    def restart(self, reason: str) -> None:
        self._agent.kill()
        now, before = self._clock(), self.restart_status
        delay_s = restart_delay_s(self.num_restarts)
        self.num_restarts += 1
        self.restart_status = RestartStatus(
            reason=reason,
            lost_at=now if before is None else before.lost_at,
            attempt_at=now + delay_s,
            load_s=self._load_s,
            num_failed=0 if before is None else before.num_failed + 1,
            num_restarts=self.num_restarts,
            max_restarts=self._max_restarts,
        )
        logger.warning("restarting WorkAgent %d in %g s: %s", self._index, delay_s, reason)
        if self._pause(delay_s):
            raise WorkerDiedError(reason)
        try:
            self._connect(self._start(self.loaded, restart_timeout_s(self._load_s, self.restart_status.num_failed)))
        except (LLMServingError, OSError) as error:
            if self._cancellation.is_cancelled:
                raise WorkerDiedError(reason) from error
            raise RestartFailedError(str(error)) from error
        self.restart_status = None

    def set_adapter(self, number: int, folder: str) -> None:
        if folder:
            self._adapters[number] = folder
        else:
            self._adapters.pop(number, None)
        super().set_adapter(number, folder)

    def cancel_restarts(self) -> None:
        self._cancellation.cancel()

    def close(self) -> None:
        self._agent.stop()

    def _connect(self, agent: WorkAgentProcess) -> None:
        self._agent = agent
        super().__init__(agent.channel, agent.buffers, self._step_timeout_s, self._clock)
        for number, folder in self._adapters.items():
            super().set_adapter(number, folder)

    def _start_first(self) -> WorkAgentProcess:
        """Start the first WorkAgent. Retry if it exits while it loads, but not if it reports why it cannot load."""
        while True:
            began = self._clock()
            try:
                agent = self._start(None, None)
            except WorkerDiedError as error:
                if self.num_restarts >= self._max_restarts or self._cancellation.is_cancelled:
                    raise
                delay_s = restart_delay_s(self.num_restarts)
                self.num_restarts += 1
                logger.warning("trying again to start WorkAgent %d in %g s: %s", self._index, delay_s, error)
                if self._pause(delay_s):
                    raise
            else:
                self._load_s = self._clock() - began
                return agent
