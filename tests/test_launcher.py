"""Starting and stopping servers in the background: identification of processes, and messages for the operator."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import trustme
from llm_serving.cli.arguments import StartError
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.errors import ConfigError
from llm_serving_tools import background_server
from llm_serving_tools.background_server import ServerRecord, stop
from llm_serving_tools.commands.start import curl_line, start
from support.server_process import free_ports


@contextmanager
def a_process(script="echo ready; exec sleep 600"):
    """Start a process in place of a server. The context begins when the process has printed a line."""
    process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def record_of(pid, port=8835, age_s=0.0, stop_timeout_s=30.0):
    """Return the record of a process; with `age_s`, of an earlier process with the same pid."""
    return ServerRecord(pid, psutil.Process(pid).create_time() - age_s, "127.0.0.1", port, "server.log", stop_timeout_s)


def write(run_dir, record):
    folder = run_dir / str(record.port)
    folder.mkdir()
    path = folder / "server.json"
    path.write_bytes(msgspec.json.encode(record))
    return path


def a_config(port, host="127.0.0.1"):
    return ServingConfig(model=ModelConfig(model_name="demo"), serving=ServerConfig(server_ip=host, server_port=port))


def is_alive(process):
    return process.poll() is None


def has_ended(process):
    """Return whether a process has ended that is not a child of this one, and so is reaped by another."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class TestRecord:
    def test_launcher_finds_the_started_process(self):
        assert record_of(os.getpid()).process() == psutil.Process()

    def test_launcher_ignores_another_process_with_the_same_pid(self):
        assert record_of(os.getpid(), age_s=60.0).process() is None
        assert record_of(os.getpid(), age_s=-60.0).process() is None

    def test_launcher_ignores_an_ended_process(self):
        with a_process() as process:
            record = record_of(process.pid)
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert record.process() is None, "a zombie"
        assert record.process() is None
        assert record.keeper() is None


class TestStop:
    def test_stop_without_a_server(self, tmp_path, capsys):
        assert stop(tmp_path / "never", None) == 0
        assert stop(tmp_path, 8835) == 0
        assert capsys.readouterr().err == "no server was running\nno server was running on port 8835\n"

    @pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff"])
    def test_stop_ignores_an_invalid_record(self, tmp_path, content, capsys):
        folder = tmp_path / "8835"
        folder.mkdir()
        (folder / "server.json").write_bytes(content)
        assert stop(tmp_path, None) == 0
        assert capsys.readouterr().err == "no server was running\n"

    def test_stop_leaves_another_process_with_the_pid_of_the_server(self, tmp_path, capsys):
        with a_process() as stranger:
            path = write(tmp_path, record_of(stranger.pid, age_s=60.0))
            assert stop(tmp_path, 8835) == 0
            assert is_alive(stranger)
        assert not path.exists()
        assert capsys.readouterr().err == "no server was running on port 8835\n"

    def test_stop_with_a_port_stops_only_that_server(self, tmp_path, capsys):
        with a_process() as first, a_process() as second:
            path = write(tmp_path, record_of(first.pid, 8835))
            other = write(tmp_path, record_of(second.pid, 8836))
            assert stop(tmp_path, 8835) == 0
            assert not is_alive(first)
            assert is_alive(second)
            assert (path.exists(), other.exists()) == (False, True)
            assert capsys.readouterr().err == f"stopped the server on port 8835 (pid {first.pid})\n"

    def test_stop_stops_all_servers_of_the_folder(self, tmp_path):
        with a_process() as first, a_process() as second:
            paths = [write(tmp_path, record_of(first.pid, 8835)), write(tmp_path, record_of(second.pid, 8836))]
            assert stop(tmp_path, None) == 0
            assert not is_alive(first)
            assert not is_alive(second)
            assert not any(path.exists() for path in paths)

    def test_stop_keeps_the_record_of_a_server_started_meanwhile(self, tmp_path, monkeypatch):
        with a_process() as first, a_process() as second:
            path, later = write(tmp_path, record_of(first.pid)), msgspec.json.encode(record_of(second.pid))
            monkeypatch.setattr(background_server, "say", lambda text: path.write_bytes(later))
            assert stop(tmp_path, 8835) == 0
            assert path.read_bytes() == later
            assert is_alive(second)

    def test_stop_reports_a_server_of_another_user(self, tmp_path, monkeypatch):
        def terminate(process):
            raise psutil.AccessDenied(process.pid)

        with a_process() as process:
            path = write(tmp_path, record_of(process.pid))
            monkeypatch.setattr(psutil.Process, "terminate", terminate)
            with pytest.raises(ConfigError, match=rf"on port 8835 \(pid {process.pid}\) must be stopped by the user"):
                stop(tmp_path, 8835)
        assert path.exists()

    def test_stop_waits_for_the_log_of_an_ended_server(self, tmp_path, monkeypatch):
        awaited = []
        monkeypatch.setattr(background_server, "_wait_for_log", lambda keeper: awaited.append(keeper.pid))
        with a_process() as keeper, a_process() as server:
            record = msgspec.structs.replace(record_of(server.pid), log_keeper=keeper.pid)
            write(tmp_path, record)
            server.kill()
            server.wait()
            assert stop(tmp_path, None) == 0
            assert awaited == [keeper.pid]

    def test_stop_kills_a_hanging_server_with_its_work_agents(self, tmp_path):
        script = "trap '' TERM; sleep 600 & echo ready; wait; wait"
        with a_process(script) as server:
            (agent,) = psutil.Process(server.pid).children()
            write(tmp_path, record_of(server.pid, stop_timeout_s=0.0))
            assert stop(tmp_path, None) == 0
            assert not is_alive(server)
            assert has_ended(agent)

    def test_stop_kills_the_others_if_one_process_ends_by_itself(self, tmp_path, monkeypatch):
        kill = psutil.Process.kill

        def is_gone(process):
            if process.pid != server.pid:
                return kill(process)
            kill(process)
            raise psutil.NoSuchProcess(process.pid)

        monkeypatch.setattr(psutil.Process, "kill", is_gone)
        with a_process("trap '' TERM; sleep 600 & echo ready; wait; wait") as server:
            (agent,) = psutil.Process(server.pid).children()
            write(tmp_path, record_of(server.pid, stop_timeout_s=0.0))
            assert stop(tmp_path, None) == 0
            assert has_ended(agent)


class TestStart:
    @pytest.fixture
    def run_instead(self, monkeypatch, tmp_path):
        """Let the server process run a shell script, which gets the arguments of Python as "$@"."""

        def run_instead(script):
            program = tmp_path / "program"
            keeper = f'[ "$2" != llm_serving_tools.log_keeper ] || exec {shlex.quote(sys.executable)} "$@"'
            program.write_text(f"#!/bin/sh\n{keeper}\n{script}\n")
            program.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(program))

        return run_instead

    def test_start_refuses_port_0(self, tmp_path):
        with pytest.raises(ConfigError, match=r"serving_config\.server_port: must be a fixed port"):
            start(a_config(0), [], tmp_path)

    def test_start_reports_a_port_used_by_another_program(self, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"serving_config\.server_port: .*{port} is in use"):
                start(a_config(port), [], tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_start_refuses_a_second_server_on_a_port(self, tmp_path):
        write(tmp_path, record_of(os.getpid(), 8835))
        with pytest.raises(ConfigError, match=rf"already runs on port 8835 \(pid {os.getpid()}\)") as error:
            start(a_config(8835), [], tmp_path)
        program, *arguments = re.search(r"; end it with `(.*)`$", str(error.value))[1].split()
        assert subprocess.run([program, "version"], capture_output=True, check=True).stdout.startswith(b"llm-serving ")
        assert arguments == ["stop", "--run-dir", str(tmp_path), "--port", "8835"]

    @pytest.mark.parametrize("blocked", ["run", "run/{port}/server.log"])
    def test_start_reports_an_unwritable_folder(self, tmp_path, blocked):
        (port,) = free_ports(1)
        (tmp_path / blocked.format(port=port)).parent.mkdir(parents=True, exist_ok=True)
        if blocked == "run":
            (tmp_path / "run").write_text("no folder")
        else:
            (tmp_path / blocked.format(port=port)).mkdir()
        with pytest.raises(ConfigError, match=f"--run-dir must be a folder that can be written; .*{tmp_path}/run"):
            start(a_config(port), [], tmp_path / "run")

    def test_start_stops_a_server_that_it_cannot_record(self, tmp_path, run_instead):
        (port,) = free_ports(1)
        run_instead(f"echo $$ > {tmp_path}/pid; exec sleep 600")
        (tmp_path / "run" / str(port) / "server.json").mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"--run-dir must be a folder that can be written; .*server\.json: "):
            start(a_config(port), [], tmp_path / "run")
        # A process that was stopped before it wrote its pid has no file.
        pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""
        assert not pid or not psutil.pid_exists(int(pid))

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_start_ended_by_a_signal_stops_the_server(self, tmp_path, run_instead, monkeypatch, number):
        (port,) = free_ports(1)
        run_instead("exec sleep 600")
        started = []

        def listens(record):
            started.append(psutil.Process(record.pid))
            assert len(started) == 1, "the signal had no effect"
            os.kill(os.getpid(), number)

        monkeypatch.setattr(background_server, "_listens", listens)
        before = signal.signal(number, lambda *_: None)  # so that a failure does not end the tests
        try:
            with pytest.raises(KeyboardInterrupt):
                start(a_config(port), [], tmp_path)
        finally:
            signal.signal(number, before)
        assert has_ended(started[0])
        assert not (tmp_path / str(port) / "server.json").exists()

    def test_start_refuses_one_of_two_concurrent_starts(self, tmp_path, run_instead):
        (port,) = free_ports(1)
        run_instead("exit 3")
        folder = tmp_path / str(port)
        folder.mkdir()
        with background_server._starting(folder, port):
            with pytest.raises(ConfigError, match=f"a server is being started on port {port}"):
                start(a_config(port), [], tmp_path)
            assert not (folder / "server.json").exists()
        with pytest.raises(StartError):
            start(a_config(port), [], tmp_path)

    def test_start_distinguishes_its_server_from_another_on_the_port(self, tmp_path, run_instead, monkeypatch):
        monkeypatch.setattr(background_server, "_health", lambda record: (True, "ready"))
        (port,) = free_ports(1)
        run_instead("echo 'the port is in use'; exit 3")
        with pytest.raises(StartError, match="the port is in use"):
            start(a_config(port), [], tmp_path)

    def test_start_shows_the_log_of_a_server_that_ends(self, tmp_path, run_instead):
        (port,) = free_ports(1)
        run_instead('echo "$@"; seq 20; echo "error: no such model" >&2; exit 3')
        with pytest.raises(StartError) as caught:
            start(a_config(port), ["--model", "x"], tmp_path)
        assert caught.value.exit_code == 3
        head, *lines = str(caught.value).splitlines()
        assert head == "the server did not become ready; its log ends:"
        assert lines == [*(f"  {number}" for number in range(7, 21)), "  error: no such model"]
        folder = tmp_path / str(port)
        assert (folder / "server.log").read_text().startswith("-Pm llm_serving serve --model x\n")
        assert not (folder / "server.json").exists()

    def test_start_keeps_and_rotates_the_log_of_the_previous_server(self, tmp_path, run_instead):
        (port,) = free_ports(1)
        run_instead("seq 200000; exit 1")
        folder = tmp_path / str(port)
        folder.mkdir()
        (folder / "server.log").write_text("the server before\n")
        config = a_config(port)
        serving = dataclasses.replace(config.serving, log_file_bytes=2**20, log_files=3)
        with pytest.raises(StartError, match=r"  200000$"):
            start(dataclasses.replace(config, serving=serving), [], tmp_path)
        names = ["server.log.2", "server.log.1", "server.log"]
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)
        texts = [(folder / name).read_text() for name in names]
        assert texts[0] == "the server before\n"
        assert "".join(texts[1:]).split() == [str(number) for number in range(1, 200001)]
        assert max(map(len, texts)) <= 2**20

    @pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # as it shall be
    @pytest.mark.parametrize("with_tls", [False, True])
    def test_start_records_a_serving_server(self, tmp_path, run_instead, capsys, with_tls):
        (port,) = free_ports(1)
        certificate, config = tmp_path / "certificate", a_config(port)
        if with_tls:
            trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
            config = dataclasses.replace(config, serving=dataclasses.replace(config.serving, ssl_certfile=certificate))
        serve = (
            "import ssl\n"
            "from http.server import *\n"
            "class Handler(BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            "        self.send_response(200)\n"
            "        self.end_headers()\n"
            "        self.wfile.write(b'{}')\n"
            f"server = HTTPServer(('127.0.0.1', {port}), Handler)\n"
            f"context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n"
            f"if {with_tls}:\n"
            f"    context.load_cert_chain({str(certificate)!r})\n"
            f"    server.socket = context.wrap_socket(server.socket, server_side=True)\n"
            "server.serve_forever()\n"
        )
        run_instead(f"exec {shlex.quote(sys.executable)} -c {shlex.quote(serve)}")
        assert start(config, [], tmp_path) == 0
        record = msgspec.json.decode((tmp_path / str(port) / "server.json").read_bytes(), type=ServerRecord)
        assert (record.host, record.port) == ("127.0.0.1", port)
        server = record.process()
        assert server.is_running()
        assert record.keeper().is_running()
        captured = capsys.readouterr()
        assert captured.out == curl_line(config) + "\n"
        assert f"serving demo on {config.serving.url}" in captured.err
        assert stop(tmp_path, port) == 0
        assert record.process() is None


def test_example_request_uses_https_if_the_server_does():
    config = a_config(9001)
    serving = dataclasses.replace(config.serving, ssl_certfile=Path("cert.pem"))
    words = shlex.split(curl_line(dataclasses.replace(config, serving=serving)))
    assert words[:3] == ["curl", "-sk", "https://127.0.0.1:9001/v1/completions"]


def test_example_request_is_answered_by_the_server():
    words = shlex.split(curl_line(a_config(9001)))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:9001/v1/completions"]
    assert words[3:5] == ["-H", "Content-Type: application/json"]
    assert words[5] == "-d"
    assert json.loads(words[6]) == {"prompt": "Add 17 and 25.", "max_tokens": 16, "temperature": 0}


def test_example_request_has_a_key_if_one_is_needed():
    keys = (ApiKey(name="a", key_sha256="0a" * 32),)
    words = shlex.split(curl_line(dataclasses.replace(a_config(9001), api_keys=keys)))
    assert words[3:5] == ["-H", "Authorization: Bearer KEY"]
