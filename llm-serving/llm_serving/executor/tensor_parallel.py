"""The WorkAgents that compute one replica together, as if they were one."""

from __future__ import annotations

import select
import signal
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from llm_serving.errors import DeadlineExceededError, ProtocolError
from llm_serving.executor.worker_process import AgentChannel, AgentLink, LocalProcess
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
    """What is said goes to every rank; what comes counts once all of them have said the same.

    So a step has been replied to when no rank reads its arrays any more, and tokens that ranks do not agree on reach
    nobody. Rank 0 alone tells of a step that is about to end; whoever fails to load says so for all.
    """

    def __init__(self, channels: Sequence[AgentChannel]) -> None:
        self._channels = channels
        self._said: list[deque[AgentMessage]] = [deque() for _ in channels]
        """What has come of each and not of all."""
        self._poll = select.epoll(len(channels))
        for channel in channels:
            self._poll.register(channel, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when one of them says something or is gone."""
        return self._poll.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """As `Channel.send`, to every rank."""
        for rank, channel in enumerate(self._channels):
            channel.send(_to_rank(rank, message))

    def receive(self, timeout_s: float | None = None) -> AgentMessage:
        """The next message of all.

        Raises:
            DeadlineExceededError: One has not said it within `timeout_s` seconds.
            ChannelClosedError: One is gone.
            ProtocolError: They do not say the same, or nonsense.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not all(self._said):
            for rank in self._ready(deadline):
                message = self._channels[rank].receive(None if deadline is None else deadline - time.monotonic())
                if isinstance(message, Progress) and rank:
                    return Progress(f"rank {rank}: {message.text}")
                if isinstance(message, Failed | Progress) or (isinstance(message, StepEnding) and not rank):
                    return message
                if not isinstance(message, StepEnding):
                    self._said[rank].append(message)
        first, *others = (said.popleft() for said in self._said)
        for rank, other in enumerate(others, 1):
            if _compared(other) != _compared(first):
                raise ProtocolError(f"rank 0 says {str(first)[:200]}, rank {rank} {str(other)[:200]}")
        return first

    def _ready(self, deadline: float | None) -> list[int]:
        """Ranks of which something has come."""
        read = [rank for rank, channel in enumerate(self._channels) if channel.has_frame]
        if read:
            return read
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise DeadlineExceededError("not every rank has replied in time")
        numbers = {number for number, _ in self._poll.poll(remaining)}
        return [rank for rank, channel in enumerate(self._channels) if channel.fileno() in numbers]

    def close(self) -> None:
        self._poll.close()
        for channel in self._channels:
            channel.close()


def one_link(channels: Sequence[AgentChannel]) -> AgentLink:
    """To a replica, given those to its ranks."""
    return channels[0] if len(channels) == 1 else RankChannels(channels)


def _to_rank(rank: int, message: msgspec.Struct) -> msgspec.Struct:
    if isinstance(message, LoadModel):
        return msgspec.structs.replace(message, rank=rank, device_id=message.device_id + rank)
    if isinstance(message, RunStep) and rank and message.announce_ending:
        return msgspec.structs.replace(message, announce_ending=False)
    return message


def _compared(message: AgentMessage) -> object:
    """What ranks must agree on: the whole reply to a step, to the last bit."""
    match message:
        case Welcome():
            return message.version, message.image
        case Loaded():
            return message.num_blocks, message.num_swap_blocks, message.computed_by, message.model
        case StepFailed():
            return message.step
        case StepDone():
            return message
    return type(message)


class RankProcesses:
    """The processes of these WorkAgents: one that ends is the end of all."""

    def __init__(self, processes: Sequence[LocalProcess]) -> None:
        self.ranks = processes
        """In their order."""
        self._first: int | None = None
        """The rank that ended by itself, if it was seen to have."""

    @property
    def pid(self) -> int:
        return self.ranks[0].pid

    @property
    def has_ended(self) -> bool:
        return any(process.has_ended for process in self.ranks)

    @property
    def described_end(self) -> str:
        # One that ends closes its channel a moment before it can be seen to have ended.
        by_itself = (rank for rank, process in enumerate(self.ranks) if process.returncode != -signal.SIGKILL)
        rank = next(by_itself, 0) if self._first is None else self._first
        return f"rank {rank}: {self.ranks[rank].described_end}"

    def kill(self) -> None:
        self._note_first()
        for process in self.ranks:
            process.kill()

    def end(self, timeout_s: float | None) -> None:
        self._note_first()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for process in self.ranks:
            process.end(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _note_first(self) -> None:
        if self._first is None:
            self._first = next((rank for rank, process in enumerate(self.ranks) if process.has_ended), None)
