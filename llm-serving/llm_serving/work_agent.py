"""A process that owns one device: loads the model, runs steps strictly in the order they arrive.

Started with `python -m llm_serving.work_agent`: by the master on its own machine, else by an `AgentHost`.
"""

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
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    gc.disable()  # nothing of what is imported is garbage
    from llm_serving.core.mindspore_environment import set_mindspore_environment

    set_mindspore_environment()

import msgspec

from llm_serving.core.enums import AgentExit
from llm_serving.core.fingerprint import code_fingerprint
from llm_serving.core.memory import explain_address_space_limit
from llm_serving.core.process import die_with_parent
from llm_serving.core.step import AllowedTokens
from llm_serving.errors import (
    ChannelClosedError,
    ConfigError,
    LLMServingError,
    ProtocolError,
    RankLostError,
    TransportError,
)
from llm_serving.log import configure_logging, get_logger
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel, notice_silence
from llm_serving.transport.codec import allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    Allow,
    Arrived,
    Failed,
    Hello,
    Loaded,
    LoadModel,
    MasterMessage,
    Progress,
    Propose,
    Proposed,
    RunStep,
    Shutdown,
    StepEnding,
    StepFailed,
    Welcome,
)
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, max_frame_bytes, transfer_memory
from llm_serving.transport.tls_identity import ClusterIdentity, read_secret
from llm_serving.worker.kv_transfer import BesideSteps, Pool, exchange_blocks
from llm_serving.worker.loading import load_runner
from llm_serving.worker.model_runner import ModelRunner

logger = get_logger(__name__)

FRAMES: Final = "\n\n----"
"""Where the frames of MindSpore's own code begin in the text of an error."""
CONNECT_S: Final = 30.0
"""To reach the master of another machine."""
POLL_S: Final = 0.0005
"""For which the next order is looked for before the process sleeps: as long as a master takes that forms a step by the
reply to the one before, drafts included."""


def main(argv: Sequence[str] | None = None) -> int:
    # Nor does MindSpore look for any among it, which it would at each graph that it compiles.
    gc.freeze()
    gc.enable()
    args = _parse(argv)
    name = f"work_agent {args.index}" if args.ranks_fd is None else f"work_agent {args.index}, rank {args.rank}"
    configure_logging(args.log_level, name)
    die_with_parent()
    threading.Thread(target=_end_with_the_master, name="parent-watch", daemon=True).start()
    blocks = None
    try:
        if args.connect is None:
            channel = _channel(socket.socket(fileno=args.socket_fd))
        else:
            channel = connect(args.connect, args.token, args.secret_file)
            if args.blocks_token is not None:
                blocks = connect(args.connect, args.blocks_token, args.secret_file)
    except ConfigError as error:
        logger.error("%s", error)
        return AgentExit.NO_SECRET
    except ChannelClosedError as error:
        logger.error("%s", error)
        return AgentExit.UNREACHABLE
    try:
        serve(channel, args.memory_fd, args.ranks_fd, args.transfer_fd, blocks, args.model_path, args.group_port)
    except ChannelClosedError:
        logger.info("the master is gone")
    except TransportError as error:
        logger.error("the channel broke: %s", error)
        return AgentExit.BROKEN
    except RankLostError as error:
        logger.error("%s", error)
        return AgentExit.RANK_LOST
    return AgentExit.ENDED


def connect(address: str, token: str, secret_file: Path) -> Channel[MasterMessage]:
    """Comes in at a master on another machine.

    Args:
        address: HOST:PORT of the master.
        token: Tells it which start this is.
        secret_file: With the secret of the cluster.

    Raises:
        ConfigError: The secret cannot be read, or is not the master's.
        ChannelClosedError: The master is not there, or expects nobody of this token.
    """
    identity = ClusterIdentity(read_secret(secret_file))
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_S)
        secured = identity.of_work_agent().wrap_socket(connection)
        notice_silence(secured)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the master at {address} has another secret than {secret_file}: {error}") from error
    except OSError as error:
        raise ChannelClosedError(f"no master at {address}: {error}") from error
    channel = _channel(secured)
    channel.send(Arrived(token))
    return channel


def _channel(connection: socket.socket) -> Channel[MasterMessage]:
    return Channel(connection, MasterMessage)  # type: ignore[arg-type]


def serve(
    channel: Channel[MasterMessage],
    memory_fd: int | None = None,
    ranks_fd: int | None = None,
    transfer_fd: int | None = None,
    blocks: Channel[MasterMessage] | None = None,
    model_path: str | None = None,
    group_port: int = 0,
) -> None:
    """Greets the master, loads the model that it names, then answers its steps until it says Shutdown.

    Args:
        channel: To the master.
        memory_fd: Memory file with the arrays of steps; None: they are in their frames.
        ranks_fd: Memory of those that compute the replica together; None: this process computes it alone.
        transfer_fd: Memory by which blocks are handed over to other WorkAgents; None: there is none.
        blocks: To the master, by which blocks are handed over where no memory is shared; None: none are.
        model_path: Where this machine has the model; None: where the master has it.
        group_port: Of this machine, by which those of `ranks_fd` find each other if they compute graphs.

    Raises:
        TransportError: The channel broke, or the master is gone.
        RankLostError: Another of those is gone, or does something else.
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
    if model_path is not None:
        settings = msgspec.structs.replace(settings, model_path=model_path)
    elif memory_fd is None and not Path(settings.model_path).exists():
        rule = "must be at the same path on every machine, or come with `cluster_config.weights: object_store`"
        channel.send(Failed(f"model_config.model_path {rule}: there is none here. Given: {settings.model_path}"))
        return
    try:
        load = load_runner if ranks_fd is None else partial(load_runner, ranks_fd=ranks_fd, group_port=group_port)
        with contextlib.nullcontext(transfer_fd) if blocks is None else transfer_memory() as memory:
            load = load if memory is None else partial(load, transfer_fd=memory)
            runner, notice = load(settings, on_progress=lambda text: channel.send(Progress(text)))
        sketch = weight_fingerprint(Path(settings.model_path)) if memory_fd is None else ""
    except RankLostError:
        raise
    except LLMServingError as error:
        channel.send(Failed(str(error)))
        return
    except Exception as error:
        limit = explain_address_space_limit(error)
        if limit is None:
            logger.exception("the model cannot be loaded")
        what = str(error).partition(FRAMES)[0]
        channel.send(Failed(f"the model cannot be loaded: {what if limit is None else f'{what}: {limit}'}"))
        return
    tensors = runner.kv_tensors
    sizes = tensors.num_blocks, tensors.num_swap_blocks
    beside = BesideSteps()
    if blocks is not None:
        blocks.max_frame_bytes = max_frame_bytes(tensors.block_bytes)
        exchanged = blocks, tensors.transfer, channel, beside
        threading.Thread(target=_exchange, args=exchanged, name="blocks", daemon=True).start()
    channel.send(Loaded(*sizes, notice, runner.computed_by, tensors.block_bytes, sketch))
    buffers: SharedBuffers | InlineArrays
    if memory_fd is not None:
        buffers = SharedBuffers(memory_fd, settings.num_buffers, settings.buffer_bytes)
    else:
        buffers = InlineArrays(settings.num_buffers)
        channel.max_frame_bytes = settings.buffer_bytes + MAX_FRAME_BYTES
    answer_steps(channel, runner, buffers, beside)


def _exchange(blocks: Channel[MasterMessage], pool: Pool, steps: Channel[MasterMessage], beside: BesideSteps) -> None:
    """Without this connection, as without the other one, the WorkAgent ends: another one takes its place."""
    try:
        exchange_blocks(blocks, pool, beside.rest)
    except ChannelClosedError:
        pass
    except Exception:
        logger.exception("the channel of blocks broke")
    with contextlib.suppress(OSError):
        steps.shutdown()


def answer_steps(
    channel: Channel[MasterMessage],
    runner: ModelRunner,
    buffers: SharedBuffers | InlineArrays,
    beside: BesideSteps | None = None,
) -> None:
    """Does what the master orders, until it says Shutdown; `beside` is told when steps are computed.

    Raises:
        TransportError: The channel broke, or the master is gone.
        RankLostError: As for `serve`.
    """
    if not channel.peer and len(os.sched_getaffinity(0)) > 1:
        channel.poll_s = POLL_S
    for message in _orders(channel):
        if isinstance(message, Propose):
            channel.send(_proposed(runner, message))
            continue
        try:
            arrays = buffers.read(message.buffer, message.layout, message.content)
            step = step_from_arrays(message.step, arrays, message.allowed_follow)
            _announce_ending(runner, channel, message)
            with contextlib.nullcontext() if beside is None else beside.step():
                output = runner.execute(step, partial(_allowed, channel, buffers, message))
            channel.send(encode_output(output, runner.num_compilations))
        except (TransportError, RankLostError):
            raise
        except Exception as error:
            logger.exception("step %d failed", message.step)
            channel.send(StepFailed(message.step, f"{type(error).__name__}: {error}"[:2000]))


def _announce_ending(runner: ModelRunner, channel: Channel[MasterMessage], step: RunStep) -> None:
    """Has the end of the step announced if it was asked for; at once where nothing tells when."""

    def tell() -> None:
        with contextlib.suppress(ChannelClosedError):  # whoever is gone forms no step
            channel.send(StepEnding(step.step))

    if not runner.announce_ending(tell if step.announce_ending else None) and step.announce_ending:
        tell()


def _orders(channel: Channel[MasterMessage]) -> Iterator[RunStep | Propose]:
    while isinstance(message := channel.receive(), RunStep | Allow | Propose):
        if not isinstance(message, Allow):  # otherwise its step failed before it was asked for
            yield message


def _proposed(runner: ModelRunner, message: Propose) -> Proposed:
    """Nothing depends on proposals, so a draft model that fails is no failure of the WorkAgent."""
    try:
        if runner.draft_model is None:
            raise ConfigError("no draft model was loaded")
        return Proposed(runner.draft_model.propose(message.continuations))
    except Exception as error:
        logger.exception("the draft model failed")
        return Proposed([], f"{type(error).__name__}: {error}"[:2000])


def _allowed(channel: Channel[MasterMessage], buffers: SharedBuffers | InlineArrays, step: RunStep) -> AllowedTokens:
    """Waits until the master tells which tokens the step may choose.

    Raises:
        ChannelClosedError: It is gone, or ends.
        ProtocolError: It says something else.
    """
    message = channel.receive()
    while isinstance(message, Allow) and message.step < step.step:  # of one that failed
        message = channel.receive()
    if isinstance(message, Shutdown):
        raise ChannelClosedError("the master ends")
    if not isinstance(message, Allow) or message.step != step.step:
        raise ProtocolError(f"expected what step {step.step} may choose, got {str(message)[:100]}")
    arrays = buffers.read(step.buffer, message.layout, message.content, behind=step.layout)
    return allowed_from_arrays(step.step, arrays)


def _end_with_the_master() -> None:
    """Standard input is a pipe from whoever started this process: its end means that the parent is gone, perhaps since
    before the kernel was told to end this one with it."""
    while sys.stdin.read(1):
        pass
    os._exit(0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llm_serving.work_agent", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="index of this WorkAgent, for its log lines")
    parser.add_argument("--socket-fd", type=int, help="socket to the master, inherited from it")
    parser.add_argument("--memory-fd", type=int, help="memory file of the step buffers, inherited too")
    parser.add_argument("--ranks-fd", type=int, help="memory of those that compute a replica together, inherited")
    parser.add_argument("--group-port", type=int, default=0, help="by which they find each other, to compute graphs")
    parser.add_argument("--rank", type=int, help="of this process among them, for its log lines")
    parser.add_argument("--transfer-fd", type=int, help="memory by which blocks are handed over, inherited")
    parser.add_argument("--connect", metavar="HOST:PORT", help="the master on another machine, in place of these two")
    parser.add_argument("--token", help="tells that master which start this is")
    parser.add_argument("--blocks-token", help="the same of a second connection, by which blocks are handed over")
    parser.add_argument("--secret-file", type=Path, help="with the secret of the cluster")
    parser.add_argument("--model-path", help="where this machine has the model; that of the master unless told")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # MindSpore's own way out has ranks wait for each other; what it frees ends with the process.
    os._exit(status)
