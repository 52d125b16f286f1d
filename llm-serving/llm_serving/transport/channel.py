"""Length-prefixed frames on a stream socket, with deadlines.

How a connection between machines tells that the other one is gone.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Final, Generic, TypeVar

import msgspec

from llm_serving.core.files import escaped
from llm_serving.errors import ChannelClosedError, DeadlineExceededError, ProtocolError

MAX_FRAME_BYTES = 64 * 2**20
"""Room for 2,048 vectors of 8,192 numbers, or for 20 log-probabilities of each of 400,000 tokens."""
_LENGTH = struct.Struct("<I")
_READ_BYTES = 65536

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of a connection: sends any message, receives those of one union.

    A frame is a little-endian uint32 length and that many bytes of msgpack. A frame is read whole or not at all: a
    deadline that passes in the middle of one leaves the read part in place for the next call.

    Args:
        sock: A connected stream socket; the channel owns it.
        incoming: The union of message types that may arrive.
    """

    def __init__(self, sock: socket.socket, incoming: type[Incoming]) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self.max_frame_bytes = MAX_FRAME_BYTES
        """Longest frame that is sent or taken."""
        self.send_timeout_s: float | None = None
        """Seconds in which the other side must take a frame; None: any time."""
        self.poll_s = 0.0
        """Seconds for which `receive` asks again and again before it sleeps, where the other end is on this machine: a
        processor that has fallen asleep may take as long to wake as a short step, in a virtual machine above all."""
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """Address of the machine at the other end; empty where that is this one's."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        return str(self._socket.getpeername()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Sends one frame; returns when the kernel has taken it. One thread at a time may send.

        What is no Unicode in its texts goes as an escape: the name of a file, or what an error tells of one.

        Raises:
            ProtocolError: The message is longer than a frame may be.
            ChannelClosedError: The other side is gone, or takes nothing for so long that it counts as gone.
        """
        frame = bytearray(_LENGTH.size)
        try:
            self._encoder.encode_into(message, frame, _LENGTH.size)
        except UnicodeEncodeError:
            self._encoder.encode_into(_escaped(message), frame, _LENGTH.size)
        length = len(frame) - _LENGTH.size
        if length > self.max_frame_bytes:
            raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self.max_frame_bytes}")
        _LENGTH.pack_into(frame, 0, length)
        try:
            self._socket.settimeout(self.send_timeout_s)
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(f"the other side is gone: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Incoming:
        """Returns the next message.

        Args:
            timeout_s: Seconds until it must be complete; None: no limit.

        Raises:
            DeadlineExceededError: Nothing complete arrived within `timeout_s` seconds.
            ChannelClosedError: The other side closed the connection or died.
            ProtocolError: The frame is too long or is no message that may arrive here.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(_LENGTH.size, deadline)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.max_frame_bytes:
            raise ProtocolError(f"a frame announces {length} bytes; the limit is {self.max_frame_bytes}")
        self._fill(_LENGTH.size + length, deadline)
        try:
            with memoryview(self._received) as received, received[_LENGTH.size : _LENGTH.size + length] as payload:
                return self._decoder.decode(payload)
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is invalid UTF-8
            raise ProtocolError(f"a frame of {length} bytes is no known message: {error}") from error
        finally:
            del self._received[: _LENGTH.size + length]

    @property
    def has_frame(self) -> bool:
        """Whether a whole frame has come already, so that `receive` reads nothing more."""
        received = len(self._received)
        return received >= _LENGTH.size and received >= _LENGTH.size + _LENGTH.unpack_from(self._received)[0]

    def shutdown(self) -> None:
        """Ends the conversation on both sides; a thread that receives is told. From any thread.

        Raises:
            OSError: It has ended.
        """
        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS would take the keys from who reads

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
                raise ChannelClosedError(f"the other side is gone: {error}") from error
            if not chunk:
                raise ChannelClosedError("the other side closed the connection")
            self._received += chunk

    def _polled(self, remaining: float | None) -> bytes | None:
        """What comes within `poll_s` and `remaining` seconds; None: nothing."""
        now = time.monotonic()
        until = now + (self.poll_s if remaining is None else min(self.poll_s, remaining))
        self._socket.settimeout(None)
        while now < until:
            try:
                return self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()  # whoever else has work for this processor does it
            now = time.monotonic()
        return None


def _escaped(message: msgspec.Struct) -> msgspec.Struct:
    values = ((name, getattr(message, name)) for name in message.__struct_fields__)
    return msgspec.structs.replace(message, **{name: escaped(value) for name, value in values if type(value) is str})


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
