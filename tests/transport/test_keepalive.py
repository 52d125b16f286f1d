"""TCP keepalive over a real connection between two network namespaces whose link is cut."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from llm_serving.transport import channel
from llm_serving.transport.channel import enable_keepalive
from support.virtual_network import HERE, Break, Link, VirtualNetwork, usable, virtual_network

pytestmark = pytest.mark.skipif(not usable(), reason="needs root, ip and /dev/net/tun")

ECHO = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    while data := connection.recv(4096):
        connection.sendall(data)
"""
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def network() -> Iterator[VirtualNetwork]:
    with virtual_network(HERE, "there") as network:
        yield network


@pytest.fixture
def connection(network: VirtualNetwork, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Connect to a program on the other machine that returns what it receives; 1 s of silence ends the connection."""
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_S", 1)
    monkeypatch.setattr(channel, "_KEEPALIVE_INTERVAL_S", 1)
    with socket.create_server((network.hosts[HERE].address, 0)) as listener:
        command = network.hosts["there"].command([sys.executable, "-c", ECHO])
        process = subprocess.Popen([*command, *map(str, listener.getsockname())], stderr=subprocess.DEVNULL)
        listener.settimeout(DEADLINE_S)
        connection, _ = listener.accept()
    connection.settimeout(DEADLINE_S)
    enable_keepalive(connection)
    with connection:
        yield connection
    network.restore("there")
    process.kill()
    process.wait()


def echoes(connection: socket.socket) -> bool:
    connection.sendall(b"?")
    return connection.recv(1) == b"?"


CUTS = [(False, ("to", "from")), (True, ("to", "from")), (True, ("to",)), (True, ("from",))]


@pytest.mark.parametrize("busy, directions", CUTS)
def test_keepalive_closes_the_connection_over_a_cut_link(
    network: VirtualNetwork, connection: socket.socket, busy: bool, directions: Any
) -> None:
    assert echoes(connection)
    network.cut("there", *directions)
    if busy:
        connection.sendall(b"?")
    with pytest.raises(OSError) as raised:
        connection.recv(1)
    assert raised.value.errno is not None, "the kernel ended it, not the deadline of this test"


def test_connection_survives_packet_loss_and_duplication(network: VirtualNetwork, connection: socket.socket) -> None:
    for direction in ("to", "from"):
        network.set_link("there", direction, Link(delay_s=0.001, loss=0.05, duplicates=0.3))
    assert all(echoes(connection) for _ in range(20))


@pytest.mark.parametrize("after_bytes", range(50_000, 60_000, 2_000))
def test_connection_reset_is_detected_at_any_frame(
    network: VirtualNetwork, connection: socket.socket, after_bytes: int
) -> None:
    assert echoes(connection)
    port = connection.getpeername()[1]
    network.set_break("there", port, Break(after_bytes, Link(), resets=True))
    assert network.bytes_before_break("there", port) > 0
    with pytest.raises(ConnectionResetError):
        while True:
            connection.sendall(bytes(4096))
            connection.recv(4096)
    assert network.bytes_before_break("there", port) <= 0


def test_keepalive_closes_only_the_cut_connection(network: VirtualNetwork, connection: socket.socket) -> None:
    network.set_break("there", connection.getpeername()[1] + 1, Break(0))
    assert echoes(connection)
    network.set_break("there", connection.getpeername()[1], Break(0))
    connection.sendall(b"?")
    with pytest.raises(OSError) as raised:
        connection.recv(1)
    assert raised.value.errno is not None
