"""Several virtual machines on this one: network namespaces, joined by a switch that loses, delays and duplicates
frames.

The namespaces, their TCP and its timers are the kernel's. Each has one network device, a TAP, whose other end is the
switch: a process that forwards every Ethernet frame. So a link can be cut in one direction without any notification, as
when a cable, a route or a firewall fails. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

SUBNET: Final = f"10.77.{os.getpid() % 256}"
"""First three bytes of the addresses, which depend on the process so that two programs rarely have the same."""
HERE: Final = "here"
"""The host that is this machine, without a namespace; its address is SUBNET.1."""
_SET_INTERFACE: Final = 0x400454CA  # TUNSETIFF
_TAP_WITHOUT_HEADER: Final = 0x1002  # IFF_TAP | IFF_NO_PI
_LONGEST_FRAME: Final = 65536
_BROADCAST: Final = b"\xff" * 6
_ETHERNET_BYTES: Final = 14
_IPV4: Final = b"\x08\x00"
_TCP: Final = 6
_RST: Final = 4
_ACK: Final = 16

Direction = Literal["to", "from"]
"""Direction as seen from a host: frames sent to it, and frames from it."""


@dataclass(frozen=True, slots=True)
class Link:
    """The treatment of a host's frames in one direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of lost frames; 1: the link is cut."""
    duplicates: float = 0.0
    """Share of duplicated frames; the copy is up to 20 ms late, after other frames."""


CUT: Final = Link(loss=1.0)
_LATE_S: Final = 0.02


@dataclass(slots=True)
class Break:
    """The treatment of one TCP connection of a host after some bytes."""

    after_bytes: int
    """Bytes of frames in both directions until the break; each frame reduces them."""
    link: Link = CUT
    directions: tuple[Direction, ...] = ("to", "from")
    resets: bool = False
    """Whether both ends get a reset at the next frame, as from a firewall; otherwise frames are lost."""


def usable() -> bool:
    """Return whether this process may create namespaces and devices."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and Path("/dev/net/tun").exists() and _may_make_one()


def _may_make_one() -> bool:
    name = f"llm-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


@dataclass
class Host:
    """A namespace with one device."""

    name: str
    number: int
    namespace: str | None
    """Name of the namespace; None: this machine's."""

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    @property
    def mac(self) -> bytes:
        return bytes((2, 0x77, 0, 0, 0, self.number))

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs another command on this host."""
        return [*(["ip", "netns", "exec", self.namespace] if self.namespace else []), *arguments]

    def pids(self) -> list[int]:
        """Return the processes of the namespace."""
        assert self.namespace is not None
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@dataclass
class VirtualNetwork:
    """Hosts on one Ethernet, each of which reaches all others; `virtual_network` creates them."""

    hosts: dict[str, Host]
    _switch: Connection

    def set_link(self, host: str, direction: Direction, link: Link) -> None:
        """Set the treatment of later frames."""
        self._switch.send((self.hosts[host].number, direction, link))
        self._switch.recv()

    def set_break(self, host: str, port: int, planned: Break) -> None:
        """Break the connection that has this port on the host."""
        self._switch.send((self.hosts[host].number, port, planned))
        self._switch.recv()

    def bytes_before_break(self, host: str, port: int) -> int:
        """Return the bytes until the break; at most 0 after it."""
        self._switch.send((self.hosts[host].number, port, None))
        left: int = self._switch.recv()
        return left

    def restore_connection(self, host: str, port: int) -> None:
        self.set_break(host, port, Break(0, Link()))

    def cut(self, host: str, *directions: Direction) -> None:
        for direction in directions:
            self.set_link(host, direction, CUT)

    def restore(self, host: str) -> None:
        for direction in ("to", "from"):
            self.set_link(host, direction, Link())


@contextlib.contextmanager
def virtual_network(*names: str) -> Iterator[VirtualNetwork]:
    """Create hosts of these names, of which `HERE` may be one; processes in the namespaces must end first."""
    hosts = {
        name: Host(name, number, None if name == HERE else f"llm-{os.getpid()}-{name}")
        for number, name in enumerate(sorted(names, key=lambda name: name != HERE), start=1 if HERE in names else 2)
    }
    with contextlib.ExitStack() as undo:
        fds = {host.number: undo.enter_context(_device(host)) for host in hosts.values()}
        ours, theirs = multiprocessing.Pipe()
        switch = multiprocessing.get_context("fork").Process(target=_switch, args=(fds, theirs, ours), daemon=True)
        switch.start()
        theirs.close()
        undo.callback(switch.join)
        undo.callback(ours.close)  # ends the switch
        yield VirtualNetwork(hosts, ours)


@contextlib.contextmanager
def _device(host: Host) -> Iterator[int]:
    """Create a device of the host with its address; return the switch's end of it."""
    name = f"llm{os.getpid() % 10**7}-{host.number}"
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    inside: list[str] = []
    try:
        fcntl.ioctl(fd, _SET_INTERFACE, struct.pack("16sH14x", name.encode(), _TAP_WITHOUT_HEADER))
        if host.namespace is not None:
            _ip("netns", "add", host.namespace)
            inside = ["-n", host.namespace]
            _ip("link", "set", name, "netns", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", name, "address", host.mac.hex(":"), "up")
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", name)
        yield fd
    finally:
        os.close(fd)
        if inside:
            _ip("netns", "del", inside[1])


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _switch(fds: dict[int, int], orders: Connection, other_end: Connection) -> None:
    """Forward frames until the other end of `orders` is closed."""
    other_end.close()
    rng = random.Random(0)
    links: dict[tuple[int, str], Link] = {}
    breaks: dict[tuple[int, int], Break] = {}
    due: list[tuple[float, int, int, bytes]] = []
    """Frames by due time: time, sequence number, host, content."""
    count = itertools.count()
    numbers = {fd: number for number, fd in fds.items()}
    ready = select.poll()  # supports descriptors above 1,023
    for fd in (*numbers, orders.fileno()):
        ready.register(fd, select.POLLIN)

    def forward(now: float, sender: int, frame: bytes) -> None:
        outward = links.get((sender, "from"), Link())
        ports = _ports(frame) if breaks else None
        targets = [n for n in fds if n != sender] if frame[:6] == _BROADCAST else [frame[5]]
        for target in [each for each in targets if each in fds]:
            passed = [outward, links.get((target, "to"), Link())]
            if ports is not None:
                ends = ((sender, ports[0], "from"), (target, ports[1], "to"))
                broken = [
                    _active_break(breaks.get((number, port)), direction, frame) for number, port, direction in ends
                ]
                passed += [each.link for each in broken if each is not None]
                if any(each is not None and each.resets for each in broken):
                    heapq.heappush(due, (now, next(count), sender, _reset_to_sender(frame)))
                    frame = _reset(frame)
            if any(link.loss and rng.random() < link.loss for link in passed):
                continue
            at = now + sum(link.delay_s for link in passed)
            heapq.heappush(due, (at, next(count), target, frame))
            if any(link.duplicates and rng.random() < link.duplicates for link in passed):
                heapq.heappush(due, (at + rng.uniform(0.0, _LATE_S), next(count), target, frame))

    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, target, frame = heapq.heappop(due)
            with contextlib.suppress(OSError):  # its queue is full, or the device is down: the frame is lost
                os.write(fds[target], frame)
        # whole milliseconds: late by at most one
        wait_ms = 1e3 * max(due[0][0] - time.monotonic(), 0.0) if due else None
        for fd, _ in ready.poll(wait_ms):
            if fd in numbers:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        forward(time.monotonic(), numbers[fd], os.read(fd, _LONGEST_FRAME))
                continue
            try:
                number, where, order = orders.recv()
            except EOFError:
                return
            if order is None:
                orders.send(breaks[number, where].after_bytes)
                continue
            known: dict[tuple[int, Any], Any] = breaks if isinstance(order, Break) else links
            known[number, where] = order
            orders.send(0)


def _ports(frame: bytes) -> tuple[int, int] | None:
    """Return the ports of sender and receiver; None for a frame without a TCP segment."""
    if frame[12:14] != _IPV4 or frame[23] != _TCP:
        return None
    begin = _ETHERNET_BYTES + 4 * (frame[14] & 15)
    return int.from_bytes(frame[begin : begin + 2]), int.from_bytes(frame[begin + 2 : begin + 4])


def _active_break(planned: Break | None, direction: str, frame: bytes) -> Break | None:
    """Count a frame of a connection; return the break if it applies to frames of this direction now."""
    if planned is None:
        return None
    if planned.after_bytes > 0:
        planned.after_bytes -= len(frame)
        return None
    return planned if direction in planned.directions else None


def _reset(frame: bytes) -> bytes:
    """Return the segment without payload and with the reset flag."""
    ip = bytearray(frame[_ETHERNET_BYTES : _ETHERNET_BYTES + 20])
    begin = _ETHERNET_BYTES + 4 * (ip[0] & 15)
    tcp = bytearray(frame[begin : begin + 20])
    ip[0], ip[2:4], ip[10:12] = 0x45, (40).to_bytes(2), bytes(2)
    tcp[12], tcp[13], tcp[16:18] = 5 << 4, _RST | _ACK, bytes(2)
    ip[10:12] = _checksum(bytes(ip))
    tcp[16:18] = _checksum(bytes(ip[12:20]) + bytes((0, _TCP)) + len(tcp).to_bytes(2) + bytes(tcp))
    return frame[:_ETHERNET_BYTES] + bytes(ip) + bytes(tcp)


def _reset_to_sender(frame: bytes) -> bytes:
    """Return the reset that ends the connection for the sender of a segment with an acknowledgement.

    Its sequence number must be the next byte that the sender expects, because other resets are ignored (RFC 5961).
    """
    reset = bytearray(_reset(frame))
    tcp = _ETHERNET_BYTES + 20
    reset[0:6], reset[6:12] = frame[6:12], frame[0:6]
    for begin, width in ((_ETHERNET_BYTES + 12, 4), (tcp, 2)):
        middle, end = begin + width, begin + 2 * width
        reset[begin:middle], reset[middle:end] = reset[middle:end], reset[begin:middle]
    reset[tcp + 4 : tcp + 8], reset[tcp + 8 : tcp + 12] = reset[tcp + 8 : tcp + 12], reset[tcp + 4 : tcp + 8]
    return bytes(reset)  # swapping the addresses and ports does not change the checksums


def _checksum(content: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2)
