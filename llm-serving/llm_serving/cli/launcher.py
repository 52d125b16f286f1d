"""Start a server in the background, wait until it serves, stop exactly that one later."""

from __future__ import annotations

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

from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.process import command_of
from llm_serving.errors import ConfigError, LLMServingError
from llm_serving.server.http.listener import bind

POLL_S = 0.1
STOP_MARGIN_S = 15.0
"""Seconds beyond `shutdown_timeout_s` that a server gets to end before it is killed."""
LOG_LINES_SHOWN = 15
LOG_TIMEOUT_S = 10.0
"""Seconds that the end of the log is waited for, once a server has ended."""


class StartError(LLMServingError):
    """The server ended before it was ready.

    Args:
        message: The end of its log.
        exit_code: Its own.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ServerRecord(msgspec.Struct, frozen=True):
    """What is written down about a running server, so that `stop` finds exactly it."""

    pid: int
    create_time: float
    """Seconds since the epoch, as the system gives it: a pid that was reused has another."""
    host: str
    port: int
    log: str
    stop_timeout_s: float
    log_keeper: int = 0
    """Pid of the process that writes the log; 0: there is none."""
    scheme: str = "http"
    """Or https."""

    def process(self) -> psutil.Process | None:
        """The server's process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return process if alive and abs(process.create_time() - self.create_time) < 1.0 else None
        except psutil.NoSuchProcess:
            return None

    def keeper(self) -> psutil.Process | None:
        """The process that writes its log, if it still runs."""
        try:
            process = psutil.Process(self.log_keeper)
            # It began before the server; a later process may have got its pid.
            return process if self.log_keeper and process.create_time() < self.create_time + 1.0 else None
        except psutil.NoSuchProcess:
            return None


def start(config: ServingConfig, serve_arguments: Sequence[str], run_dir: Path) -> int:
    """Starts `llm-serving serve` in the background, and tells how to use it when it answers requests.

    Raises: as `start_silently`.
    """
    log = start_silently(config, serve_arguments, run_dir)
    _say(f"serving {config.model.model_name} on {config.serving.url}  (log: {_short(log)})")
    print(curl_line(config))
    return 0


def start_silently(config: ServingConfig, serve_arguments: Sequence[str], run_dir: Path) -> Path:
    """Starts `llm-serving serve` in the background and returns its log when it answers requests.

    Raises:
        ConfigError: The port is taken, by this server or by another program, or `run_dir` cannot be written.
        StartError: The server ended; the text shows the end of its log.
    """
    host, port = config.serving.server_ip, config.serving.server_port
    if port == 0:
        raise ConfigError("serving_config.server_port: must be a fixed port to start in the background. Given: 0")
    folder = run_dir / str(port)
    _check_none_runs(folder, port)
    bind(host, port).close()  # says now what keeps the port from being used
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.log").open("ab").close()
    except OSError as error:
        raise _cannot_be_written(run_dir, error) from None
    with _starting(folder, port):
        _check_none_runs(folder, port)  # one may have been started meanwhile
        return _start_in(folder, config, serve_arguments)


def _check_none_runs(folder: Path, port: int) -> None:
    running = _read(folder)
    if running is not None and running.process() is not None:
        program = _short(Path(sys.prefix) / "bin" / "llm-serving")  # seldom where the shell looks for it
        how = f"end it with `{program} stop --run-dir {_short(folder.parent)} --port {port}`"
        raise ConfigError(f"a server runs on port {port} already (pid {running.pid}); {how}")


@contextlib.contextmanager
def _starting(folder: Path, port: int) -> Iterator[None]:
    """While a server is started nobody else starts one here: each would take the other's answer for its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"a server is being started on port {port}: wait until it answers") from None
    finally:
        os.close(descriptor)


def _start_in(folder: Path, config: ServingConfig, serve_arguments: Sequence[str]) -> Path:
    host, port = config.serving.server_ip, config.serving.server_port
    log = folder / "server.log"
    keeper = _keep_log(log, config.serving)
    assert keeper.stdin is not None
    with keeper.stdin as output:
        command = command_of("llm_serving", "serve", *serve_arguments)
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    timeout = config.serving.shutdown_timeout_s + STOP_MARGIN_S
    created = psutil.Process(process.pid).create_time()
    record = ServerRecord(process.pid, created, host, port, str(log), timeout, keeper.pid, config.serving.scheme)
    for notice in config.notices:
        _say(f"notice: {notice}")
    try:
        _write_down(folder, record)
        _wait_until_ready(process, keeper, record)
    except BaseException:
        process.terminate()
        process.wait()
        _wait_for_log(keeper)
        with contextlib.suppress(OSError):
            (folder / "server.json").unlink(missing_ok=True)
        raise
    return log


def _write_down(folder: Path, record: ServerRecord) -> None:
    try:
        (folder / "server.json").write_bytes(msgspec.json.encode(record))
    except OSError as error:  # no space is left, say
        error.filename = folder / "server.json"
        raise _cannot_be_written(folder.parent, error) from None


def _cannot_be_written(run_dir: Path, error: OSError) -> ConfigError:
    rule = f"must be a folder that can be written; {error.filename}: {error.strerror}"
    return ConfigError(f"--run-dir {rule}. Given: {run_dir}")


def stop(run_dir: Path, port: int | None) -> int:
    """Stops the servers that `start` started: the one on `port`, or all of this folder."""
    folders = [run_dir / str(port)] if port is not None else sorted(run_dir.glob("*"))
    count = 0
    for folder in folders:
        record = _read(folder)
        if record is None:
            continue
        process = record.process()
        if process is not None:
            count += 1
            _end(process, record.stop_timeout_s)
            _say(f"stopped the server on port {record.port} (pid {record.pid})")
        if (keeper := record.keeper()) is not None:
            _wait_for_log(keeper)
        (folder / "server.json").unlink(missing_ok=True)
    if not count:
        _say("no server was running" if port is None else f"no server was running on port {port}")
    return 0


def curl_line(config: ServingConfig) -> str:
    """A command to paste that shows the server at work."""
    body = json.dumps({"prompt": "Add 17 and 25.", "max_tokens": 16, "temperature": 0})
    url = f"{config.serving.url}/v1/completions"
    unverified = "k" if config.serving.ssl_certfile is not None else ""  # the address is seldom the certificate's name
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    return f"curl -s{unverified} {url}{key} -H 'Content-Type: application/json' -d '{body}'"


def _keep_log(path: Path, serving: ServerConfig) -> subprocess.Popen[bytes]:
    """A process that writes what it gets on its standard input to the log, see `log_keeper`."""
    command = command_of("llm_serving.log_keeper", str(path), str(serving.log_file_bytes), str(serving.log_files))
    return subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_log(keeper: subprocess.Popen[bytes] | psutil.Process) -> None:
    """Waits until the log of a server that has ended is written; not for ever."""
    with contextlib.suppress(subprocess.TimeoutExpired, psutil.NoSuchProcess, psutil.TimeoutExpired):
        keeper.wait(LOG_TIMEOUT_S)


def _wait_until_ready(process: subprocess.Popen[bytes], keeper: subprocess.Popen[bytes], record: ServerRecord) -> None:
    shown = ""
    while True:
        ready, detail = _health(record) if _listens(record) else (False, "")
        if detail != shown:
            shown = detail
            if detail and detail != "ready":
                _say(detail)
        if ready:
            return
        if process.poll() is not None:
            _wait_for_log(keeper)
            tail = Path(record.log).read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            text = "the server did not become ready; its log ends:\n  " + "\n  ".join(tail)
            raise StartError(text, process.returncode)
        time.sleep(POLL_S)


def _listens(record: ServerRecord) -> bool:
    """Whether it is this server that answers on its port, and not another one that was quicker to take it."""
    try:
        sockets = psutil.Process(record.pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it cannot be told
        return True
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == record.port for each in sockets)


def _health(record: ServerRecord) -> tuple[bool, str]:
    """(every WorkAgent that can serve does, what it is doing); the text is empty while nothing answers."""
    connection = http.client.HTTPConnection(record.host, record.port, timeout=5)
    if record.scheme == "https":
        # The certificate names the server as its users know it; here it is found by its address.
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
    """Asks the server to end, insists after `timeout_s`; its WorkAgents follow it."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself at any moment
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=timeout_s)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # the others are there all the same
                left.kill()
        psutil.wait_procs(alive, timeout=STOP_MARGIN_S)


def _read(folder: Path) -> ServerRecord | None:
    try:
        return msgspec.json.decode((folder / "server.json").read_bytes(), type=ServerRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
