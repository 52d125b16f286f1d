"""Starts a WorkAgent process, hands it the model, ends it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from llm_serving.config.schema import ServingConfig
from llm_serving.core.clock import monotonic
from llm_serving.errors import (
    ChannelClosedError,
    DeadlineExceededError,
    ModelError,
    ProtocolError,
    WorkerDiedError,
)
from llm_serving.executor.given_up import GivenUp
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
from llm_serving.transport.shared_arrays import SharedBuffers

logger = get_logger(__name__)

NUM_BUFFERS = 2
"""One step computed, one ahead."""

_EXIT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class WorkAgentProcess:
    """A WorkAgent that has loaded its model.

    The process has three ties to the master, all inherited and none with a name that others could find: one end of a
    pair of sockets (steps), the memory file (their arrays) and its standard input, a pipe whose end tells it that the
    master is gone, however the master ended.
    """

    index: int
    process: subprocess.Popen[bytes]
    channel: Channel[AgentMessage]
    buffers: SharedBuffers
    loaded: Loaded
    _closed: bool = False

    def stop(self) -> None:
        """Asks the WorkAgent to end, insists after a few seconds, and gives its memory back."""
        if not self._closed:
            with contextlib.suppress(ChannelClosedError):
                self.channel.send(Shutdown())
            _end(self.process, _EXIT_TIMEOUT_S)
            self._close()

    def kill(self) -> None:
        """Ends the WorkAgent at once, whatever it does, and gives its memory back."""
        if not self._closed:
            _end_at_once(self.process)
            self._close()

    def _close(self) -> None:
        self._closed = True
        self.channel.close()
        self.buffers.close()
        os.close(self.buffers.fd)


def start_work_agent(
    config: ServingConfig,
    index: int,
    on_progress: Callable[[str], None],
    like: Loaded | None = None,
    timeout_s: float | None = None,
    given_up: GivenUp | None = None,
) -> WorkAgentProcess:
    """Starts WorkAgent `index` and returns when its model is loaded.

    Args:
        config: The configuration.
        index: Of the WorkAgent.
        on_progress: Is told what it does; what this raises ends the WorkAgent.
        like: What a WorkAgent before it had loaded: the new one gets as many blocks.
        timeout_s: Seconds it may take.
        given_up: Ends it before it is ready.

    Raises:
        ModelError: The model cannot be loaded.
        WorkerDiedError: The process ended before it was ready, was not ready in time, or could not be started: no
            file descriptors are left, no memory, no processes.
    """
    settings = load_settings(config, index)
    if like is not None:
        settings = msgspec.structs.replace(settings, num_blocks=like.num_blocks, num_swap_blocks=like.num_swap_blocks)
    with contextlib.ExitStack() as undo:
        try:
            buffers = SharedBuffers.create(settings.num_buffers, settings.buffer_bytes)
            undo.callback(os.close, buffers.fd)
            undo.callback(buffers.close)
            ours, theirs = socket.socketpair()
            with theirs:
                channel: Channel[AgentMessage] = Channel(ours, AgentMessage)  # type: ignore[arg-type]
                undo.callback(channel.close)
                process = _spawn(index, theirs.fileno(), buffers.fd, config.serving.log_level)
        except OSError as error:
            raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
        undo.callback(_end_at_once, process)
        try:
            with contextlib.nullcontext() if given_up is None else given_up.breaks_off(process.kill):
                loaded = _load(index, channel, settings, on_progress, timeout_s)
            if given_up is not None and given_up.is_set:  # when it had said already that it is ready
                raise WorkerDiedError(f"WorkAgent {index} is not wanted any more")
        except DeadlineExceededError as error:
            raise WorkerDiedError(f"WorkAgent {index} was not ready within {timeout_s:g} s") from error
        except ChannelClosedError as error:
            _end_at_once(process)
            raise WorkerDiedError(f"WorkAgent {index} ended (code {process.returncode}) before it was ready") from error
        undo.pop_all()
    return WorkAgentProcess(index, process, channel, buffers, loaded)


def _load(
    index: int,
    channel: Channel[AgentMessage],
    settings: LoadModel,
    on_progress: Callable[[str], None],
    timeout_s: float | None,
) -> Loaded:
    """Makes sure that the WorkAgent is of this version, which an upgrade while the master lives may change."""
    deadline = None if timeout_s is None else monotonic() + timeout_s

    def receive() -> AgentMessage:
        return channel.receive(None if deadline is None else deadline - monotonic())

    channel.send(Hello(PROTOCOL_VERSION))
    welcome = receive()
    if not isinstance(welcome, Welcome) or welcome.version != PROTOCOL_VERSION:
        raise ProtocolError(f"WorkAgent {index} does not speak version {PROTOCOL_VERSION} of the protocol")
    channel.send(settings)
    while isinstance(answer := receive(), Progress):
        on_progress(f"WorkAgent {index}: {answer.text}")
    if isinstance(answer, Failed):
        raise ModelError(answer.error)
    if not isinstance(answer, Loaded):
        raise ProtocolError(f"WorkAgent {index} answered {type(answer).__name__} to LoadModel")
    return answer


def _spawn(index: int, socket_fd: int, memory_fd: int, log_level: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llm_serving.work_agent", "--index", str(index), "--log-level", log_level]
    command += ["--socket-fd", str(socket_fd), "--memory-fd", str(memory_fd)]
    # A session of its own: Ctrl-C reaches the whole group of the master, who decides when its WorkAgents end.
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, pass_fds=(socket_fd, memory_fd), start_new_session=True
    )


def load_settings(config: ServingConfig, index: int) -> LoadModel:
    """What WorkAgent `index` is told to load."""
    max_model_len = config.model.max_generate_length
    max_tokens, max_rows = config.scheduler.max_prefill_tokens, config.model.decode_batch_size
    num_threads = config.device.num_threads
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // len(config.serving.agent_ports))
    return LoadModel(
        model_path=str(config.model.model_path),
        mindir_path=_text(config.model.mindir_path),
        mindir_ini=_text(config.model.mindir_ini),
        dtype=config.model.model_dtype,
        quantization=config.quant.quantization,
        group_size=config.quant.group_size,
        kernels=config.device.kernels,
        exactness=config.device.exactness,
        block_size=config.pa.block_size,
        num_blocks=config.pa.num_blocks,
        num_swap_blocks=config.pa.num_swap_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=max_rows,
        device_target=config.device.device_target,
        device_id=config.serving.start_device_id + index,
        num_agents=len(config.serving.agent_ports),
        num_threads=num_threads,
        max_device_memory=config.device.max_device_memory,
        enable_graph_kernel=config.device.enable_graph_kernel,
        graph_kernel_flags=config.device.graph_kernel_flags,
        save_graphs=config.device.save_graphs,
        save_graphs_path=str(config.device.save_graphs_path),
        jit_level=config.device.jit_level,
        num_buffers=NUM_BUFFERS,
        buffer_bytes=max_step_bytes(max_tokens, max_rows, max_model_len, config.pa.block_size),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _end_at_once(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    _end(process, None)


def _end(process: subprocess.Popen[bytes], timeout_s: float | None) -> None:
    """Waits for the end of the process, for `timeout_s` at most; then kills it."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
