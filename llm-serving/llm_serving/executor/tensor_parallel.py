"""The ranks of a replica under tensor parallelism. The executor controls them like one WorkAgent."""

from __future__ import annotations

import select
import signal
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from llm_serving.errors import DeadlineExceededError, ProtocolError
from llm_serving.executor.worker_process import AgentChannel, LocalProcess
from llm_serving.transport.messages import (
    AgentMessage,
    Failed,
    Loaded,
    LoadModel,
    Progress,
    RunStep,
    StepDone,
    StepEnding,
    StepFailed,
    Welcome,
)


class RankChannels:
    """Sends every message to all ranks, and returns a reply only when every rank has sent the same one.

    So when the master gets a reply, no rank still reads the step's arrays, and all ranks have sampled the same tokens.
    Only rank 0 announces the end of a step. A rank that fails to load reports the failure for all ranks.
    """

    def __init__(self, channels: Sequence[AgentChannel]) -> None:
        self._channels = channels
        self._received: list[deque[AgentMessage]] = [deque() for _ in channels]
        self._poll = select.epoll(len(channels))
        for channel in channels:
            self._poll.register(channel, select.EPOLLIN)

    def fileno(self) -> int:
        return self._poll.fileno()

    def send(self, message: msgspec.Struct) -> None:
        for rank, channel in enumerate(self._channels):
            channel.send(_to_rank(rank, message))

    def receive(self, timeout_s: float | None = None) -> AgentMessage:
        """Return the next message of all ranks. Raise ProtocolError if the messages of the ranks differ."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not all(self._received):
            for rank in self._ready(deadline):
                message = self._channels[rank].receive(None if deadline is None else deadline - time.monotonic())
                if isinstance(message, Progress) and rank:
                    return Progress(f"rank {rank}: {message.text}")
                if isinstance(message, Failed | Progress) or (isinstance(message, StepEnding) and not rank):
                    return message
                if not isinstance(message, StepEnding):
                    self._received[rank].append(message)
        first, *others = (received.popleft() for received in self._received)
        for rank, other in enumerate(others, 1):
            if _compared(other) != _compared(first):
                raise ProtocolError(
                    f"the ranks do not agree: rank 0 sent {str(first)[:200]}, rank {rank} sent {str(other)[:200]}"
                )
        return first

    def _ready(self, deadline: float | None) -> list[int]:
        read = [rank for rank, channel in enumerate(self._channels) if channel.has_frame]
        if read:
            return read
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            missing = [rank for rank, messages in enumerate(self._received) if not messages]
            raise DeadlineExceededError(f"no message arrived in time from the ranks {missing}")
        numbers = {number for number, _ in self._poll.poll(remaining)}
        return [rank for rank, channel in enumerate(self._channels) if channel.fileno() in numbers]

    def close(self) -> None:
        self._poll.close()
        for channel in self._channels:
            channel.close()


AgentLink = AgentChannel | RankChannels


def join_channels(channels: Sequence[AgentChannel]) -> AgentLink:
    return channels[0] if len(channels) == 1 else RankChannels(channels)


def _to_rank(rank: int, message: msgspec.Struct) -> msgspec.Struct:
    if isinstance(message, LoadModel):
        return msgspec.structs.replace(message, rank=rank, device_id=message.device_id + rank)
    if isinstance(message, RunStep) and rank and message.announce_ending:
        return msgspec.structs.replace(message, announce_ending=False)
    return message


def _compared(message: AgentMessage) -> object:
    match message:
        case Welcome():
            return message.version, message.code_fingerprint
        case Loaded():
            return message.num_blocks, message.num_swap_blocks, message.compute_fingerprint, message.model
        case StepFailed():
            return message.step
        case StepDone():
            return message
    return type(message)


class RankProcesses:
    """The processes of a replica's ranks. When one exits, all others are terminated."""

    def __init__(self, processes: Sequence[LocalProcess]) -> None:
        self.ranks = processes
        self._first: int | None = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.ranks]

    @property
    def has_exited(self) -> bool:
        return any(process.has_exited for process in self.ranks)

    @property
    def exit_description(self) -> str:
        # A process closes its channel a moment before `poll` can see its exit, so `_first` may be unknown.
        not_killed = (rank for rank, process in enumerate(self.ranks) if process.returncode != -signal.SIGKILL)
        rank = next(not_killed, 0) if self._first is None else self._first
        return f"rank {rank}: {self.ranks[rank].exit_description}"

    def kill(self) -> None:
        self._record_first_exit()
        for process in self.ranks:
            process.kill()

    def wait_or_kill(self, timeout_s: float | None) -> None:
        self._record_first_exit()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for process in self.ranks:
            process.wait_or_kill(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _record_first_exit(self) -> None:
        if self._first is None:
            self._first = next((rank for rank, process in enumerate(self.ranks) if process.has_exited), None)
