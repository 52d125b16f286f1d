"""Has a WorkAgent started, hands it the model, ends it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.core.clock import monotonic
from llm_serving.core.image import package_image
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ModelError,
    ProtocolError,
    WorkerDiedError,
)
from llm_serving.executor.agent_process import AgentLink, AgentProcess
from llm_serving.executor.block_link import BlockLink
from llm_serving.executor.given_up import GivenUp
from llm_serving.executor.placement import Placement, ThisMachine
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import max_step_bytes
from llm_serving.transport.inline_arrays import InlineArrays
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
from llm_serving.transport.shared_arrays import SharedBuffers

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
    if welcome.image != package_image():
        raise ProtocolError(
            f"WorkAgent {index} runs other code (image {welcome.image[:12]}) than the master (image "
            f"{package_image()[:12]}): install the same version on every machine, or start the server again"
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
        buffer_bytes=max_step_bytes(max_tokens, max_rows, max_model_len, config.pa.block_size, _max_guesses(config)),
        step_timeout_s=config.serving.step_timeout_s,
        num_transfer_blocks=config.num_replicas * config.num_transfer_blocks,
        num_ranks=config.cluster.tensor_parallel,
        draft_model_path=_text(config.scheduler.draft_model_path),
    )


def _max_guesses(config: ServingConfig) -> int:
    """Of a step."""
    scheduler = config.scheduler
    if scheduler.speculative_method == "none":
        return 0
    return min(scheduler.max_prefill_tokens, config.model.decode_batch_size * scheduler.num_speculative_tokens)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _end_at_once(process: AgentProcess) -> None:
    process.kill()
    process.end(None)
