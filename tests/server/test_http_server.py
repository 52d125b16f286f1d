"""A real server on a real port: third-party clients, signals, the port."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.errors import ConfigError
from llm_serving.server.app import create_app
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from llm_serving.server.middleware.authentication import hash_key
from support.fakes import FakeEngine, Script
from support.http_serving import connect, get, read_all, serving

TESTS = Path(__file__).parents[1]
SERVE = """
import asyncio, resource, sys, threading
from pathlib import Path
from support.fakes import FakeEngine, Script
from llm_serving.log import configure_logging
from llm_serving.server.app import serve

class Engine(FakeEngine):
    def start(self):
        super().start()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self.open_gate, args=(loop,), daemon=True).start()

    def open_gate(self, loop):
        if sys.stdin.readline():
            loop.call_soon_threadsafe(self.gate.set)

configure_logging()
engine = Engine(Script(hold_after=1))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
if len(sys.argv) > 1:
    serving = engine.config.serving
    object.__setattr__(serving, "access_log", Path(sys.argv[1]))
code = serve(engine)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536) if hard >= 0 else 65536, hard)
print(code, engine.num_starts, engine.num_stops, len(engine.aborted))
"""


def test_ipv6_address_is_logged_in_brackets(caplog):
    engine = FakeEngine()
    with bind("::1", 0) as listener, caplog.at_level("INFO", "llm_serving"):
        port = listener.getsockname()[1]
        server = HttpServer(create_app(engine), listener, engine.config.serving)
        server.end()
        server.run_within(nullcontext())
    assert f"serving on http://[::1]:{port}" in caplog.messages


@pytest.fixture(scope="module")
def openai():
    """Imported late, because it is slow and each process collects all tests."""
    import openai

    return openai


@pytest.fixture
def client(openai):
    with serving(FakeEngine()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestOpenAIClient:
    def test_openai_client_lists_models(self, client):
        assert [model.id for model in client.models.list()] == ["demo"]

    def test_openai_client_creates_a_completion(self, client):
        answer = client.completions.create(model="demo", prompt="x", logprobs=1, extra_body={"priority": 1})
        assert answer.choices[0].text == "Hello world"
        assert answer.usage.completion_tokens == 3

    def test_openai_client_streams_a_completion(self, client):
        stream = client.completions.create(
            model="demo", prompt="x", stream=True, stream_options={"include_usage": True}
        )
        *chunks, usage = stream
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
        assert usage.choices == []
        assert usage.usage.completion_tokens == 3

    def test_openai_client_creates_a_chat_completion(self, client):
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        answer = client.chat.completions.create(model="demo", messages=messages, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == "Hello world"
        assert answer.choices[0].logprobs.content[0].logprob == -0.5

    def test_openai_client_streams_a_chat_completion(self, client):
        messages = [{"role": "user", "content": "x"}]
        chunks = list(client.chat.completions.create(model="demo", messages=messages, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello world"
        assert chunks[-1].choices[0].finish_reason == "stop"

    def test_openai_client_raises_matching_errors(self, client, openai):
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(model="demo", prompt="x", top_p=2)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="x")


def test_openai_client_sends_its_api_key(openai):
    key = "sesame-open-the-door"
    engine = FakeEngine(api_keys=(ApiKey(name="a", key_sha256=hash_key(key), highest_class="standard"),))
    with serving(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="demo", prompt="x").choices[0].text == "Hello world"
        with pytest.raises(openai.PermissionDeniedError, match="must not go before class standard"):
            client.completions.create(model="demo", prompt="x", extra_body={"priority_class": "interactive"})
        stranger = client.with_options(api_key="somebody-else")
        with pytest.raises(openai.AuthenticationError, match="the API key is not known"):
            stranger.completions.create(model="demo", prompt="x" * 2_000_000)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
    assert [each.tenant for each in engine.submitted] == ["a"]


def test_stream_error_reaches_the_openai_client(openai):
    with (
        serving(FakeEngine(Script(error="WorkAgent 0 died"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="WorkAgent 0 died"),
    ):
        list(client.completions.create(model="demo", prompt="x", stream=True))


def test_disconnect_aborts_the_request():
    engine = FakeEngine(Script(hold_after=1))
    aborted = threading.Event()
    engine.aborted = type("Aborted", (list,), {"append": lambda self, item: (list.append(self, item), aborted.set())})()
    with serving(engine) as url:
        with (
            httpx.Client() as client,
            client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            assert json.loads(next(response.iter_lines()).removeprefix("data: "))["choices"][0]["text"] == "Hello"
        assert aborted.wait(10)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/models/demo"])
def test_incomplete_body_times_out(path):
    engine = FakeEngine(limits={"body_timeout_s": 0.01})
    with serving(engine) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode())
            with connection.makefile("rb") as reader:
                head, _, body = reader.read().partition(b"\r\n\r\n")  # returns when the server closes
    status, *headers = head.split(b"\r\n")
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert b"connection: close" in headers
    assert b"`body` must arrive within 0.01 seconds" in body
    assert engine.submitted == []


class TestBind:
    def test_port_in_use_error_names_the_port(self):
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"serving_config.server_port: 127\.0\.0\.1:{port} is in use"):
                bind("127.0.0.1", port)

    def test_foreign_server_address_is_refused(self):
        with pytest.raises(ConfigError, match=r"serving_config.server_ip: cannot bind to 192\.0\.2\.1:0"):
            bind("192.0.2.1", 0)

    @pytest.mark.parametrize("host", ["999.1.1.1", "a..b", "a" * 70])
    def test_invalid_server_address_is_refused(self, host):
        with pytest.raises(ConfigError, match=rf"serving_config.server_ip: {re.escape(host)} is not an address"):
            bind(host, 0)


@contextmanager
def server_process(*arguments):
    """A server whose streams stop after the first piece until a line arrives on its standard input."""
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        try:
            line = next(line for line in process.stderr if "serving on" in line)
            yield process, line.split("serving on ")[1].strip()
        finally:
            process.kill()


def read_until(process, text):
    assert any(text in line for line in process.stderr)


def test_first_signal_drains_running_requests():
    with server_process() as (process, url), httpx.Client(timeout=30) as client:
        body = {"prompt": "x", "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "Hello" in next(lines)
            process.send_signal(signal.SIGTERM)
            read_until(process, "SIGTERM: finishing 1 requests")
            process.stdin.write("\n")
            process.stdin.flush()
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(30) == 0
        assert process.stdout.read().split() == ["0", "1", "1", "0"]


def test_sighup_reopens_the_log(tmp_path):
    path, moved = tmp_path / "access.log", tmp_path / "access.log.moved"
    with server_process(str(path)) as (process, url), httpx.Client(timeout=30) as client:
        client.get(f"{url}/version")
        while not path.read_text():
            pass
        path.rename(moved)
        process.send_signal(signal.SIGHUP)
        read_until(process, "SIGHUP: reopening the logs, reloading certificates and the YAML")
        client.get(f"{url}/v1/models")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "/version" in moved.read_text(), sorted(tmp_path.iterdir())
    assert "/v1/models" in path.read_text()


def test_connections_wait_for_file_descriptors():
    with server_process() as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200  # all that it has to read has been read
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay so
        with connect(url) as client:
            client.sendall(get("/health", "Connection: close"))
            read_until(process, "cannot accept new connections: Too many open files")
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            read_until(process, "accepts new connections again")
            assert read_all(client).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_second_signal_aborts_requests_and_stops_the_engine():
    with server_process() as (process, url), httpx.Client(timeout=30) as client:
        body = {"prompt": "x", "stream": True}
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "Hello" in next(lines)
            process.send_signal(signal.SIGINT)
            read_until(process, "SIGINT: finishing 1 requests")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert process.stdout.read().split() == ["0", "1", "1", "1"]


def test_socket_send_buffer_is_small():
    """By default a connection within a machine would buffer 2.5 MB."""
    with bind("127.0.0.1", 0) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.setblocking(False)
            taken = 0
            while True:
                try:
                    taken += server.send(bytes(2**16))
                except BlockingIOError:
                    break
    assert 2**16 <= taken < 2**19


def test_connection_after_shutdown_is_refused():
    with serving(FakeEngine()) as url:
        port = int(url.rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
