"""Hostile clients for `attacks.py`, which attacks a server with hundreds of them and measures it meanwhile.

python tests/tools/attackers.py NAME PORT     # run one attack; print bytes sent and how connections ended, as JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.key_updates import KeyLoggingContext

MEBI = 2**20
OPENED_AT_ONCE = 20
"""Connections that an attack opens before it continues with the open ones."""
RECORDS_AT_ONCE = 100
"""Key updates that are encrypted at a time."""
DRIP_S = 0.5
"""Seconds between two bytes of a slow client."""


def get(path: str = "/health") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = post(
    "/v1/completions", b'{"prompt": "Count from 1 to 60.", "stream": true, "max_tokens": 400, "ignore_eos": true}'
)

LARGE_STREAM = post(
    "/v1/chat/completions",
    b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "max_tokens": 1900, "ignore_eos": true, '
    b'"logprobs": true, "top_logprobs": 20}',
)
LONG_CONVERSATION = post(
    "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"a b " * (MEBI - 32))
)


def client_hello() -> bytes:
    """Return the first TLS message of a client, to which the server answers with a signature."""
    context = ssl.create_default_context()
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="127.0.0.1").do_handshake()
    return sent.read()


@dataclass(frozen=True)
class Attack:
    """What each connection of an attack sends: `begin`, then `unit` repeatedly, or `drip` every `DRIP_S`."""

    begin: bytes = b""
    unit: bytes = b""
    drip: bytes = b""
    count: int = 8
    """Number of connections."""
    num_addresses: int = 1
    max_bytes: int = 64 * MEBI
    """Maximum number of bytes that a connection sends."""
    seconds: float = 4.0
    reads: bool = False
    returns: bool = False
    """Whether a closed connection is opened again."""
    tls: bool = False
    """Whether the server has a certificate."""
    num_records: int = 0
    """Number of one-byte TLS records that follow `begin` after a handshake."""
    changes_keys: bool = False
    """Whether the connection then sends key updates without end, each of which asks the server for one."""


def any_server() -> ssl.SSLContext:
    """Return the context of a client that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


HELLO = client_hello()
ANY_SERVER = KeyLoggingContext(any_server())
HEADER, TRAILERS = b"X-Aaaaaa: bbbbbb\r\n", CHUNKED + b"1\r\na\r\n0\r\n"
ATTACKS = {
    "none": Attack(count=1),
    "endless headers": Attack(b"GET /health HTTP/1.1\r\n", HEADER * 4096),
    "one endless header": Attack(b"GET /health HTTP/1.1\r\nX: ", b"a" * 65536),
    "endless URL": Attack(b"GET /", b"a" * 65536),
    "endless trailers": Attack(TRAILERS, HEADER * 4096),
    "one endless trailer": Attack(TRAILERS + b"X: ", b"a" * 65536),
    "endless chunk extension": Attack(CHUNKED + b"1;e=", b"a" * 65536),
    "chunks of one byte": Attack(CHUNKED, b"1\r\n \r\n" * 8192),
    "no HTTP": Attack(b"\x16\x03\x01\x02\x00\x01", b"\x00" * 65536),
    "requests without end, answers unread": Attack(unit=get() * 1024),
    "requests without end behind a stream": Attack(STREAM, get() * 1024),
    "requests without end, answers read": Attack(unit=get() * 64, reads=True),
    "a body without end": Attack(
        b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n", b"a" * 65536
    ),
    "bodies of 4 MiB without their last byte": Attack(
        post("/v1/completions", b"", 4 * MEBI), b" " * 65535, count=200, max_bytes=4 * MEBI - 65536, seconds=12.0
    ),
    "conversations of 4 MiB without end": Attack(
        unit=LONG_CONVERSATION, count=40, num_addresses=10, seconds=8.0, reads=True, returns=True
    ),
    "2,000 silent connections": Attack(count=2000, seconds=12.0),
    "2,000 silent connections, 10 addresses": Attack(count=2000, num_addresses=10, seconds=12.0),
    "connections without end": Attack(count=500, num_addresses=10, seconds=6.0, returns=True),
    "1,000 slow headers": Attack(b"GET /health HTTP/1.1\r\nX: ", drip=b"a", count=1000, num_addresses=4, seconds=13.0),
    "1,000 slow bodies": Attack(
        post("/v1/completions", b"{", 10**6), drip=b" ", count=1000, num_addresses=4, seconds=14.0
    ),
    "1,000 idle connections": Attack(get(), count=1000, num_addresses=4, seconds=12.0, reads=True),
    "300 streams unread": Attack(STREAM * 3, count=300, num_addresses=4, seconds=14.0),
    "64 streams with log-probabilities unread": Attack(LARGE_STREAM, count=64, num_addresses=4, seconds=14.0),
    "300 x 200 large answers unread": Attack(get("/openapi.json") * 200, count=300, num_addresses=4, seconds=14.0),
    "TLS: 1,000 silent handshakes": Attack(HELLO[:50], count=1000, num_addresses=4, seconds=12.0, tls=True),
    "TLS: 1,000 handshakes not gone on with": Attack(HELLO, count=1000, num_addresses=4, seconds=12.0, tls=True),
    "TLS: handshakes without end": Attack(
        HELLO, count=500, num_addresses=10, seconds=6.0, reads=True, returns=True, tls=True
    ),
    "TLS: records of a byte": Attack(
        post("/v1/completions", b"", 4 * MEBI), count=100, num_addresses=10, seconds=6.0, tls=True, num_records=3_000
    ),
    "TLS: keys changed without end": Attack(
        post("/v1/completions", b"", 4 * MEBI), count=20, num_addresses=10, seconds=10.0, tls=True, changes_keys=True
    ),
    "TLS: no handshake": Attack(b"\x16\x03\x01\x40\x00", b"\x00" * 65536, tls=True),
}


class Attacker:
    """One connection of an attack."""

    def __init__(self, attack: Attack, number: int, port: int) -> None:
        self._attack = attack
        self._address = (f"127.0.1.{1 + number % attack.num_addresses}", 0)
        self._port = port
        self.ends: Counter[str] = Counter()
        self.sent = 0
        self.open()

    def open(self) -> None:
        self._left = self._attack.begin
        self._key_updates: Iterator[bytes] = iter(())
        self._received = b""
        self.socket = socket.socket()
        if not self._attack.reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.bind(self._address)
        self.socket.settimeout(5.0)
        try:
            self.socket.connect(("127.0.0.1", self._port))
            if self._attack.num_records or self._attack.changes_keys:
                self._left = self._encrypted()
        except OSError:
            self._end("no connection")
            return
        self.socket.setblocking(False)

    def _encrypted(self) -> bytes:
        """Do a handshake; return the encrypted bytes to send after it."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = ANY_SERVER.context.wrap_bio(incoming, outgoing)
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                session.do_handshake()
                break
            self.socket.sendall(outgoing.read())
            if not incoming.write(self.socket.recv(65536)):
                raise ConnectionAbortedError
        session.write(self._attack.begin)
        for _ in range(self._attack.num_records):
            session.write(b" ")
        if self._attack.changes_keys:
            self._key_updates = ANY_SERVER.key_updates(session, 1 + self._attack.num_records, asks=True)
        return outgoing.read()

    @property
    def _repeats(self) -> bool:
        return bool(self._attack.unit) or self._attack.changes_keys

    @property
    def ended(self) -> bool:
        return self.socket.fileno() < 0

    def act(self) -> None:
        """Send and read without blocking."""
        try:
            if not self._left and self._repeats and self.sent < self._attack.max_bytes:
                self._left = self._attack.unit or b"".join(islice(self._key_updates, RECORDS_AT_ONCE))
            if self._left:
                size = self.socket.send(self._left)
                self.sent += size
                self._left = self._left[size:]
        except BlockingIOError:
            pass
        except OSError:
            self._end_by_server()
            return
        if self._attack.reads or not self._left:
            self._receive(65536 if self._attack.reads or self._attack.unit else 0)

    def drip(self) -> None:
        self._left = self._left or self._attack.drip

    def close(self) -> None:
        """Close the connection if the server has not closed it."""
        if not self.ended:
            self._receive(4096)
        if not self.ended:
            self._end("left open" + (f" after {self._status}" if self._status else ""))

    @property
    def _status(self) -> str:
        return self._received[9:12].decode("latin-1") if self._received.startswith(b"HTTP/") else ""

    def _receive(self, size: int) -> None:
        """Read up to `size` bytes; with size 0 only check whether the server has closed the connection."""
        try:
            data = self.socket.recv(size or 64, 0 if size else socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._end_by_server()
            return
        self._received = self._received or data[:64]
        if not data:
            self._end_by_server()

    def _end_by_server(self) -> None:
        """Close the connection after the server has, with the status of its response."""
        with contextlib.suppress(OSError):
            self._received = self._received or self.socket.recv(64)
        self._end(f"ended with {self._status}" if self._status else "ended")

    def _end(self, how: str) -> None:
        self.ends[how] += 1
        self.socket.close()


@dataclass(frozen=True)
class Outcome:
    """Bytes sent and ends of connections of an attack."""

    sent: int
    """Bytes sent by all connections."""
    ends: dict[str, int]
    """Number of connections by how they ended."""


def run(attack: Attack, port: int) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard >= 0 else max(soft, 65536), hard))
    deadline = time.monotonic() + attack.seconds
    attackers: list[Attacker] = []
    next_drip = time.monotonic()

    def is_active() -> bool:
        return len(attackers) < attack.count or attack.returns or not all(each.ended for each in attackers)

    with selectors.DefaultSelector() as idle:
        while time.monotonic() < deadline and is_active():
            for number in range(len(attackers), min(len(attackers) + OPENED_AT_ONCE, attack.count)):
                attackers.append(Attacker(attack, number, port))
            if time.monotonic() >= next_drip:
                next_drip += DRIP_S
                for each in attackers:
                    each.drip()
            before = sum(each.sent for each in attackers)
            for each in attackers:
                if attack.returns:
                    each.close()
                    each.open()
                if not each.ended:
                    each.act()
            if sum(each.sent for each in attackers) == before:
                idle.select(0.01)
    for each in attackers:
        each.close()
    ends: Counter[str] = Counter()
    for each in attackers:
        ends += each.ends
    return Outcome(sum(each.sent for each in attackers), dict(ends.most_common()))


def smaller(attack: Attack) -> Attack:
    """Return the attack reduced to less than a second."""
    return replace(attack, count=min(attack.count, 6), seconds=min(attack.seconds, 0.5), max_bytes=8 * MEBI)


def yield_processors() -> None:
    """Lower the scheduling priority of this process, because real attackers would not use the server's processors.

    With autogroups the kernel shares processors between sessions, and priorities count only within a session. So this
    process gets a session of its own.
    """
    os.setsid()
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


if __name__ == "__main__":
    yield_processors()
    outcome = run(ATTACKS[sys.argv[1]], int(sys.argv[2]))
    sys.stdout.write(json.dumps({"sent": outcome.sent, "ends": outcome.ends}) + "\n")
