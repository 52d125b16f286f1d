"""How a connection between machines tells that the other one is gone."""

from __future__ import annotations

import socket
from typing import Final

SILENCE_S: Final = 10
"""Seconds of silence, although asked, after which the other machine counts as gone: lost, or cut off."""
_PROBE_S: Final = 2


def notice_silence(sock: socket.socket) -> None:
    """Has the kernel end a TCP connection whose other machine is silent: when idle by probes, else by what is not
    acknowledged. Then `recv` and `send` fail, and the descriptor is readable. A process that hangs on a living machine
    is noticed by deadlines only."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S // _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)
