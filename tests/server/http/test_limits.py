"""A real server on a real port: limits for clients of bare sockets, and the responses that they get."""

from __future__ import annotations

import json
import re
import threading
from contextlib import contextmanager, suppress

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.fakes import FakeEngine, Script
from support.http_serving import connect, get, post, read_all, read_until, serving

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
FLOODS = {
    "headers": (b"GET /health HTTP/1.1\r\n", b"X-Aaaaaa: bbbbbb\r\n", 431, "at most 100 headers"),
    "one header": (b"GET /health HTTP/1.1\r\nX: ", b"a" * 64, 431, "at most 32768 bytes"),
    "url": (b"GET /", b"a" * 64, 414, "at most 8192 bytes"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X-Aaaaaa: bbbbbb\r\n", 431, "trailers must be at most 32768 bytes"),
    "one trailer": (CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * 64, 431, "trailers must be at most 32768 bytes"),
    "chunk extension": (CHUNKED + b"1;e=", b"a" * 64, 431, "extensions and trailers must be at most 32768 bytes"),
    "no HTTP": (b"", b"\x16\x03\x01\x02\x00" * 10, 400, "not a request"),
}
BODY = json.dumps({"prompt": "x", "stream": True}).encode()


def counts(engine):
    """Return the numbers of HTTP requests by route and status in /metrics."""
    metric, *_ = engine.metrics.http.collect()
    return {(sample.labels["route"], sample.labels["status"]): sample.value for sample in metric.samples}


def aborting_engine(**arguments):
    """Return an engine whose streams stop after the first piece; `aborted` is an event."""
    engine, aborted = FakeEngine(Script(hold_after=1), **arguments), threading.Event()
    engine.aborted = type("Aborted", (list,), {"append": lambda self, item: (list.append(self, item), aborted.set())})()
    return engine, aborted


@pytest.fixture(scope="module")
def url():
    with serving(FakeEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def hasty():
    """Yield a server with short timeouts, whose streams stop after their first piece, and its engine."""
    limits = dict.fromkeys(("header_timeout_s", "idle_timeout_s", "body_timeout_s"), 0.05)
    engine = FakeEngine(Script(hold_after=1), limits=limits)
    with serving(engine) as url:
        yield url, engine


@pytest.mark.parametrize("name", FLOODS)
def test_oversized_input_gets_a_response_that_names_the_limit(url, name):
    begin, unit, status, text = FLOODS[name]
    with connect(url) as client:
        client.sendall(begin)
        with pytest.raises(ConnectionError):  # however much it sends, the server takes a few megabytes at most
            for _ in range(10_000):
                client.sendall(unit * 1024)
        answer = client.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"connection: close" in head
    assert text in json.loads(body)["error"]["message"]


def test_oversized_body_gets_413(url):
    with connect(url) as client:
        client.sendall(b"GET /" + b"a" * 20_000)
        assert b" 414 " in read_all(client)[:20]


def test_trailers_and_chunk_extensions_are_ignored(url):
    with connect(url) as client:
        client.sendall(CHUNKED + b"d;a=b\r\n" + b'{"prompt":"x"' + b"\r\n1\r\n}\r\n0\r\nX-Priority: 5\r\n\r\n" + get())
        assert b"Hello world" in read_until(client, b"}]")
        read_until(client, b"HTTP/1.1 200 OK")


def test_sequential_requests_are_answered_in_order(url):
    """More requests than the server reads ahead."""
    count = 500
    with connect(url) as client:
        requests = b"".join(post("/tokenize", b'{"prompt": "%d"}' % i) + get(f"/{i}") for i in range(count))
        writer = threading.Thread(target=client.sendall, args=(requests,))
        writer.start()
        content = bytearray()
        while content.count(b"HTTP/1.1 404") < count:
            content += client.recv(65536)
        writer.join()
    assert re.findall(rb"HTTP/1.1 (\d+)", bytes(content)) == [b"200", b"404"] * count


@contextmanager
def in_time(url, request):
    """Yield a client that sends before the server's timeout, and the start of the response.

    On a busy machine a client may send too late; then another one tries.
    """
    for _ in range(100):
        with connect(url) as client:
            received = b""
            with suppress(ConnectionError):
                client.sendall(request)
                received = client.recv(65536)
            if received:
                yield client, received
                return
    raise AssertionError("none of a hundred clients sent in time")


class TestTimeouts:
    def test_silent_connection_is_closed_without_a_response(self, hasty):
        with connect(hasty[0]) as client:
            assert read_all(client) == b""

    def test_incomplete_headers_time_out(self, hasty):
        with in_time(hasty[0], b"GET /health HTTP/1.1\r\nX: ") as (client, answer):
            answer += read_all(client)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"within 0.05 seconds" in answer

    def test_incomplete_headers_of_a_second_request_time_out(self, hasty):
        with in_time(hasty[0], get() + b"GET /health HT") as (client, answer):
            answer += read_all(client)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"408"]

    def test_empty_lines_do_not_extend_the_timeout(self, hasty):
        with connect(hasty[0]) as client, pytest.raises(ConnectionError):
            while True:
                client.sendall(b"\r\n")

    def test_idle_connection_is_closed_without_a_response(self, hasty):
        with in_time(hasty[0], get()) as (client, answer):
            answer += read_all(client)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"]

    def test_stream_is_not_limited_by_request_timeouts(self, hasty):
        url, engine = hasty
        with in_time(url, post("/v1/completions", BODY)) as (client, begun):
            while b"Hello" not in begun:
                begun += client.recv(65536)
            for _ in range(3):  # each as long as the server's patience
                with connect(url) as other:
                    read_all(other)
            client.setblocking(False)
            while True:
                try:
                    assert client.recv(65536)
                except BlockingIOError:
                    break
        assert len(engine.submitted) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x", "stream": True}), ("/generate_stream", {"inputs": "x"})],
)
@pytest.mark.parametrize("behind", [b"", get() * 3, b"GET / HT"], ids=["nothing", "requests", "half a request"])
def test_disconnect_with_pipelined_data_aborts_the_stream(path, body, behind):
    engine, aborted = aborting_engine()
    with serving(engine) as url:
        with connect(url) as client:
            client.sendall(post(path, json.dumps(body).encode()) + behind)
            read_until(client, b"Hello")
        assert aborted.wait(10)
    assert len(engine.submitted) == len(engine.aborted) == 1


def test_refused_connections_are_counted():
    engine = FakeEngine()
    with serving(engine) as url:
        for _ in range(2):
            with connect(url) as client:
                client.sendall(b"no HTTP at all\r\n\r\n")
                assert read_all(client).startswith(b"HTTP/1.1 400 ")
        assert counts(engine) == {("other", "400"): 2}


class TestConnectionLimits:
    def streams(self, url, addresses):
        clients = [connect(url, address) for address in addresses]
        for client in clients:
            client.sendall(post("/v1/completions", BODY))
            read_until(client, b"Hello")
        return clients

    def test_connection_beyond_the_limit_gets_503(self):
        engine = FakeEngine(Script(hold_after=1), limits={"max_connections": 4, "max_connections_per_address": 3})
        with serving(engine) as url:
            clients = self.streams(url, ["127.0.0.2"] * 3)
            with connect(url, "127.0.0.2") as refused:
                answer = read_all(refused)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert re.search(rb"\r\nretry-after: [1-8]\r\n", answer)
            clients += self.streams(url, ["127.0.0.3"])
            with connect(url, "127.0.0.4") as refused:
                assert read_all(refused).startswith(b"HTTP/1.1 503 ")
            assert counts(engine)["other", "503"] == 2
            for client in clients:
                client.close()

    def test_silent_connections_are_closed_for_new_ones(self):
        with serving(FakeEngine(limits={"max_connections": 8, "max_connections_per_address": 8})) as url:
            silent = [connect(url, f"127.0.0.{2 + i % 2}") for i in range(8)]
            for _ in range(3):
                with connect(url) as client:
                    client.sendall(get("/health", "Connection: close"))
                    assert b" 200 " in read_all(client)[:20]
            assert read_all(silent[0]) == b""
            for client in silent:
                client.close()


def test_unauthenticated_client_cannot_send_indefinitely():
    engine = FakeEngine(api_keys=(ApiKey(name="a", key_sha256=hash_key("sesame-open-the-door")),))
    with serving(engine) as url, connect(url) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"x" * 65536)
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")
