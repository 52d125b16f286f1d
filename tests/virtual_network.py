"""Several machines on one: network namespaces, joined by a switch that loses, delays and repeats what it is told to.

The namespaces, their TCP and its timers are the kernel's; each has one network device, a TAP whose other end is a
program: the switch, a process that hands every Ethernet frame on. So a link can be cut in one direction, with nobody
told, as when a cable, a route or a firewall fails. Needs root, `ip` and /dev/net/tun.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal

SUBNET: Final = "10.77.0"
HERE: Final = "here"
"""The host that has no namespace of its own: it is this one, at SUBNET.1."""
_SET_INTERFACE: Final = 0x400454CA  # TUNSETIFF
_TAP_WITHOUT_HEADER: Final = 0x1002  # IFF_TAP | IFF_NO_PI
_LONGEST_FRAME: Final = 65536
_EVERYBODY: Final = b"\xff" * 6

Direction = Literal["to", "from"]
"""Seen from a host: what others send it, and what it sends."""


@dataclass(frozen=True, slots=True)
class Link:
    """What happens to the frames of a host in one direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    """Share of frames; 1: the link is cut."""
    duplicates: float = 0.0
    """Share of frames that come twice, the second time up to 20 ms late, behind others."""


CUT: Final = Link(loss=1.0)
_LATE_S: Final = 0.02


def usable() -> bool:
    """Whether this process may make namespaces and devices."""
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
    """None: this one."""

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    @property
    def mac(self) -> bytes:
        return bytes((2, 0x77, 0, 0, 0, self.number))

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs another one on this host."""
        return [*(["ip", "netns", "exec", self.namespace] if self.namespace else []), *arguments]

    def pids(self) -> list[int]:
        """Processes of the namespace."""
        assert self.namespace is not None
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@dataclass
class VirtualNetwork:
    """Hosts on one Ethernet, each reaching every other one. Use `virtual_network`."""

    hosts: dict[str, Host]
    _switch: Connection
    _links: dict[tuple[str, Direction], Link] = field(default_factory=dict)

    def set_link(self, host: str, direction: Direction, link: Link) -> None:
        """From the next frame on."""
        self._switch.send((self.hosts[host].number, direction, link))
        assert self._switch.recv()

    def cut(self, host: str, *directions: Direction) -> None:
        for direction in directions:
            self.set_link(host, direction, CUT)

    def mend(self, host: str) -> None:
        for direction in ("to", "from"):
            self.set_link(host, direction, Link())


@contextlib.contextmanager
def virtual_network(*names: str) -> Iterator[VirtualNetwork]:
    """Hosts of these names; `HERE` may be one of them. What runs in the namespaces must have ended before the end."""
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
        undo.callback(ours.close)  # ends it
        yield VirtualNetwork(hosts, ours)


@contextlib.contextmanager
def _device(host: Host) -> Iterator[int]:
    """A device of the host, up and with its address; the end that the switch has."""
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
    """Hands frames on until the other end of `orders` is closed."""
    other_end.close()
    rng = random.Random(0)
    links: dict[tuple[int, str], Link] = {}
    due: list[tuple[float, int, int, bytes]] = []
    """Frames by when they are to be handed on: time, number in order, host, content."""
    count = itertools.count()
    numbers = {fd: number for number, fd in fds.items()}
    ready = select.poll()  # takes descriptors above 1,023 too
    for fd in (*numbers, orders.fileno()):
        ready.register(fd, select.POLLIN)

    def hand_on(now: float, sender: int, frame: bytes) -> None:
        outward = links.get((sender, "from"), Link())
        targets = [n for n in fds if n != sender] if frame[:6] == _EVERYBODY else [frame[5]]
        for target in [each for each in targets if each in fds]:
            inward = links.get((target, "to"), Link())
            if any(link.loss and rng.random() < link.loss for link in (outward, inward)):
                continue
            at = now + outward.delay_s + inward.delay_s
            heapq.heappush(due, (at, next(count), target, frame))
            if any(link.duplicates and rng.random() < link.duplicates for link in (outward, inward)):
                heapq.heappush(due, (at + rng.uniform(0.0, _LATE_S), next(count), target, frame))

    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, target, frame = heapq.heappop(due)
            with contextlib.suppress(OSError):  # its queue is full, or it is down: lost, as frames are
                os.write(fds[target], frame)
        wait_ms = 1e3 * max(due[0][0] - time.monotonic(), 0.0) if due else None  # in whole ones: late by one at most
        for fd, _ in ready.poll(wait_ms):
            if fd in numbers:
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        hand_on(time.monotonic(), numbers[fd], os.read(fd, _LONGEST_FRAME))
                continue
            try:
                number, direction, link = orders.recv()
            except EOFError:
                return
            links[number, direction] = link
            orders.send(True)
