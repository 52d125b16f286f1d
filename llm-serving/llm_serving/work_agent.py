"""The WorkAgent process: it owns one device, loads the model, and runs steps in the order in which they arrive."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

if __name__ == "__main__":
    gc.disable()  # imports create no garbage
    from llm_serving.core.process import set_mindspore_environment

    set_mindspore_environment()

import msgspec

from llm_serving.core.enums import AgentExit
from llm_serving.core.fingerprint import code_fingerprint
from llm_serving.core.process import die_with_parent, explain_address_space_limit, release_library_pages, trim_heap
from llm_serving.core.step import AllowedTokens, StepOutput
from llm_serving.errors import (
    ChannelClosedError,
    ConfigError,
    LLMServingError,
    ProtocolError,
    RankLostError,
    TransportError,
)
from llm_serving.log import configure_logging, get_logger, logged_model
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel, enable_keepalive
from llm_serving.transport.codec import ALLOWED_TYPES, STEP_TYPES, allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    Attach,
    DropCache,
    Failed,
    Hello,
    LoadAdapter,
    Loaded,
    LoadModel,
    MasterMessage,
    Progress,
    Propose,
    Proposed,
    RunStep,
    SetAllowedTokens,
    Shutdown,
    StepEnding,
    StepFailed,
    Welcome,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, max_frame_bytes, num_bytes, transfer_memory
from llm_serving.transport.tls_identity import ClusterIdentity, read_secret
from llm_serving.worker.disk_store import open_disk_store
from llm_serving.worker.kv_transfer import BackgroundThrottle, serve_blocks
from llm_serving.worker.loading import load_runner
from llm_serving.worker.model_runner import ModelRunner
from llm_serving.worker.token_graph import StartedStep

logger = get_logger(__name__)

MINDSPORE_FRAMES: Final = "\n\n----"
"""Text before MindSpore's own stack frames in an error."""
CONNECT_TIMEOUT_S: Final = 30.0
"""Seconds for a connection to a master on another machine."""
POLL_S: Final = 0.0005
"""Seconds to poll for the next message before sleeping. The master needs about this time to form the next step."""


def main(argv: Sequence[str] | None = None) -> int:
    # Keep imported objects out of later collections, which MindSpore triggers for each graph it compiles.
    gc.freeze()
    gc.enable()
    args = _parse(argv)
    name = f"work_agent {args.index}" if args.ranks_fd is None else f"work_agent {args.index}, rank {args.rank}"
    configure_logging(args.log_level, name)
    die_with_parent()
    threading.Thread(target=_exit_with_the_master, name="parent-watch", daemon=True).start()
    blocks = None
    try:
        if args.connect is None:
            channel = _channel(socket.socket(fileno=args.socket_fd))
            if args.blocks_fd is not None:
                blocks = _channel(socket.socket(fileno=args.blocks_fd))
        else:
            channel = connect_to_master(args.connect, args.token, args.secret_file)
            if args.blocks_token is not None:
                blocks = connect_to_master(args.connect, args.blocks_token, args.secret_file)
    except ConfigError as error:
        logger.error("%s", error)
        return AgentExit.NO_SECRET
    except ChannelClosedError as error:
        logger.error("%s", error)
        return AgentExit.UNREACHABLE
    try:
        serve(channel, args.memory_fd, args.ranks_fd, args.transfer_fd, blocks, args.model_path, args.group_port)
    except ChannelClosedError:
        logger.info("the WorkAgent exits, because the master has exited")
    except TransportError as error:
        logger.error("the connection to the master failed: %s", error)
        return AgentExit.BROKEN
    except RankLostError as error:
        logger.error("%s", error)
        return AgentExit.RANK_LOST
    return AgentExit.ENDED


def connect_to_master(address: str, token: str, secret_file: Path) -> Channel[MasterMessage]:
    """Connect to the master on another machine, which expects `token` from the WorkAgent that it has started."""
    identity = ClusterIdentity(read_secret(secret_file))
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
        secured = identity.client_context().wrap_socket(connection)
        enable_keepalive(secured)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the master at {address} has a secret that differs from {secret_file}: {error}") from error
    except OSError as error:
        raise ChannelClosedError(f"cannot connect to the master at {address}: {error}") from error
    channel = _channel(secured)
    channel.send(Attach(token))
    return channel


def _channel(connection: socket.socket) -> Channel[MasterMessage]:
    return Channel(connection, MasterMessage)  # type: ignore[arg-type]


def serve(
    channel: Channel[MasterMessage],
    memory_fd: int | None = None,
    ranks_fd: int | None = None,
    transfer_fd: int | None = None,
    blocks: Channel[MasterMessage] | None = None,
    model_path: Path | None = None,
    group_port: int = 0,
) -> None:
    """Do the handshake, load the model, then run steps until the master sends Shutdown.

    Args:
        memory_fd: Memory file of the step buffers. If it is None, the frames contain the arrays of steps.
        ranks_fd, transfer_fd, group_port: See `worker.loading.load_runner`.
        blocks: Connection for KV transfers and the disk cache. None if the configuration has neither.
        model_path: Folder of the model on this machine. None if it is the path in `LoadModel`.
    """
    hello = channel.receive()
    if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION:
        channel.send(Failed(f"expected Hello of version {PROTOCOL_VERSION}, got {str(hello)[:100]}"))
        return
    channel.send(Welcome(PROTOCOL_VERSION, os.getpid(), code_fingerprint()))
    settings = channel.receive()
    if not isinstance(settings, LoadModel):
        channel.send(Failed(f"expected LoadModel, got {type(settings).__name__}"))
        return
    logged_model.set(settings.log_name)
    if model_path is not None:
        settings = msgspec.structs.replace(settings, model=replace(settings.model, model_path=model_path))
    elif memory_fd is None and not settings.model.folder.exists():
        rule = "must be at the same path on every machine, or come with `cluster_config.weights: object_store`"
        channel.send(Failed(f"model_config.model_path {rule}: there is none here. Given: {settings.model.folder}"))
        return
    try:
        has_own_memory = transfer_fd is None and blocks is not None
        with transfer_memory() if has_own_memory else contextlib.nullcontext(transfer_fd) as memory:
            runner, notice = load_runner(
                settings, lambda text: channel.send(Progress(text)), ranks_fd, memory, group_port
            )
        fingerprint = weight_fingerprint(settings.model.folder) if memory_fd is None else ""
        disk, transfer = None, runner.kv_tensors.transfer
        if settings.pa.disk_cache_path is not None and transfer is not None:
            disk = open_disk_store(settings, runner.compute_fingerprint, transfer.arrays)
    except RankLostError:
        raise
    except LLMServingError as error:
        channel.send(Failed(str(error)))
        return
    except Exception as error:
        limit = explain_address_space_limit(error)
        if limit is None:
            logger.exception("the model cannot be loaded")
        what = str(error).partition(MINDSPORE_FRAMES)[0]
        channel.send(Failed(f"the model cannot be loaded: {what if limit is None else f'{what}: {limit}'}"))
        return
    trim_heap()
    release_library_pages()
    tensors = runner.kv_tensors
    sizes = tensors.num_blocks, tensors.num_swap_blocks
    throttle = BackgroundThrottle()
    if blocks is not None:
        blocks.max_frame_bytes = max_frame_bytes(tensors.block_bytes)
        assert transfer is not None
        block_size = settings.pa.block_size
        serving = partial(serve_blocks, blocks, transfer, throttle.pause_after, disk=disk, block_size=block_size)
        threading.Thread(target=_serve_blocks, args=(serving, channel), name="blocks", daemon=True).start()
    windows = runner.spec.layout.windows
    channel.send(Loaded(*sizes, notice, runner.compute_fingerprint, tensors.block_bytes, fingerprint, windows))
    buffers: SharedBuffers | InlineArrays
    if memory_fd is not None:
        buffers = SharedBuffers(memory_fd, settings.num_buffers, settings.buffer_bytes)
    else:
        buffers = InlineArrays(settings.num_buffers)
        channel.max_frame_bytes = settings.buffer_bytes + MAX_FRAME_BYTES
    run_steps(channel, runner, buffers, throttle)


def _serve_blocks(serving: Callable[[], None], steps: Channel[MasterMessage]) -> None:
    """Answer requests for KV blocks. When this ends, end `steps` too, so that the master restarts the WorkAgent."""
    try:
        serving()
    except ChannelClosedError:
        pass
    except Exception:
        logger.exception("the connection for KV blocks failed")
    with contextlib.suppress(OSError):
        steps.shutdown()


def run_steps(
    channel: Channel[MasterMessage],
    runner: ModelRunner,
    buffers: SharedBuffers | InlineArrays,
    throttle: BackgroundThrottle,
) -> None:
    """Run steps and propose draft tokens until Shutdown. Raise TransportError or RankLostError if a peer is lost."""
    if not channel.peer and len(os.sched_getaffinity(0)) > 1:
        channel.poll_s = POLL_S
    steps = _Steps(channel, runner, buffers, throttle)
    while True:
        steps.await_message()
        match channel.receive():
            case RunStep() as message:
                steps.run(message)
            case Propose() as message:
                steps.flush()
                channel.send(_propose(runner, message))
            case DropCache():
                steps.flush()
                runner.kv_tensors.clear()
            case LoadAdapter() as message:
                if runner.adapters is not None:
                    runner.adapters.set(message.number, message.folder)
            case SetAllowedTokens():  # a failed step has not read its allowed tokens
                pass
            case _:
                return


class _Steps:
    """Runs steps and sends the replies, in order. While a device computes a step, the next step can be started."""

    def __init__(
        self,
        channel: Channel[MasterMessage],
        runner: ModelRunner,
        buffers: SharedBuffers | InlineArrays,
        throttle: BackgroundThrottle,
    ) -> None:
        self._channel, self._runner, self._buffers, self._throttle = channel, runner, buffers, throttle
        self._started: tuple[int, StartedStep] | None = None

    def run(self, message: RunStep) -> None:
        """Start a step. Wait for the previous one and send its reply. If this step has ended too, send its reply."""
        output = _attempt(message.step, lambda: self._start(message))
        self.flush()
        if isinstance(output, StartedStep):
            self._started = message.step, output
            if message.allowed_follow:  # `flush` reads the next message, SetAllowedTokens
                self.flush()
        else:
            self._reply(message.step, output)

    def await_message(self) -> None:
        """Wait until the next message arrives. If the started step ends before that, send its reply."""
        if self._started is not None:
            _, started = self._started
            if not self._channel.wait_for_data(lambda: started.is_done):
                self.flush()

    def flush(self) -> None:
        if self._started is not None:
            (step, started), self._started = self._started, None
            self._reply(step, _attempt(step, started.output))

    def _start(self, message: RunStep) -> StepOutput | StartedStep:
        arrays = self._buffers.read(message.buffer, message.shapes, STEP_TYPES, message.content)
        step = step_from_arrays(message.step, arrays, message.allowed_follow)
        self._announce_ending(message)
        with self._throttle.step_running():
            return self._runner.start(step, lambda: self._await_allowed_tokens(message))

    def _announce_ending(self, step: RunStep) -> None:
        """If requested, send `StepEnding` shortly before the step ends, or now if the backend cannot report that."""

        def announce() -> None:
            with contextlib.suppress(ChannelClosedError):  # the master has exited
                self._channel.send(StepEnding(step.step))

        if not self._runner.announce_ending(announce if step.announce_ending else None) and step.announce_ending:
            announce()

    def _await_allowed_tokens(self, step: RunStep) -> AllowedTokens:
        """Wait for a step's allowed tokens. Raise TransportError if the master exits or sends a different message."""
        message = self._channel.receive()
        while isinstance(message, SetAllowedTokens) and message.step < step.step:  # the allowed tokens of a failed step
            message = self._channel.receive()
        if isinstance(message, Shutdown):
            raise ChannelClosedError("the master shuts down")
        if not isinstance(message, SetAllowedTokens) or message.step != step.step:
            raise ProtocolError(f"expected the allowed tokens of step {step.step}, got {str(message)[:100]}")
        before = num_bytes(step.shapes, STEP_TYPES)
        arrays = self._buffers.read(step.buffer, message.shapes, ALLOWED_TYPES, message.content, before)
        return allowed_from_arrays(step.step, arrays)

    def _reply(self, step: int, output: StepOutput | Exception) -> None:
        if isinstance(output, StepOutput):
            self._channel.send(encode_output(output, self._runner.num_compilations))
        else:
            self._channel.send(StepFailed(step, f"{type(output).__name__}: {output}"[:2000]))


Output = TypeVar("Output")


def _attempt(step: int, compute: Callable[[], Output]) -> Output | Exception:
    """Return the output of `compute`, or the error that makes the step fail. Raise errors that end the WorkAgent."""
    try:
        return compute()
    except (TransportError, RankLostError):
        raise
    except Exception as error:
        logger.exception("step %d failed", step)
        return error


def _propose(runner: ModelRunner, message: Propose) -> Proposed:
    try:
        if runner.draft_model is None:
            raise ConfigError("no draft model was loaded")
        return Proposed(runner.draft_model.propose(message.requests))
    except Exception as error:
        logger.exception("the draft model failed")
        return Proposed([], f"{type(error).__name__}: {error}"[:2000])


def _exit_with_the_master() -> None:
    """Wait until standard input, a pipe from the master, closes because the master has exited. Then exit too."""
    while sys.stdin.read(1):
        pass
    os._exit(0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llm_serving.work_agent", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="index of this WorkAgent, for its log lines")
    parser.add_argument("--socket-fd", type=int, help="socket to the master, inherited from it")
    parser.add_argument("--memory-fd", type=int, help="memory file of the step buffers, inherited")
    parser.add_argument("--ranks-fd", type=int, help="memory shared by the ranks of this replica, inherited")
    parser.add_argument(
        "--group-port", type=int, default=0, help="port of this machine for the collective group of the ranks"
    )
    parser.add_argument("--rank", type=int, help="rank of this process, for its log lines")
    parser.add_argument("--blocks-fd", type=int, help="socket to the master for the disk cache, inherited from it")
    parser.add_argument("--transfer-fd", type=int, help="memory of the KV transfer pool, inherited")
    parser.add_argument(
        "--connect", metavar="HOST:PORT", help="the master on another machine, instead of inherited descriptors"
    )
    parser.add_argument("--token", help="names the start that this process belongs to")
    parser.add_argument("--blocks-token", help="the same for a second connection, which transfers KV blocks")
    parser.add_argument("--secret-file", type=Path, help="file with the secret of the cluster")
    parser.add_argument("--model-path", type=Path, help="folder of the model here; default: as on the master")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Skip MindSpore's exit handlers, in which ranks wait for each other.
    os._exit(status)
