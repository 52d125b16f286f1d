import contextlib
import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.errors import ChannelClosedError, DeadlineExceededError, ProtocolError
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel
from llm_serving.transport.messages import (
    AgentMessage,
    BlockContents,
    Failed,
    Hello,
    MasterMessage,
    Progress,
    RunStep,
    Shutdown,
)


@pytest.fixture(params=[0.0, 60.0], ids=["sleeping", "polling"])
def ends(request):
    left, right = socket.socketpair()
    channel = Channel(right, MasterMessage)
    channel.poll_s = request.param
    yield left, channel
    left.close()
    right.close()


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def test_channel_messages_arrive_in_order_with_their_types(ends) -> None:
    left, channel = ends
    sender = Channel(left, MasterMessage)
    sent = [Hello(1), RunStep(3, 1, ()), Shutdown()]
    for message in sent:
        sender.send(message)
    assert [channel.receive() for _ in sent] == sent


def test_waiting_for_data_ends_with_bytes_or_when_it_is_over(ends) -> None:
    left, channel = ends
    asked = []

    def is_over() -> bool:
        asked.append(1)
        return len(asked) == 3

    assert not channel.wait_for_data(is_over)
    assert len(asked) == 3
    for _ in range(2):
        left.send(frame(channel._encoder.encode(Shutdown())))
    assert channel.wait_for_data(is_over)
    assert channel.receive() == Shutdown()  # reads both frames
    assert channel.wait_for_data(is_over)
    assert len(asked) == 3


@given(cuts=st.lists(st.integers(1, 40), max_size=6))
def test_channel_frames_are_independent_of_stream_pieces(cuts: list[int]) -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, channel = Channel(left, AgentMessage), Channel(right, AgentMessage)
        encoded = sender._encoder.encode(Failed("x" * 50))
        data = frame(encoded) + frame(encoded)
        for cut in cuts:
            left.send(data[:cut])
            data = data[cut:]
        if data:
            left.send(data)
        assert channel.receive(1.0) == channel.receive(1.0) == Failed("x" * 50)


def test_channel_timeout_within_a_frame_loses_no_bytes(ends) -> None:
    left, channel = ends
    data = frame(Channel(left, MasterMessage)._encoder.encode(Hello(1)))
    left.send(data[:7])
    with pytest.raises(DeadlineExceededError):
        channel.receive(0.0)
    left.send(data[7:])
    assert channel.receive(1.0) == Hello(1)


def test_receive_copies_a_large_frame_once(ends) -> None:
    """Each additional copy would delay the steps of this process."""
    left, channel = ends
    sent = BlockContents([1], [2], [3], bytes(2**23))
    thread = threading.Thread(target=Channel(left, MasterMessage).send, args=(sent,))
    thread.start()
    while not channel.has_frame:
        channel._fill(len(channel._received) + 1, None)
    thread.join()
    tracemalloc.start()
    assert channel.receive() == sent
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * len(sent.content)


def test_channel_peer_is_the_address_of_the_other_machine(ends) -> None:
    _, channel = ends
    assert channel.peer == ""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as here,
    ):
        assert Channel(here, MasterMessage).peer == "127.0.0.1"


def test_channel_reports_the_end_of_the_stream(ends) -> None:
    left, channel = ends
    left.send(frame(b"abc")[:5])
    left.close()
    with pytest.raises(ChannelClosedError, match="closed the connection"):
        channel.receive()


def test_channel_rejects_a_frame_length_above_the_limit(ends) -> None:
    left, channel = ends
    left.send(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        channel.receive()


HELLO = b"\xa4type\xa5hello"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x81\xa4type\xa3foo",
        b"not msgpack at all",
        pytest.param(b"\x82" + HELLO + b"\xa1x" + b"\x91" * 200_000 + b"\xc0", id="lists in lists"),
        pytest.param(b"\x82" + HELLO + b"\xa1x" + b"\x81\xc0" * 200_000 + b"\xc0", id="maps in maps"),
        pytest.param(b"\x82\xa4type\xaaload_model\xaamodel_path\xa2\xff\xfe", id="no UTF-8"),
        pytest.param(b"\x82" + HELLO + b"\xa1x\xdd\xff\xff\xff\xff", id="four billion items announced"),
    ],
)
def test_channel_rejects_garbage(ends, payload: bytes) -> None:
    left, channel = ends
    sender = threading.Thread(target=left.sendall, args=(frame(payload),))
    sender.start()
    with pytest.raises(ProtocolError, match="not a known message"):
        channel.receive()
    sender.join()


@given(payload=st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(frame(b"\x82" + HELLO + payload))
        with contextlib.suppress(ProtocolError):
            Channel(right, MasterMessage).receive()


def test_channel_rejects_messages_of_the_other_direction(ends) -> None:
    left, channel = ends
    Channel(left, MasterMessage).send(Progress("x"))
    with pytest.raises(ProtocolError, match="not a known message"):
        channel.receive()


def test_send_reports_a_closed_connection(ends) -> None:
    left, channel = ends
    left.close()
    with pytest.raises(ChannelClosedError):
        channel.send(Hello(1))


def test_send_times_out_if_the_peer_reads_nothing(ends) -> None:
    """A stopped process keeps its socket open, so that only a timeout ends a send once the buffers are full."""
    left, _ = ends
    sender = Channel(left, AgentMessage)
    sender.send_timeout_s = 0.01
    with pytest.raises(ChannelClosedError, match="timed out"):
        for _ in range(100):
            sender.send(Failed("x" * (MAX_FRAME_BYTES // 2)))


def test_send_rejects_a_message_above_the_frame_limit(ends) -> None:
    _, channel = ends
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        channel.send(Progress("x" * (MAX_FRAME_BYTES + 1)))


def test_send_escapes_text_that_utf_8_cannot_encode() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = Channel(left, MasterMessage), Channel(right, AgentMessage)
        sender.send(Failed("/models/\udcff: is no folder"))
        assert receiver.receive(5) == Failed("/models/\\udcff: is no folder")
