"""Transfer of KV blocks between the master and a WorkAgent on another machine."""

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
    BlockContents,
    BlocksRefused,
    BlocksWritten,
    MasterMessage,
    ReadBlocks,
    StepDone,
)
from llm_serving.transport.shared_memory import (
    MAX_BLOCKS_PER_FRAME,
    MAX_FRAMES_IN_FLIGHT,
    PIECE_BYTES,
    blocks_per_frame,
    max_frame_bytes,
)
from llm_serving.worker.kv_transfer import serve_blocks
from support.fake_runner import FakeTransferPool

BLOCK_BYTES = 16
"""Bytes of a block of four tokens."""
CONTENT = bytes(range(32))
BLOCKS = BlockContents([2, 5], [7, 8], [4, 3], CONTENT)
ASKED = [(2, 7), (5, 8)]
DEADLINE_S = 60.0


class Ends:
    """The master's end of a link, and the blocks of the WorkAgent."""

    def __init__(self, timeout_s: float = DEADLINE_S) -> None:
        ours, theirs = socket.socketpair()
        channel: Any = Channel(ours, AgentMessage)  # type: ignore[arg-type]
        self.link = BlockLink(channel, BLOCK_BYTES, timeout_s)
        self.agent: Channel[Any] = Channel(theirs, MasterMessage)  # type: ignore[arg-type]
        self.pool = FakeTransferPool(8)

    def serve(self) -> None:
        with pytest.raises(TransportError):
            serve_blocks(self.agent, self.pool)


def read(link: BlockLink, *pieces: list[tuple[int, int]]) -> list[BlockContents]:
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


def test_block_link_returns_the_written_contents(serving: Ends) -> None:
    serving.link.write([BLOCKS, BLOCKS])  # the same again changes nothing
    assert read(serving.link) == [BLOCKS]
    assert read(serving.link, ASKED[1:], ASKED) == [BlockContents([5], [8], [3], CONTENT[16:]), BLOCKS]


def test_a_refused_block_leaves_the_link_usable(serving: Ends) -> None:
    serving.link.write([BLOCKS])
    with pytest.raises(WorkerError, match="belongs to another request"):
        read(serving.link, [(2, 7), (5, 9)], ASKED, ASKED)
    assert not serving.link.is_closed
    assert read(serving.link) == [BLOCKS]


@pytest.mark.parametrize(
    "reply",
    [
        BlockContents([2, 5], [7, 9], [4, 3], CONTENT),
        BlockContents([2, 6], [7, 8], [4, 3], CONTENT),
        BlockContents([2], [7], [4], CONTENT[:16]),
        BlockContents([2, 5], [7, 8], [4, 3], CONTENT[:-1]),
        BlockContents([2, 5], [7, 8], [4, 3], CONTENT + bytes(1)),
        BlockContents([2, 5], [7, 8], [4], CONTENT),
        BlockContents([2, 5], [7, 8], [4, 0], CONTENT),
        BlockContents([2, 5], [7, 8], [4, 2**40], CONTENT),
        BlockContents([2, 5], [7, 8], [4, 3], bytes(max_frame_bytes(BLOCK_BYTES))),
        BlocksWritten([2, 5], [7, 8]),
        StepDone(0, (), {}),
    ],
    ids=["epoch", "block", "fewer", "short", "long", "tokens", "no token", "too many", "frame", "kind", "step"],
)
def test_an_unexpected_reply_closes_the_link(ends: Ends, reply: AgentMessage) -> None:
    ends.agent.send(reply)
    with pytest.raises(WorkerDiedError):
        read(ends.link)
    assert ends.link.is_closed
    with pytest.raises(WorkerDiedError, match="exited"):
        read(ends.link)


def test_a_duplicate_reply_is_not_used_for_the_next_request(ends: Ends) -> None:
    ends.agent.send(BLOCKS)
    ends.agent.send(BLOCKS)
    assert read(ends.link) == [BLOCKS]
    with pytest.raises(WorkerDiedError):
        ends.link.write([BlockContents([1], [3], [4], CONTENT[:16])])
    assert ends.link.is_closed


def test_late_reply_closes_the_block_link() -> None:
    ends = Ends(timeout_s=0.0)
    with pytest.raises(WorkerDiedError, match="in time"):
        read(ends.link)
    assert isinstance(ends.agent.receive(), ReadBlocks)
    with pytest.raises(TransportError):
        ends.agent.send(BLOCKS)
    ends.agent.close()


def test_endless_reply_of_a_block_link_times_out() -> None:
    ends = Ends(timeout_s=0.2)
    begun = msgspec.msgpack.encode(BLOCKS)
    ends.agent._socket.sendall(struct.pack("<I", len(begun)) + begun[:-1])
    with pytest.raises(WorkerDiedError, match="in time"):
        read(ends.link)
    assert ends.link.is_closed
    ends.agent.close()


def test_write_to_a_peer_that_reads_nothing_times_out() -> None:
    """The peer is authenticated but its process reads nothing more."""
    ends = Ends(timeout_s=0.2)
    ends.link._channel.max_frame_bytes = 2**23
    with pytest.raises(WorkerDiedError, match="timed out"):
        ends.link.write([BlockContents([2], [7], [4], bytes(2**22))])
    assert ends.link.is_closed
    ends.agent.close()


def test_close_of_a_block_link_wakes_a_waiting_reader(ends: Ends) -> None:
    failed: list[Exception] = []

    def wait() -> None:
        try:
            read(ends.link)
        except WorkerDiedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert isinstance(ends.agent.receive(), ReadBlocks)
    ends.link.close()
    thread.join()
    assert failed


def test_read_keeps_several_frames_in_flight(ends: Ends) -> None:
    frames = ends.link.read([ASKED] * 4)
    thread = threading.Thread(target=next, args=(frames,))
    thread.start()
    for _ in range(MAX_FRAMES_IN_FLIGHT):
        assert isinstance(ends.agent.receive(DEADLINE_S), ReadBlocks)
    with pytest.raises(DeadlineExceededError):
        ends.agent.receive(0.0)
    ends.agent.send(BLOCKS)
    thread.join()
    assert isinstance(ends.agent.receive(DEADLINE_S), ReadBlocks)
    for _ in range(MAX_FRAMES_IN_FLIGHT):
        ends.agent.send(BLOCKS)
    frames.close()


def test_unread_replies_are_not_used_for_the_next_request(serving: Ends) -> None:
    serving.link.write([BLOCKS])
    with contextlib.closing(serving.link.read([ASKED] * 4)) as frames:
        assert next(frames) == BLOCKS
    assert not serving.link.is_closed
    assert read(serving.link, ASKED[1:]) == [BlockContents([5], [8], [3], CONTENT[16:])]


def test_a_failing_source_ends_a_write_but_not_the_link(serving: Ends) -> None:
    def frames() -> Iterator[BlockContents]:
        yield BLOCKS
        yield BlockContents([5], [9], [3], CONTENT[:16])
        raise WorkerError("the other one is gone")

    with pytest.raises(WorkerError, match="the other one is gone"):
        serving.link.write(frames())
    assert not serving.link.is_closed
    assert read(serving.link, ASKED[:1], [(5, 9)])[1].content == CONTENT[:16]


def test_close_of_a_block_link_does_not_wait_for_its_lock(ends: Ends) -> None:
    steps, other = socket.socketpair()
    ends.link._steps = Channel(steps, AgentMessage)  # type: ignore[arg-type]
    with ends.link.locked(0.0):
        ends.link.close()
        assert ends.link._channel.fileno() >= 0
        assert other.recv(1) == b"", "the connection of steps has ended too"
    assert ends.link._channel.fileno() < 0
    steps.close()
    other.close()


def test_the_text_of_a_refusal_is_truncated(ends: Ends) -> None:
    ends.agent.send(BlocksRefused("no" * 10_000))
    with pytest.raises(WorkerError, match=r"^(no)+$") as raised:
        read(ends.link)
    assert len(str(raised.value)) == 500


def test_a_frame_holds_about_one_mebibyte_of_blocks() -> None:
    assert [blocks_per_frame(each) for each in (0, 1, 40_960, PIECE_BYTES, 10 * PIECE_BYTES)] == [
        MAX_BLOCKS_PER_FRAME,
        MAX_BLOCKS_PER_FRAME,
        25,
        1,
        1,
    ]
