"""Blocks on their way between master and WorkAgent, and what is not taken for them."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from llm_serving.errors import DeadlineExceededError, TransportError, WorkerDiedError, WorkerError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import (
    AgentMessage,
    Blocks,
    BlocksRefused,
    BlocksTaken,
    MasterMessage,
    SendBlocks,
    StepDone,
)
from llm_serving.transport.shared_memory import (
    FRAMES_UNDER_WAY,
    MAX_BLOCKS,
    PIECE_BYTES,
    blocks_a_frame,
    max_frame_bytes,
)
from llm_serving.worker.kv_transfer import exchange_blocks
from support.fake_runner import FakeTransferPool

BLOCK_BYTES = 16
"""Four tokens."""
CONTENT = bytes(range(32))
BLOCKS = Blocks([2, 5], [7, 8], [4, 3], CONTENT)
ASKED = [(2, 7), (5, 8)]
DEADLINE_S = 60.0


class Ends:
    """The master's, and what the WorkAgent has."""

    def __init__(self, timeout_s: float = DEADLINE_S) -> None:
        ours, theirs = socket.socketpair()
        channel: Any = Channel(ours, AgentMessage)  # type: ignore[arg-type]
        self.link = BlockLink(channel, BLOCK_BYTES, timeout_s)
        self.agent: Channel[Any] = Channel(theirs, MasterMessage)  # type: ignore[arg-type]
        self.pool = FakeTransferPool(8)

    def serve(self) -> None:
        with pytest.raises(TransportError):
            exchange_blocks(self.agent, self.pool)


def read(link: BlockLink, *pieces: list[tuple[int, int]]) -> list[Blocks]:
    return list(link.read(pieces or (ASKED,)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.link.close()
    ends.agent.close()


@pytest.fixture
def serving(ends: Ends) -> Iterator[Ends]:
    thread = threading.Thread(target=ends.serve)
    thread.start()
    yield ends
    ends.link.close()
    thread.join()


def test_blocks_come_back_as_they_went(serving: Ends) -> None:
    serving.link.write([BLOCKS, BLOCKS])  # the same again changes nothing
    assert read(serving.link) == [BLOCKS]
    assert read(serving.link, ASKED[1:], ASKED) == [Blocks([5], [8], [3], CONTENT[16:]), BLOCKS]


def test_a_block_of_another_epoch_is_refused_and_the_next_one_is_not(serving: Ends) -> None:
    serving.link.write([BLOCKS])
    with pytest.raises(WorkerError, match="somebody else's"):
        read(serving.link, [(2, 7), (5, 9)], ASKED, ASKED)
    assert not serving.link.is_closed
    assert read(serving.link) == [BLOCKS]


@pytest.mark.parametrize(
    "reply",
    [
        Blocks([2, 5], [7, 9], [4, 3], CONTENT),
        Blocks([2, 6], [7, 8], [4, 3], CONTENT),
        Blocks([2], [7], [4], CONTENT[:16]),
        Blocks([2, 5], [7, 8], [4, 3], CONTENT[:-1]),
        Blocks([2, 5], [7, 8], [4, 3], CONTENT + bytes(1)),
        Blocks([2, 5], [7, 8], [4], CONTENT),
        Blocks([2, 5], [7, 8], [4, 0], CONTENT),
        Blocks([2, 5], [7, 8], [4, 2**40], CONTENT),
        Blocks([2, 5], [7, 8], [4, 3], bytes(max_frame_bytes(BLOCK_BYTES))),
        BlocksTaken([2, 5], [7, 8]),
        StepDone(0, b"", b"", {}),
    ],
    ids=["epoch", "block", "fewer", "short", "long", "tokens", "no token", "too many", "frame", "kind", "step"],
)
def test_what_was_not_asked_for_ends_the_connection(ends: Ends, reply: AgentMessage) -> None:
    ends.agent.send(reply)
    with pytest.raises(WorkerDiedError):
        read(ends.link)
    assert ends.link.is_closed
    with pytest.raises(WorkerDiedError, match="gone"):
        read(ends.link)


def test_an_answer_that_comes_twice_is_not_that_to_the_next_question(ends: Ends) -> None:
    ends.agent.send(BLOCKS)
    ends.agent.send(BLOCKS)
    assert read(ends.link) == [BLOCKS]
    with pytest.raises(WorkerDiedError):
        ends.link.write([Blocks([1], [3], [4], CONTENT[:16])])
    assert ends.link.is_closed


def test_an_answer_that_comes_late_is_read_by_nobody() -> None:
    ends = Ends(timeout_s=0.0)
    with pytest.raises(WorkerDiedError, match="in time"):
        read(ends.link)
    assert isinstance(ends.agent.receive(), SendBlocks)
    with pytest.raises(TransportError):
        ends.agent.send(BLOCKS)
    ends.agent.close()


def test_an_answer_that_never_ends_is_not_waited_for() -> None:
    ends = Ends(timeout_s=0.2)
    begun = msgspec.msgpack.encode(BLOCKS)
    ends.agent._socket.sendall(struct.pack("<I", len(begun)) + begun[:-1])
    with pytest.raises(WorkerDiedError, match="in time"):
        read(ends.link)
    assert ends.link.is_closed
    ends.agent.close()


def test_one_that_takes_nothing_is_not_waited_for() -> None:
    """It has shown who it is, and reads no more than its kernel does."""
    ends = Ends(timeout_s=0.2)
    ends.link._channel.max_frame_bytes = 2**23
    with pytest.raises(WorkerDiedError, match="timed out"):
        ends.link.write([Blocks([2], [7], [4], bytes(2**22))])
    assert ends.link.is_closed
    ends.agent.close()


def test_whoever_waits_is_told_when_it_is_closed(ends: Ends) -> None:
    failed: list[Exception] = []

    def wait() -> None:
        try:
            read(ends.link)
        except WorkerDiedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert isinstance(ends.agent.receive(), SendBlocks)
    ends.link.close()
    thread.join()
    assert failed


def test_a_few_frames_are_asked_for_before_the_first_has_come(ends: Ends) -> None:
    frames = ends.link.read([ASKED] * 4)
    thread = threading.Thread(target=next, args=(frames,))
    thread.start()
    for _ in range(FRAMES_UNDER_WAY):
        assert isinstance(ends.agent.receive(DEADLINE_S), SendBlocks)
    with pytest.raises(DeadlineExceededError):
        ends.agent.receive(0.0)
    ends.agent.send(BLOCKS)
    thread.join()
    assert isinstance(ends.agent.receive(DEADLINE_S), SendBlocks)
    for _ in range(FRAMES_UNDER_WAY):
        ends.agent.send(BLOCKS)
    frames.close()


def test_answers_that_nobody_wants_any_more_are_not_those_to_the_next_question(serving: Ends) -> None:
    serving.link.write([BLOCKS])
    with contextlib.closing(serving.link.read([ASKED] * 4)) as frames:
        assert next(frames) == BLOCKS
    assert not serving.link.is_closed
    assert read(serving.link, ASKED[1:]) == [Blocks([5], [8], [3], CONTENT[16:])]


def test_what_cannot_be_read_ends_a_write_and_not_its_connection(serving: Ends) -> None:
    def frames() -> Iterator[Blocks]:
        yield BLOCKS
        yield Blocks([5], [9], [3], CONTENT[:16])
        raise WorkerError("the other one is gone")

    with pytest.raises(WorkerError, match="the other one is gone"):
        serving.link.write(frames())
    assert not serving.link.is_closed
    assert read(serving.link, ASKED[:1], [(5, 9)])[1].content == CONTENT[:16]


def test_a_link_that_somebody_holds_is_closed_without_waiting_for_him(ends: Ends) -> None:
    steps, other = socket.socketpair()
    ends.link._steps = Channel(steps, AgentMessage)  # type: ignore[arg-type]
    with ends.link.held(0.0):
        ends.link.close()
        assert ends.link._channel.fileno() >= 0
        assert other.recv(1) == b"", "the connection of steps has ended too"
    assert ends.link._channel.fileno() < 0
    steps.close()
    other.close()


def test_a_refusal_is_told_shortened(ends: Ends) -> None:
    ends.agent.send(BlocksRefused("no" * 10_000))
    with pytest.raises(WorkerError, match=r"^(no)+$") as raised:
        read(ends.link)
    assert len(str(raised.value)) == 500


def test_a_frame_has_as_many_blocks_as_a_megabyte_has_room_for() -> None:
    assert [blocks_a_frame(each) for each in (0, 1, 40_960, PIECE_BYTES, 10 * PIECE_BYTES)] == [
        MAX_BLOCKS,
        MAX_BLOCKS,
        25,
        1,
        1,
    ]
