"""Measure a server under attack, before any API key is checked: its memory and the time of `/health`.

    python tests/tools/attacks.py                         # all attacks: about six minutes
    python tests/tools/attacks.py --only "endless URL"    # some attacks

The real script starts the real server with the shipped model. Its limits are the defaults, except for shorter times. An
attack runs in a process of its own and comes from other addresses of the loopback network than the probe. Attacks on
TLS go to a second server, whose probe makes a handshake for each request. The tool prints a table, and exits with 1 if
memory grew by more than 150 MB or `/health` took longer than 250 ms.

Attackers, probe and server share the machine, so the table has two further figures beside the longest time of
`/health`: the longest time without the seconds in which the server's event loop was runnable and waited for a core, as
the kernel reports them; and the longest time of an idle server that only answers (`plain_server.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import trustme
from support.plain_server import plain_server
from support.server_process import Server, start_server, unwind_on_sigterm
from tools.attackers import ATTACKS, MEBI

MAX_GROWTH = 150_000_000
"""Maximum growth of the master, bytes."""
MAX_HEALTH_S = 0.25
TIMES = {"header_timeout_s": 8, "body_timeout_s": 5, "idle_timeout_s": 8, "write_timeout_s": 8}
SAMPLE_S = 0.03
AFTERMATH_S = 1.0
"""Seconds for which the server is watched after the attack."""


@dataclass
class Watch:
    """Samples of a server until it is stopped: resident bytes of the master, seconds of `/health`."""

    port: int
    master: psutil.Process
    trust: ssl.SSLContext | None = None
    """TLS context of the probe; None: without TLS."""
    floor_port: int | None = None
    """Port of the plain server, which is probed as well."""
    sizes: list[int] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    without_wait: list[float] = field(default_factory=list)
    """Seconds of `/health` without the time that the event loop waited for a core."""
    floor: list[float] = field(default_factory=list)
    """Seconds of the plain server."""
    num_not_ok: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        loops = (self._weigh, self._ask, self._ask_floor)
        self._threads = [threading.Thread(target=loop) for loop in loops]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _weigh(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.sizes.append(self.master.memory_info().rss)

    def _ask(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            begin, waited = time.perf_counter(), core_wait_s(self.master.pid)
            self.num_not_ok += not is_ok(self.port, self.trust)
            took = time.perf_counter() - begin
            self.health.append(took)
            self.without_wait.append(took - min(took, core_wait_s(self.master.pid) - waited))

    def _ask_floor(self) -> None:
        while self.floor_port is not None and not self._stop.wait(SAMPLE_S):
            begin = time.perf_counter()
            is_ok(self.floor_port)
            self.floor.append(time.perf_counter() - begin)


def is_ok(port: int, trust: ssl.SSLContext | None = None) -> bool:
    """Return whether `/health` on a new connection has status 200."""
    try:
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10.0))
            if trust is not None:
                client = stack.enter_context(trust.wrap_socket(client, server_hostname="127.0.0.1"))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            return client.recv(4096).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def core_wait_s(pid: int) -> float:
    """Return the seconds for which a process's first thread was runnable and had no core; 0 if the kernel does not
    report it.
    """
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Row:
    """The outcome of an attack and its effect on the server."""

    name: str
    sent: int
    ends: dict[str, int]
    growth: int
    """Maximum growth of the master, bytes."""
    worst_health_s: float
    worst_without_wait_s: float
    worst_floor_s: float
    num_asked: int
    num_not_ok: int

    @property
    def is_good(self) -> bool:
        return self.growth <= MAX_GROWTH and self.worst_health_s <= MAX_HEALTH_S and self.num_not_ok == 0

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {how}" for how, count in self.ends.items())
        worst = (self.worst_health_s, self.worst_without_wait_s, self.worst_floor_s)
        waits = " | ".join(f"{1e3 * each:.1f}" for each in worst)
        answered = f"{self.num_asked - self.num_not_ok} of {self.num_asked}"
        return f"| {self.name} | {self.sent / MEBI:.1f} | {self.growth / 1e6:+.1f} | {waits} | {answered} | {ends} |"


HEAD = """| attack | sent, MiB | memory, MB | worst, ms | without waits | plain server | answered | connections |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def measure(name: str, server: Server, trust: ssl.SSLContext | None = None, floor_port: int | None = None) -> Row:
    """Run an attack against a server and watch the server."""
    master = server.processes[0]
    before = master.memory_info().rss
    with Watch(server.port, master, trust, floor_port) as watch:
        command = [sys.executable, str(Path(__file__).with_name("attackers.py")), name, str(server.port)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        time.sleep(AFTERMATH_S)
    outcome = json.loads(answer)
    growth = max(watch.sizes) - before
    worst = [max(each, default=0.0) for each in (watch.health, watch.without_wait, watch.floor)]
    return Row(name, outcome["sent"], outcome["ends"], growth, *worst, len(watch.health), watch.num_not_ok)


def measure_all(names: list[str], settings: list[str], trust: ssl.SSLContext | None) -> bool:
    """Attack one server; print a row for each attack and return whether all rows are good."""
    limits = [text for each in settings for text in ("--set", f"serving_config.{each}")]
    server = start_server("--model", "demo", *limits)
    try:
        with Watch(server.port, server.processes[0], trust):
            time.sleep(2.0)  # memory allocated for the first requests stays
        begin = server.processes[0].memory_info().rss
        sys.stdout.write(HEAD + "\n")
        good = True
        with plain_server() as floor_port:
            for name in names:
                row = measure(name, server, trust, floor_port)
                good &= row.is_good
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
        end = server.processes[0].memory_info().rss
        sys.stdout.write(f"\nmaster: {begin / 1e6:.0f} MB before the first, {end / 1e6:.0f} MB after the last\n")
        log = [line for line in server.log.splitlines() if "serving on" not in line]
        sys.stdout.write(f"log: {len(server.log.splitlines())} lines; the last: {log[-1] if log else 'none'}\n\n")
        return good
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="NAME")
    names = parser.parse_args().only or list(ATTACKS)
    unwind_on_sigterm()
    settings, good = [f"{key}={value}" for key, value in TIMES.items()], True
    if plain := [name for name in names if not ATTACKS[name].tls]:
        good &= measure_all(plain, settings, None)
    if secured := [name for name in names if ATTACKS[name].tls]:
        with tempfile.TemporaryDirectory() as folder:
            authority, trust = trustme.CA(), ssl.create_default_context()
            authority.configure_trust(trust)
            file = Path(folder) / "certificate.pem"
            authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
            good &= measure_all(secured, [*settings, f"ssl_certfile={file}"], trust)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
