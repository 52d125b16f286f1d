"""Real server processes at free ports, started by this process or by the real scripts."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from llm_serving.cli.main import main

RUN_DIR = Path(tempfile.mkdtemp(prefix="llm-serving-run-"))
atexit.register(shutil.rmtree, RUN_DIR, ignore_errors=True)
"""Folder of the servers' logs and process ids in this test run."""
ROOT = Path(__file__).resolve().parents[2]


ONE_THREAD = "device_config.num_threads=1"
"""Options of servers that share the cores with other tests. Kernel threads wait for each other in loops, which costs a
third more time on busy cores. The number of threads changes no bit (tests/kernels).
"""

_HELD: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return different free ports, which are reserved as long as this process lives.

    A socket stays bound to each port. Servers can bind it as well, because they use SO_REUSEADDR.
    """
    ports = []
    for _ in range(count):
        holder = socket.socket()
        _HELD.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        ports.append(holder.getsockname()[1])
    return ports


def unwind_on_sigterm() -> None:
    """Raise SystemExit on SIGTERM, so that a command stops its servers before it ends."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that end this process until the end of the context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            signal.raise_signal(signal.SIGTERM)


def run_script(name: str, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME with this interpreter's environment."""
    environment = dict(os.environ, LLM_SERVING_VENV=sys.prefix, LLM_SERVING_RUN_DIR=str(RUN_DIR))
    command = ["bash", str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd="/")


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which saves the start of an interpreter."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        warnings.catch_warnings(action="ignore", category=ResourceWarning),  # the server that it starts keeps running
    ):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


@dataclass(frozen=True)
class Server:
    port: int
    processes: list[psutil.Process]
    """Processes of the server, the master first."""
    by_script: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (RUN_DIR / str(self.port) / "server.log").read_text()

    def work_agents(self) -> list[psutil.Process]:
        return work_agents(self.processes[0])

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=200)
        return httpx.AsyncClient(base_url=self.url, timeout=120.0, limits=limits)

    def stop(self) -> None:
        port = ("--port", str(self.port))
        with undisturbed():
            if self.by_script:
                result = run_script("stop.sh", *port)
            else:
                result = run_command("stop", "--run-dir", str(RUN_DIR), *port)
        assert result.returncode == 0, result.stderr


def start_server(*arguments: str, num_agents: int = 1, by_script: bool = False) -> Server:
    """Start a server with the arguments of scripts/start.sh, by the script or by the command that it runs."""
    (port,) = free_ports(1)
    ports = f"serving_config.agent_ports={list(range(16002, 16002 + num_agents))}"
    all_arguments = ("--port", str(port), "--set", ports, *arguments)
    if by_script:
        result = run_script("start.sh", *all_arguments)
    else:
        has_model = not {"--config", "--model"}.isdisjoint(arguments)
        model = () if has_model else ("--config", str(ROOT / "configs" / "demo_cpu.yaml"))
        result = run_command("start", "--run-dir", str(RUN_DIR), *model, *all_arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"127.0.0.1:{port}/v1/completions" in result.stdout, "it prints a line to paste"
    record = json.loads((RUN_DIR / str(port) / "server.json").read_text())
    master = psutil.Process(record["pid"])
    return Server(port, [master, *work_agents(master)], by_script)


def work_agents(master: psutil.Process) -> list[psutil.Process]:
    """Return the WorkAgents among the master's children, without those that render chat templates."""
    found = []
    for child in master.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "llm_serving.work_agent" in child.cmdline():
                found.append(child)
    return found


async def metric(client: httpx.AsyncClient, name: str, label: str = "") -> float:
    """Return the sum of a metric over its series, or over those with `label`."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line)


def shared_memory_names() -> set[str]:
    """Return the names in /dev/shm, without semaphores of Python's multiprocessing, which other programs may create."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
