"""Servers in the background: start one, and stop those that were started."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from llm_serving.cli.arguments import StartError, say
from llm_serving.config.schema import ServingConfig
from llm_serving.core.process import command_of
from llm_serving.errors import ConfigError
from llm_serving.server.http.listener import bind

POLL_S = 0.1
STOP_MARGIN_S = 15.0
LOG_LINES_SHOWN = 15
LOG_TIMEOUT_S = 10.0


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    help_text = "folder for the pids and logs of background servers"
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), metavar="FOLDER", help=help_text)


class ServerRecord(msgspec.Struct, frozen=True):
    """The file that describes a running server, so that `stop` can find the process."""

    pid: int
    create_time: float
    """Start time of the process in seconds since the epoch. It differs for a later process with the same pid."""
    host: str
    port: int
    log: str
    stop_timeout_s: float
    log_keeper: int = 0
    """Pid of the process that writes the log, or 0 if there is none."""
    scheme: str = "http"

    def process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return process if alive and abs(process.create_time() - self.create_time) < 1.0 else None
        except psutil.NoSuchProcess:
            return None

    def keeper(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.log_keeper)
            # The log process started before the server. A later process with its pid is another one.
            return process if self.log_keeper and process.create_time() < self.create_time + 1.0 else None
        except psutil.NoSuchProcess:
            return None


def start_silently(config: ServingConfig, serve_arguments: Sequence[str], run_dir: Path) -> Path:
    """Start `llm-serving serve` in the background, wait until it is ready, and return its log file."""
    host, port = config.serving.server_ip, config.serving.server_port
    if port == 0:
        raise ConfigError("serving_config.server_port: must be a fixed port to start in the background. Given: 0")
    folder = run_dir / str(port)
    _check_none_runs(folder, port)
    bind(host, port).close()  # fail early if the port cannot be used
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.log").open("ab").close()
    except OSError as error:
        raise _cannot_be_written(run_dir, error) from None
    with _starting(folder, port):
        _check_none_runs(folder, port)  # another command may have started a server meanwhile
        return _start_in(folder, config, serve_arguments)


def _check_none_runs(folder: Path, port: int) -> None:
    running = _read(folder)
    if running is not None and running.process() is not None:
        program = short(Path(sys.prefix) / "bin" / "llm-serving")  # usually not in the shell's search path
        how = f"end it with `{program} stop --run-dir {short(folder.parent)} --port {port}`"
        raise ConfigError(f"a server already runs on port {port} (pid {running.pid}); {how}")


@contextlib.contextmanager
def _starting(folder: Path, port: int) -> Iterator[None]:
    """Return a context that locks the folder, so that two commands cannot start servers on one port at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"a server is being started on port {port}: wait until it is ready") from None
    finally:
        os.close(descriptor)


def _start_in(folder: Path, config: ServingConfig, serve_arguments: Sequence[str]) -> Path:
    serving, log, nothing = config.serving, folder / "server.log", subprocess.DEVNULL
    command = command_of("llm_serving_tools.log_keeper", str(log), str(serving.log_file_bytes), str(serving.log_files))
    keeper = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
    )
    assert keeper.stdin is not None
    with keeper.stdin as output:
        command = command_of("llm_serving", "serve", *serve_arguments)
        process = subprocess.Popen(  # noqa: S603
            command, stdin=nothing, stdout=output, stderr=output, start_new_session=True
        )
    record = ServerRecord(
        pid=process.pid,
        create_time=psutil.Process(process.pid).create_time(),
        host=serving.server_ip,
        port=serving.server_port,
        log=str(log),
        stop_timeout_s=serving.shutdown_timeout_s + STOP_MARGIN_S,
        log_keeper=keeper.pid,
        scheme=serving.scheme,
    )
    for notice in config.notices:
        say(f"notice: {notice}")
    try:
        _write_record(folder, record)
        _wait_until_ready(process, keeper, record)
    except BaseException:
        process.terminate()
        process.wait()
        _wait_for_log(keeper)
        with contextlib.suppress(OSError):
            (folder / "server.json").unlink(missing_ok=True)
        raise
    return log


def _write_record(folder: Path, record: ServerRecord) -> None:
    try:
        (folder / "server.json").write_bytes(msgspec.json.encode(record))
    except OSError as error:  # for example, the disk is full
        error.filename = folder / "server.json"
        raise _cannot_be_written(folder.parent, error) from None


def _cannot_be_written(run_dir: Path, error: OSError) -> ConfigError:
    rule = f"must be a folder that can be written; {error.filename}: {error.strerror}"
    return ConfigError(f"--run-dir {rule}. Given: {run_dir}")


def stop(run_dir: Path, port: int | None) -> int:
    folders = [run_dir / str(port)] if port is not None else sorted(run_dir.glob("*"))
    count = 0
    for folder in folders:
        record = _read(folder)
        if record is None:
            continue
        process = record.process()
        if process is not None:
            count += 1
            try:
                _end(process, record.stop_timeout_s)
            except psutil.AccessDenied:
                rule = "must be stopped by the user who started it"
                raise ConfigError(f"the server on port {record.port} (pid {record.pid}) {rule}") from None
            say(f"stopped the server on port {record.port} (pid {record.pid})")
        if (keeper := record.keeper()) is not None:
            _wait_for_log(keeper)
        if _read(folder) == record:  # keep the record of a server that was started meanwhile
            (folder / "server.json").unlink(missing_ok=True)
    if not count:
        say("no server was running" if port is None else f"no server was running on port {port}")
    return 0


def _wait_for_log(keeper: subprocess.Popen[bytes] | psutil.Process) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, psutil.NoSuchProcess, psutil.TimeoutExpired):
        keeper.wait(LOG_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], keeper: subprocess.Popen[bytes], record: ServerRecord) -> None:
    shown, listens = "", False
    while True:
        listens = listens or _listens(record)  # reads the table of all sockets of this machine
        ready, detail = _health(record) if listens else (False, "")
        if detail != shown:
            shown = detail
            if detail and detail != "ready":
                say(detail)
        if ready:
            return
        if process.poll() is not None:
            _wait_for_log(keeper)
            tail = Path(record.log).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            text = "the server did not become ready; its log ends:\n  " + "\n  ".join(tail)
            raise StartError(text, process.returncode)
        time.sleep(POLL_S)


def _listens(record: ServerRecord) -> bool:
    """Return whether the recorded server listens on its port. Another process may have bound the port first."""
    try:
        sockets = psutil.Process(record.pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it cannot be determined: assume that the server listens
        return True
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == record.port for each in sockets)


def _health(record: ServerRecord) -> tuple[bool, str]:
    """Return whether `/health` reports that the server is ready, and the report's text, or "" without a reply."""
    connection = http.client.HTTPConnection(record.host, record.port, timeout=5)
    if record.scheme == "https":
        # Not verified: the certificate has the server's public name, but this request goes to the server's address.
        unverified = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(record.host, record.port, timeout=5, context=unverified)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        content: Any = json.loads(answer.read() or b"{}")
    except (OSError, http.client.HTTPException, ValueError):
        return False, ""
    finally:
        connection.close()
    return answer.status == 200 and not content.get("loading"), str(content.get("detail", ""))


def _end(process: psutil.Process, timeout_s: float) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself at any moment
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=timeout_s)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # the other processes still have to be killed
                left.kill()
        psutil.wait_procs(alive, timeout=STOP_MARGIN_S)


def _read(folder: Path) -> ServerRecord | None:
    try:
        return msgspec.json.decode((folder / "server.json").read_bytes(), type=ServerRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
