"""Length-prefixed message frames on a stream socket, with deadlines and the detection of lost TCP peers."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from llm_serving.core.files import escape_surrogates
from llm_serving.errors import ChannelClosedError, DeadlineExceededError, ProtocolError

MAX_FRAME_BYTES = 64 * 2**20
"""Maximum bytes of a frame: 2,048 vectors of 8,192 numbers, or 20 log-probabilities for 400,000 tokens."""
KEEPALIVE_TIMEOUT_S: Final = 10
"""Seconds after which a machine that does not answer keepalive probes counts as lost."""
_KEEPALIVE_INTERVAL_S: Final = 2
_WAIT_INTERVAL_S: Final = 50e-6
"""Seconds between two polls of `wait_for_data`: a small part of the duration of a step on a device."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 65536

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of a connection. It sends messages of any type, and receives messages of the union `incoming`. A frame is
    a little-endian uint32 length and that many bytes of msgpack. If a deadline passes in the middle of a frame, the
    next call continues with the bytes already read. The channel owns the socket.
    """

    def __init__(self, sock: socket.socket, incoming: type[Incoming]) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.send_timeout_s: float | None = None
        self.poll_s = 0.0
        """Seconds for which `receive` polls a peer on this machine before it sleeps, because waking up takes time."""
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(
            incoming, dec_hook=lambda kind, text: kind(text)
        )
        self._encoder = msgspec.msgpack.Encoder(enc_hook=str)  # paths are sent as texts
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """Address of the peer's machine. Empty if the peer runs on this machine."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        return str(self._socket.getpeername()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Send one frame, with characters that UTF-8 cannot encode escaped. Only one thread may send at a time. Raise
        ProtocolError if the message exceeds `max_frame_bytes`, ChannelClosedError if the peer has exited, or has
        accepted nothing for `send_timeout_s`.
        """
        frame = bytearray(_LENGTH.size)
        try:
            self._encoder.encode_into(message, frame, _LENGTH.size)
        except UnicodeEncodeError:
            self._encoder.encode_into(_escaped(message), frame, _LENGTH.size)
        length = len(frame) - _LENGTH.size
        if length > self.max_frame_bytes:
            raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self.max_frame_bytes} bytes")
        _LENGTH.pack_into(frame, 0, length)
        try:
            self._socket.settimeout(self.send_timeout_s)
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(f"the connection failed: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Incoming:
        """Return the next message. Raise DeadlineExceededError if none is complete within `timeout_s` seconds. Raise
        ChannelClosedError if the peer has exited, ProtocolError if the frame is too long or not a known message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.max_frame_bytes:
            raise ProtocolError(f"a frame announces {length} bytes; the limit is {self.max_frame_bytes} bytes")
        self._fill(_LENGTH.size + length, deadline)
        try:
            with memoryview(self._received) as received, received[_LENGTH.size : _LENGTH.size + length] as payload:
                return self._decoder.decode(payload)
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is invalid UTF-8
            raise ProtocolError(f"a frame of {length} bytes is not a known message: {error}") from error
        finally:
            del self._received[: _LENGTH.size + length]

    def wait_for_data(self, is_over: Callable[[], bool]) -> bool:
        """Poll until data arrive. Return False as soon as `is_over`, which is called at each poll, returns True."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._received and not poll.poll(0):
            if is_over():
                return False
            time.sleep(_WAIT_INTERVAL_S)
        return True

    @property
    def has_frame(self) -> bool:
        received = len(self._received)
        return received >= _LENGTH.size and received >= _LENGTH.size + _LENGTH.unpack_from(self._received)[0]

    def shutdown(self) -> None:
        """Shut the connection down, which wakes a thread that is receiving. Raise OSError if it is already closed."""
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket.shutdown would drop the keys under a reader

    def close(self) -> None:
        self._socket.close()

    def _fill(self, num_bytes: int, deadline: float | None) -> None:
        while len(self._received) < num_bytes:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise DeadlineExceededError("no complete frame arrived in time")
            try:
                chunk = self._polled(remaining) if self.poll_s > 0 else None
                if chunk is None:
                    self._socket.settimeout(remaining)
                    chunk = self._socket.recv(_READ_BYTES)
            except TimeoutError as error:
                raise DeadlineExceededError("no complete frame arrived in time") from error
            except OSError as error:
                raise ChannelClosedError(f"the connection failed: {error}") from error
            if not chunk:
                raise ChannelClosedError("the peer closed the connection")
            self._received += chunk

    def _polled(self, remaining: float | None) -> bytes | None:
        now = time.monotonic()
        until = now + (self.poll_s if remaining is None else min(self.poll_s, remaining))
        self._socket.settimeout(None)
        while now < until:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # let other threads use this core
            now = time.monotonic()
        return None


def _escaped(message: msgspec.Struct) -> msgspec.Struct:
    values = ((name, getattr(message, name)) for name in message.__struct_fields__)
    return msgspec.structs.replace(
        message, **{name: escape_surrogates(value) for name, value in values if type(value) is str}
    )


def enable_keepalive(sock: socket.socket) -> None:
    """Let the kernel close a TCP connection if the peer's machine no longer answers. `recv` and `send` then fail."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_TIMEOUT_S // _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * KEEPALIVE_TIMEOUT_S)
