"""The port that WorkAgents of other machines come in by."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from llm_serving.executor.cluster import listener as module
from llm_serving.executor.cluster.listener import Listener
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import Arrived, Hello, MasterMessage, Welcome
from llm_serving.transport.tls_identity import ClusterIdentity

IDENTITY = ClusterIdentity("0123456789abcdef" * 2)
DEADLINE_S = 10.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", IDENTITY)
    yield listener
    listener.close()


def come_in(listener: Listener, token: str) -> Channel[MasterMessage]:
    connection = IDENTITY.of_work_agent().wrap_socket(socket.create_connection(listener.address, DEADLINE_S))
    channel: Channel[MasterMessage] = Channel(connection, MasterMessage)  # type: ignore[arg-type]
    channel.send(Arrived(token))
    return channel


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(DEADLINE_S)
    try:
        return not connection.recv(1)
    except OSError as error:
        return not isinstance(error, TimeoutError)


def test_each_comes_to_the_start_that_it_names(listener: Listener) -> None:
    with listener.expecting("a") as first, listener.expecting("b") as second:
        agents = {token: come_in(listener, token) for token in ("b", "a")}
        for token, arrival in (("a", first), ("b", second)):
            channel = arrival.wait(DEADLINE_S)
            assert channel is not None
            channel.send(Hello(7))
            assert agents[token].receive(DEADLINE_S) == Hello(7)
            agents[token].send(Welcome(7, 1, token))
            assert channel.receive(DEADLINE_S) == Welcome(7, 1, token)
            channel.close()
            agents[token].close()


def test_who_comes_with_another_token_twice_or_too_late_is_turned_away(listener: Listener) -> None:
    with listener.expecting("a") as arrival:
        strangers = [come_in(listener, "b")]
        assert is_closed(strangers[0]._socket)
        agent = come_in(listener, "a")
        channel = arrival.wait(DEADLINE_S)
        assert channel is not None
        strangers.append(come_in(listener, "a"))
        assert is_closed(strangers[1]._socket)
    strangers.append(come_in(listener, "a"))
    assert is_closed(strangers[2]._socket)
    for each in (*strangers, agent, channel):
        each.close()


def test_who_has_the_secret_and_shows_no_token_has_no_memory_taken_for_him(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 300.0)
    connection = IDENTITY.of_work_agent().wrap_socket(socket.create_connection(listener.address, DEADLINE_S))
    connection.sendall(struct.pack("<I", module.ARRIVAL_BYTES + 1))
    assert is_closed(connection)
    connection.close()


def test_one_that_comes_when_nobody_waits_any_more_is_closed(listener: Listener) -> None:
    with listener.expecting("a") as arrival:
        agent = come_in(listener, "a")
        arrival._queue.put(arrival._queue.get(timeout=DEADLINE_S))  # it is here, and nobody has asked for it
    assert is_closed(agent._socket)
    agent.close()


def test_without_threads_it_turns_away_and_goes_on(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_failed = threading.Thread.start, 0

    def fail_first(thread: threading.Thread) -> None:
        nonlocal num_failed
        if thread._target == listener._welcome and num_failed < module.MAX_HANDSHAKES:  # type: ignore[attr-defined]
            num_failed += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_first)
    for _ in range(module.MAX_HANDSHAKES):
        with socket.create_connection(listener.address, DEADLINE_S) as connection:
            assert is_closed(connection)
    check_that_one_is_let_in(listener)


def test_the_silent_delay_nobody(listener: Listener) -> None:
    silent = [socket.create_connection(listener.address) for _ in range(8)]
    with listener.expecting("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.wait(DEADLINE_S)
        assert channel is not None
    for each in (*silent, agent, channel):
        each.close()


def test_who_is_silent_gives_way_to_who_comes(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are places kept WorkAgents out until their time was up."""
    monkeypatch.setattr(module, "HANDSHAKE_S", 300.0)
    silent = [socket.create_connection(listener.address) for _ in range(module.MAX_HANDSHAKES)]
    check_that_one_is_let_in(listener)
    assert is_closed(silent[0])
    for each in silent:
        each.close()


def small_listener(monkeypatch: pytest.MonkeyPatch, places: int) -> Listener:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", places)
    monkeypatch.setattr(module, "HANDSHAKE_S", 300.0)
    return Listener("127.0.0.1", IDENTITY)


def come_from(listener: Listener, host: str) -> socket.socket:
    return socket.create_connection(listener.address, DEADLINE_S, (host, 0))


def test_of_the_silent_the_oldest_of_the_address_with_the_most_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = small_listener(monkeypatch, places=3)
    hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3")
    first, *others = [come_from(listener, host) for host in hosts]
    assert is_closed(others[0])
    first.sendall(b"no TLS at all")
    assert is_closed(first), "it was there to be answered"
    for each in (first, *others):
        each.close()
    listener.close()


def test_who_has_shown_the_secret_gives_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = small_listener(monkeypatch, places=2)
    with listener.expecting("a") as arrival:
        agents = [
            IDENTITY.of_work_agent().wrap_socket(socket.create_connection(listener.address, DEADLINE_S)) for _ in "ab"
        ]
        while not all(each.has_secret for each in listener._handshakes._guests.values()):
            threading.Event().wait(0.001)
        with socket.create_connection(listener.address) as stranger:
            assert is_closed(stranger)
        channels: list[Channel[MasterMessage]] = [Channel(each, MasterMessage) for each in agents]  # type: ignore[arg-type]
        channels[0].send(Arrived("a"))
        taken = arrival.wait(DEADLINE_S)
        assert taken is not None
    for each in (*channels, taken):
        each.close()
    listener.close()


def check_that_one_is_let_in(listener: Listener) -> None:
    with listener.expecting("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.wait(DEADLINE_S)
        assert channel is not None
    agent.close()
    channel.close()


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n", bytes(64)], ids=["HTTP", "zeros"])
def test_what_is_no_tls_is_turned_away(listener: Listener, content: bytes) -> None:
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(content)
        assert is_closed(stranger)


@pytest.mark.parametrize("content", [struct.pack("<I", 2**32 - 1), struct.pack("<I", 3) + b"abc", struct.pack("<I", 0)])
def test_a_first_frame_that_is_none_is_turned_away(listener: Listener, content: bytes) -> None:
    with IDENTITY.of_work_agent().wrap_socket(socket.create_connection(listener.address)) as stranger:
        stranger.sendall(content)
        assert is_closed(stranger)
    check_that_one_is_let_in(listener)


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(OSError):
        Listener("192.0.2.77", IDENTITY)


def test_without_a_secret_there_is_no_conversation(listener: Listener) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(listener.address)) as stranger:
        assert is_closed(stranger)


@pytest.mark.parametrize("stage", ["TCP", "TLS", "frame"])
def test_who_sends_a_byte_now_and_then_is_turned_away_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    show_in = listener._show_in

    def hurry(*arguments: Any) -> bool:
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
        return show_in(*arguments)

    if stage == "frame":  # a busy machine may take longer for what comes before
        monkeypatch.setattr(listener, "_show_in", hurry)
    else:
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
    with socket.create_connection(listener.address) as connection:
        if stage == "frame":
            with IDENTITY.of_work_agent().wrap_socket(connection) as stranger:
                assert trickle(stranger, struct.pack("<I", 1000) + bytes(1000))
        else:  # a record that announces 500 bytes of a greeting; or nothing at all
            assert trickle(connection, struct.pack(">BHH", 22, 0x0301, 500) + bytes(500) if stage == "TLS" else b"")


def trickle(connection: socket.socket, content: bytes) -> bool:
    """Whether the other side ends the conversation before all of it has been sent, 20 ms a byte."""
    connection.settimeout(0.02)
    for byte in [*content, *[None] * 500]:
        try:
            if byte is not None:
                connection.sendall(bytes([byte]))
            if not connection.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EHOSTUNREACH, errno.EPROTO, errno.EMFILE])
def test_whoever_cannot_be_taken_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    errors, accept = [OSError(number, "not now")], socket.socket.accept

    def fail_at_first(listening: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    with contextlib.closing(Listener("127.0.0.1", IDENTITY)) as listener, listener.expecting("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.wait(DEADLINE_S)
        assert channel is not None
        channel.close()
        agent.close()
    assert not errors
