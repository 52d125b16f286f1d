"""The port to which WorkAgents of other machines connect."""

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
from llm_serving.transport.messages import Attach, Hello, MasterMessage, Welcome
from llm_serving.transport.tls_identity import ClusterIdentity

IDENTITY = ClusterIdentity("0123456789abcdef" * 2)
DEADLINE_S = 10.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", IDENTITY)
    yield listener
    listener.close()


def come_in(listener: Listener, token: str) -> Channel[MasterMessage]:
    connection = IDENTITY.client_context().wrap_socket(socket.create_connection(listener.address, DEADLINE_S))
    channel: Channel[MasterMessage] = Channel(connection, MasterMessage)  # type: ignore[arg-type]
    channel.send(Attach(token))
    return channel


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(DEADLINE_S)
    try:
        return not connection.recv(1)
    except OSError as error:
        return not isinstance(error, TimeoutError)


def test_listener_hands_connections_to_the_start_of_their_token(listener: Listener) -> None:
    with listener.expect("a") as first, listener.expect("b") as second:
        agents = {token: come_in(listener, token) for token in ("b", "a")}
        for token, arrival in (("a", first), ("b", second)):
            channel = arrival.get(timeout=DEADLINE_S)
            assert channel is not None
            channel.send(Hello(7))
            assert agents[token].receive(DEADLINE_S) == Hello(7)
            agents[token].send(Welcome(7, 1, token))
            assert channel.receive(DEADLINE_S) == Welcome(7, 1, token)
            channel.close()
            agents[token].close()


def test_listener_rejects_unknown_used_and_expired_tokens(listener: Listener) -> None:
    with listener.expect("a") as arrival:
        strangers = [come_in(listener, "b")]
        assert is_closed(strangers[0]._socket)
        agent = come_in(listener, "a")
        channel = arrival.get(timeout=DEADLINE_S)
        assert channel is not None
        strangers.append(come_in(listener, "a"))
        assert is_closed(strangers[1]._socket)
    strangers.append(come_in(listener, "a"))
    assert is_closed(strangers[2]._socket)
    for each in (*strangers, agent, channel):
        each.close()


def test_listener_limits_the_first_frame(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 300.0)
    connection = IDENTITY.client_context().wrap_socket(socket.create_connection(listener.address, DEADLINE_S))
    connection.sendall(struct.pack("<I", module.MAX_ATTACH_BYTES + 1))
    assert is_closed(connection)
    connection.close()


def test_a_connection_after_the_end_of_its_start_is_closed(listener: Listener) -> None:
    with listener.expect("a") as arrival:
        agent = come_in(listener, "a")
        arrival.put(arrival.get(timeout=DEADLINE_S))  # connected, but no caller waits for it
    assert is_closed(agent._socket)
    agent.close()


def test_listener_survives_a_lack_of_threads(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_failed = threading.Thread.start, 0

    def fail_first(thread: threading.Thread) -> None:
        nonlocal num_failed
        if thread._target == listener._handshake and num_failed < module.MAX_HANDSHAKES:  # type: ignore[attr-defined]
            num_failed += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_first)
    for _ in range(module.MAX_HANDSHAKES):
        with socket.create_connection(listener.address, DEADLINE_S) as connection:
            assert is_closed(connection)
    check_that_one_is_let_in(listener)


def test_silent_connections_do_not_delay_others(listener: Listener) -> None:
    silent = [socket.create_connection(listener.address) for _ in range(8)]
    with listener.expect("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.get(timeout=DEADLINE_S)
        assert channel is not None
    for each in (*silent, agent, channel):
        each.close()


def test_a_new_connection_drops_a_silent_one_at_the_limit(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: as many silent connections as the limit excluded WorkAgents until their timeout."""
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 300.0)
    silent = [socket.create_connection(listener.address) for _ in range(module.MAX_HANDSHAKES)]
    check_that_one_is_let_in(listener)
    assert is_closed(silent[0])
    for each in silent:
        each.close()


def small_listener(monkeypatch: pytest.MonkeyPatch, places: int) -> Listener:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", places)
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 300.0)
    return Listener("127.0.0.1", IDENTITY)


def come_from(listener: Listener, host: str) -> socket.socket:
    return socket.create_connection(listener.address, DEADLINE_S, (host, 0))


def test_the_oldest_connection_of_the_busiest_address_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = small_listener(monkeypatch, places=3)
    hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.3", "127.0.0.3")
    first, *others = [come_from(listener, host) for host in hosts]
    assert is_closed(others[0])
    first.sendall(b"no TLS at all")
    assert is_closed(first), "it was there to be answered"
    for each in (first, *others):
        each.close()
    listener.close()


def test_an_authenticated_connection_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = small_listener(monkeypatch, places=2)
    with listener.expect("a") as arrival:
        agents = [
            IDENTITY.client_context().wrap_socket(socket.create_connection(listener.address, DEADLINE_S)) for _ in "ab"
        ]
        while listener._handshakes._connections:
            threading.Event().wait(0.001)
        strangers = [come_from(listener, "127.0.0.2") for _ in range(3)]
        assert is_closed(strangers[0]), "the limit applies to unauthenticated connections"
        channels: list[Channel[MasterMessage]] = [Channel(each, MasterMessage) for each in agents]  # type: ignore[arg-type]
        channels[0].send(Attach("a"))
        taken = arrival.get(timeout=DEADLINE_S)
        assert taken is not None
    for each in (*channels, *strangers, taken):
        each.close()
    listener.close()


def check_that_one_is_let_in(listener: Listener) -> None:
    with listener.expect("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.get(timeout=DEADLINE_S)
        assert channel is not None
    agent.close()
    channel.close()


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n\r\n", bytes(64)], ids=["HTTP", "zeros"])
def test_listener_rejects_plain_text(listener: Listener, content: bytes) -> None:
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(content)
        assert is_closed(stranger)


@pytest.mark.parametrize("content", [struct.pack("<I", 2**32 - 1), struct.pack("<I", 3) + b"abc", struct.pack("<I", 0)])
def test_listener_rejects_an_invalid_first_frame(listener: Listener, content: bytes) -> None:
    with IDENTITY.client_context().wrap_socket(socket.create_connection(listener.address)) as stranger:
        stranger.sendall(content)
        assert is_closed(stranger)
    check_that_one_is_let_in(listener)


def test_listener_cannot_bind_an_address_of_another_machine() -> None:
    with pytest.raises(OSError):
        Listener("192.0.2.77", IDENTITY)


def test_listener_rejects_clients_without_the_secret(listener: Listener) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(listener.address)) as stranger:
        assert is_closed(stranger)


@pytest.mark.parametrize("stage", ["TCP", "TLS", "frame"])
def test_listener_closes_slow_senders_in_time(listener: Listener, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    show_in = listener._attach

    def hurry(*arguments: Any) -> bool:
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
        return show_in(*arguments)

    if stage == "frame":  # a busy machine may take longer for what comes before
        monkeypatch.setattr(listener, "_attach", hurry)
    else:
        monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.2)
    with socket.create_connection(listener.address) as connection:
        if stage == "frame":
            with IDENTITY.client_context().wrap_socket(connection) as stranger:
                assert trickle(stranger, struct.pack("<I", 1000) + bytes(1000))
        else:  # a record that announces 500 bytes of a greeting; or nothing at all
            assert trickle(connection, struct.pack(">BHH", 22, 0x0301, 500) + bytes(500) if stage == "TLS" else b"")


def trickle(connection: socket.socket, content: bytes) -> bool:
    """Send a byte every 20 ms; return whether the peer closes the connection before the end."""
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
def test_a_failed_accept_does_not_block_later_connections(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    errors, accept = [OSError(number, "not now")], socket.socket.accept

    def fail_at_first(listening: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    monkeypatch.setattr(module, "ACCEPT_RETRY_S", 0.0)
    with contextlib.closing(Listener("127.0.0.1", IDENTITY)) as listener, listener.expect("a") as arrival:
        agent = come_in(listener, "a")
        channel = arrival.get(timeout=DEADLINE_S)
        assert channel is not None
        channel.close()
        agent.close()
    assert not errors
