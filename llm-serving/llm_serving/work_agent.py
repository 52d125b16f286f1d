"""A process that owns one device: loads the model, runs steps strictly in the order they arrive.

Started by the master with `python -m llm_serving.work_agent`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from llm_serving.core.step import AllowedTokens
from llm_serving.errors import ChannelClosedError, LLMServingError, ProtocolError, TransportError
from llm_serving.log import configure_logging, get_logger
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import allowed_from_arrays, encode_output, step_from_arrays
from llm_serving.transport.messages import (
    PROTOCOL_VERSION,
    Allow,
    Failed,
    Hello,
    Loaded,
    LoadModel,
    MasterMessage,
    Progress,
    RunStep,
    Shutdown,
    StepEnding,
    StepFailed,
    Welcome,
)
from llm_serving.transport.shared_arrays import SharedBuffers
from llm_serving.worker.loading import load_runner
from llm_serving.worker.model_runner import ModelRunner

logger = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    configure_logging(args.log_level, f"work_agent {args.index}")
    threading.Thread(target=_end_with_the_master, name="parent-watch", daemon=True).start()
    channel: Channel[MasterMessage] = Channel(socket.socket(fileno=args.socket_fd), MasterMessage)  # type: ignore[arg-type]
    try:
        serve(channel, args.memory_fd)
    except ChannelClosedError:
        logger.info("the master is gone")
    except TransportError as error:
        logger.error("the channel broke: %s", error)
        return 1
    return 0


def serve(channel: Channel[MasterMessage], memory_fd: int) -> None:
    """Greets the master, loads the model that it names, then answers its steps until it says Shutdown."""
    hello = channel.receive()
    if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION:
        channel.send(Failed(f"expected Hello of version {PROTOCOL_VERSION}, got {str(hello)[:100]}"))
        return
    channel.send(Welcome(PROTOCOL_VERSION, os.getpid()))
    settings = channel.receive()
    if not isinstance(settings, LoadModel):
        channel.send(Failed(f"expected LoadModel, got {type(settings).__name__}"))
        return
    try:
        runner, notice = load_runner(settings, on_progress=lambda text: channel.send(Progress(text)))
    except LLMServingError as error:
        channel.send(Failed(str(error)))
        return
    except Exception as error:
        logger.exception("the model cannot be loaded")
        channel.send(Failed(f"the model cannot be loaded: {error}"))
        return
    channel.send(Loaded(runner.kv_tensors.num_blocks, runner.kv_tensors.num_swap_blocks, notice, runner.computed_by))
    buffers = SharedBuffers(memory_fd, settings.num_buffers, settings.buffer_bytes)
    for message in _steps(channel):
        try:
            arrays = buffers.read(message.buffer, message.layout)
            step = step_from_arrays(message.step, arrays, message.allowed_follow)
            _announce_ending(runner, channel, message)
            output = runner.execute(step, partial(_allowed, channel, buffers, message))
            channel.send(encode_output(output, runner.num_compilations))
        except TransportError:
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


def _steps(channel: Channel[MasterMessage]) -> Iterator[RunStep]:
    while isinstance(message := channel.receive(), RunStep | Allow):
        if isinstance(message, RunStep):  # otherwise its step failed before it was asked for
            yield message


def _allowed(channel: Channel[MasterMessage], buffers: SharedBuffers, step: RunStep) -> AllowedTokens:
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
    arrays = buffers.read(step.buffer, (*step.layout, *message.layout))[len(step.layout) :]
    return allowed_from_arrays(step.step, arrays)


def _end_with_the_master() -> None:
    """Standard input is a pipe from the master: its end means that the master is gone, even by SIGKILL."""
    while sys.stdin.read(1):
        pass
    os._exit(0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m llm_serving.work_agent", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="index of this WorkAgent, for its log lines")
    parser.add_argument("--socket-fd", type=int, required=True, help="socket to the master, inherited from it")
    parser.add_argument("--memory-fd", type=int, required=True, help="memory file of the step buffers, inherited too")
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
