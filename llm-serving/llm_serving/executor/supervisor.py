"""Has a WorkAgent started, hands it the model, ends it.

An executor whose WorkAgent is started again when it dies.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.core.fingerprint import code_fingerprint
from llm_serving.core.step import AllowedTokens, Continuation, StepInput, StepOutput
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
from llm_serving.executor.placement import Placement, ThisMachine
from llm_serving.executor.restart_status import Away, GivenUp
from llm_serving.executor.worker_process import AgentLink, AgentProcess
from llm_serving.log import get_logger
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
"""One step computed, one ahead."""

_EXIT_TIMEOUT_S = 5.0
THIS_MACHINE: Final = ThisMachine()


@dataclass(slots=True)
class WorkAgentProcess:
    """A WorkAgent that has loaded its model."""

    index: int
    process: AgentProcess
    channel: AgentLink
    buffers: SharedBuffers | InlineArrays
    loaded: Loaded
    machine: str = ""
    """Address of the one it runs on; empty: the master's own."""
    block_link: BlockLink | None = None
    """By which blocks are handed over; None: through memory, or not at all."""
    _closed: bool = False

    def stop(self) -> None:
        """Asks the WorkAgent to end, insists after a few seconds, and gives its memory back."""
        if not self._closed:
            with contextlib.suppress(ChannelClosedError):
                self.channel.send(Shutdown())
            self.process.end(_EXIT_TIMEOUT_S)
            self._close()

    def kill(self) -> None:
        """Ends the WorkAgent at once, whatever it does, and gives its memory back."""
        if not self._closed:
            _end_at_once(self.process)
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
    like: Loaded | None = None,
    timeout_s: float | None = None,
    given_up: GivenUp | None = None,
    placement: Placement = THIS_MACHINE,
) -> WorkAgentProcess:
    """Starts WorkAgent `index` and returns when its model is loaded.

    Args:
        config: The configuration.
        index: Of the WorkAgent.
        on_progress: Is told what it does; what this raises ends the WorkAgent.
        like: What a WorkAgent before it had loaded: the new one gets as many blocks.
        timeout_s: Seconds it may take; beside `load_timeout_s`, for which it may say nothing.
        given_up: Ends it before it is ready.
        placement: Where it runs.

    Raises:
        ModelError: The model cannot be loaded.
        WorkerDiedError: The process ended before it was ready, was not ready in time, or could not be started: no
            file descriptors are left, no memory, no processes.
    """
    settings = load_settings(config, index)
    if like is not None:
        settings = msgspec.structs.replace(settings, num_blocks=like.num_blocks, num_swap_blocks=like.num_swap_blocks)
    settings = placement.settings(settings)
    started = placement.start(index, settings, config.serving.log_level, timeout_s, given_up)
    process, channel, buffers, machine, blocks = started
    with contextlib.ExitStack() as undo:
        undo.callback(buffers.close)
        undo.callback(channel.close)
        if blocks is not None:
            undo.callback(blocks.close)
        undo.callback(_end_at_once, process)
        try:
            with contextlib.nullcontext() if given_up is None else given_up.breaks_off(process.kill):
                loaded = _load(index, channel, settings, on_progress, timeout_s, config.serving.load_timeout_s)
            if given_up is not None and given_up.is_set:  # when it had said already that it is ready
                raise WorkerDiedError(f"WorkAgent {index} is not wanted any more")
        except ChannelClosedError as error:
            _end_at_once(process)
            raise WorkerDiedError(f"WorkAgent {index} ended ({process.described_end}) before it was ready") from error
        undo.pop_all()
    link = None
    if blocks is not None:
        assert isinstance(channel, Channel)  # it comes by the network, as that of blocks does
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
    """Makes sure that the WorkAgent is of this version, which an upgrade while the master lives may change."""
    deadline = math.inf if timeout_s is None else monotonic() + timeout_s

    def receive() -> AgentMessage:
        left_s = deadline - monotonic()
        try:
            return channel.receive(min(left_s, silence_s))
        except DeadlineExceededError as error:
            if left_s <= silence_s:
                raise WorkerDiedError(f"WorkAgent {index} was not ready within {timeout_s:g} s") from error
            rule = f"told of no progress for {silence_s:g} s while it loaded (serving_config.load_timeout_s)"
            raise WorkerDiedError(f"WorkAgent {index} {rule}") from error

    channel.send(Hello(PROTOCOL_VERSION))
    welcome = receive()
    if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
        raise ProtocolError(f"WorkAgent {index} does not speak version {PROTOCOL_VERSION} of the protocol")
    if welcome.image != code_fingerprint():
        raise ProtocolError(
            f"WorkAgent {index} runs other code (image {welcome.image[:12]}) than the master (image "
            f"{code_fingerprint()[:12]}): install the same version on every machine, or start the server again"
        )
    channel.send(settings)
    while isinstance(answer := receive(), Progress):
        on_progress(f"WorkAgent {index}: {answer.text}")
    if isinstance(answer, Failed):
        raise ModelError(answer.error)
    if not isinstance(answer, Loaded):
        raise ProtocolError(f"WorkAgent {index} answered {type(answer).__name__} to LoadModel")
    return answer


def load_settings(config: ServingConfig, index: int) -> LoadModel:
    """What WorkAgent `index` is told to load."""
    max_model_len = config.model.max_generate_length
    max_tokens, max_rows = config.scheduler.max_prefill_tokens, config.model.decode_batch_size
    num_threads = config.device.num_threads
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_processes)
    return LoadModel(
        model_path=str(config.model.model_path),
        mindir_path=_text(config.model.mindir_path),
        mindir_ini=_text(config.model.mindir_ini),
        dtype=config.model.model_dtype,
        quantization=config.quant.quantization,
        group_size=config.quant.group_size,
        kv_cache_dtype=config.quant.kv_cache_dtype,
        implementation=config.model.implementation,
        kernels=config.device.kernels,
        exactness=config.device.exactness,
        block_size=config.pa.block_size,
        num_blocks=config.pa.num_blocks,
        num_swap_blocks=config.pa.num_swap_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_rows,
        device_target=config.device.device_target,
        device_id=config.serving.start_device_id + index * config.cluster.tensor_parallel,
        num_agents=config.num_processes,
        num_threads=num_threads,
        max_device_memory=config.device.max_device_memory,
        enable_graph_kernel=config.device.enable_graph_kernel,
        graph_kernel_flags=config.device.graph_kernel_flags,
        save_graphs=config.device.save_graphs,
        save_graphs_path=str(config.device.save_graphs_path),
        jit_level=config.device.jit_level,
        num_buffers=NUM_BUFFERS,
        buffer_bytes=max_step_bytes(
            max_tokens, max_rows, max_model_len, config.pa.block_size, _max_draft_tokens(config)
        ),
        step_timeout_s=config.serving.step_timeout_s,
        num_transfer_blocks=config.num_replicas * config.num_transfer_blocks,
        num_ranks=config.cluster.tensor_parallel,
        draft_model_path=_text(config.scheduler.draft_model_path),
    )


def _max_draft_tokens(config: ServingConfig) -> int:
    """Return the maximum number of draft tokens in a step."""
    scheduler = config.scheduler
    if scheduler.speculative_method == "none":
        return 0
    return min(scheduler.max_prefill_tokens, config.model.decode_batch_size * scheduler.num_speculative_tokens)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _end_at_once(process: AgentProcess) -> None:
    process.kill()
    process.end(None)


logger = get_logger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 5.0
LEAST_PATIENCE_S: Final = 20.0
"""Seconds that a WorkAgent may take to load again at the first attempt, however quick the first one was."""
PATIENCE: Final = 3.0
"""Times as long as the first one."""

StartAgent = Callable[[Loaded | None, float | None], WorkAgentProcess]
"""Starts a WorkAgent that is ready; given what the one before it had loaded, the new one loads as much. The second
argument is how many seconds it may take."""


def restart_delay_s(attempt: int) -> float:
    """Seconds to wait before attempt 0, 1, ... in a row: at once, then doubling up to a limit."""
    return 0.0 if attempt == 0 else min(FIRST_DELAY_S * 2.0 ** min(attempt - 1, 60), LONGEST_DELAY_S)


def patience_s(load_s: float, num_failed: int) -> float:
    """Seconds that an attempt may take after so many that failed, where the first WorkAgent took `load_s`.

    One that hangs while it loads is soon replaced; on a machine that has become slow each attempt gets twice the time
    of the one before, so that one of them is enough.
    """
    return max(LEAST_PATIENCE_S, PATIENCE * load_s) * 2.0 ** min(num_failed, 60)


class SupervisedExecutor:
    """Steps go to the WorkAgent of the moment; another one follows it for as long as somebody asks for it.

    Args:
        start: Starts a WorkAgent.
        step_timeout_s: Seconds a WorkAgent may take for a step.
        max_restarts: In a row, without a step in between: a first WorkAgent that ends before it is ready is given up
            after so many, and later ones are told to be away for good (`Away.used_up`).
        clock: Of the engine.
        given_up: Set by `give_up`; for `start`, which is to break off then.
        pause: Waits for so many seconds, or less if there shall be no restart any more: then it returns True. None:
            it waits for `give_up`.
    """

    def __init__(
        self,
        start: StartAgent,
        step_timeout_s: float,
        max_restarts: int,
        clock: Clock = monotonic,
        pause: Callable[[float], bool] | None = None,
        given_up: GivenUp | None = None,
    ) -> None:
        """Starts the first WorkAgent.

        Raises:
            ConfigError: It cannot load the model.
            WorkerDiedError: It ended before it was ready, and so did those that followed.
        """
        self._start = start
        self._step_timeout_s = step_timeout_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._given_up = GivenUp() if given_up is None else given_up
        self._pause = self._given_up.wait if pause is None else pause
        self._num_restarts = 0
        """In a row."""
        self.away: Away | None = None
        """While it is being started again."""
        self._use(self._first_agent())
        self.loaded = self._agent.loaded

    @property
    def max_steps_in_flight(self) -> int:
        return self._executor.max_steps_in_flight

    @property
    def used_up(self) -> bool:
        return self._num_restarts > self._max_restarts

    @property
    def num_compilations(self) -> int:
        """Graphs the WorkAgent of the moment had compiled by its latest step."""
        return self._executor.num_compilations

    @property
    def machine(self) -> str:
        """Address of the one on which the WorkAgent of the moment runs, or ran; empty: the master's own."""
        return self._agent.machine

    @property
    def block_link(self) -> BlockLink | None:
        """By which blocks of the WorkAgent of the moment come and go; closed when it is gone."""
        return self._agent.block_link

    @property
    def next_step(self) -> int:
        return self._executor.next_step

    def submit(self, step: StepInput, announce_ending: bool = False) -> None:
        self._executor.submit(step, announce_ending)

    @property
    def awaits_allowed(self) -> bool:
        return self._executor.awaits_allowed

    def allow(self, allowed: AllowedTokens) -> None:
        self._executor.allow(allowed)

    def await_ending(self) -> None:
        self._executor.await_ending()

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        self._num_restarts = 0
        return output

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        return self._executor.propose(continuations)

    def fileno(self) -> int | None:
        return self._executor.fileno()

    def restart(self, reason: str) -> None:
        self._agent.kill()
        now, away = self._clock(), self.away
        delay_s = restart_delay_s(self._num_restarts)
        self._num_restarts += 1
        self.away = Away(
            reason=reason,
            since=now if away is None else away.since,
            begins=now + delay_s,
            load_s=self._load_s,
            num_failed=0 if away is None else away.num_failed + 1,
            num_restarts=self._num_restarts,
            max_restarts=self._max_restarts,
        )
        logger.warning("starting the WorkAgent again in %g s: %s", delay_s, reason)
        if self._pause(delay_s):
            raise WorkerDiedError(reason)
        try:
            self._use(self._start(self.loaded, patience_s(self._load_s, self.away.num_failed)))
        except (LLMServingError, OSError) as error:
            if self._given_up.is_set:
                raise WorkerDiedError(reason) from error
            raise RestartFailedError(str(error)) from error
        self.away = None

    def give_up(self) -> None:
        """There shall be no restart any more, and none that is under way; from any thread."""
        self._given_up.set()

    def close(self) -> None:
        """Ends the WorkAgent."""
        self._agent.stop()

    def _use(self, agent: WorkAgentProcess) -> None:
        self._agent = agent
        self._executor = RemoteExecutor(agent.channel, agent.buffers, self._step_timeout_s, self._clock)

    def _first_agent(self) -> WorkAgentProcess:
        """One that is killed while it loads is replaced like any other; one that says why it cannot load is not."""
        while True:
            began = self._clock()
            try:
                agent = self._start(None, None)
            except WorkerDiedError as error:
                if self._num_restarts >= self._max_restarts:
                    raise
                delay_s = restart_delay_s(self._num_restarts)
                self._num_restarts += 1
                logger.warning("starting the WorkAgent again in %g s: %s", delay_s, error)
                if self._pause(delay_s):
                    raise
            else:
                self._load_s = self._clock() - began
                return agent
