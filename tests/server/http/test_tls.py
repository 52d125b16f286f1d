"""HTTPS on a real port: certificates, their renewal, incomplete handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from dataclasses import replace

import httpx
import pytest
import trustme
import uvloop
from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import ConfigError
from llm_serving.server.http import server as server_module
from llm_serving.server.http import tls
from llm_serving.server.http.acceptor import ConnectionLimits
from llm_serving.server.http.connection import Connection
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import Certificate, HttpServer
from support.fakes import FakeEngine, Piece, Script
from support.http_serving import TIMEOUT_S, connect, get, post, read_all, read_until, serving
from tools.attackers import client_hello

STREAM = b'{"prompt": "x", "stream": true}'


@pytest.fixture
def authority():
    return trustme.CA()


def issue(authority, folder):
    """Write a certificate for 127.0.0.1 and its key; return the keys of `serving_config`."""
    certificate = authority.issue_cert("127.0.0.1")
    limits = {"ssl_certfile": folder / "cert.pem", "ssl_keyfile": folder / "key.pem"}
    certificate.cert_chain_pems[0].write_to_path(limits["ssl_certfile"])
    certificate.private_key_pem.write_to_path(limits["ssl_keyfile"])
    return limits


def trusting(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def secured(authority, url, source="127.0.0.1"):
    return trusting(authority).wrap_socket(connect(url, source), server_hostname="127.0.0.1")


def shown(authority, url):
    """Return the certificate of the server."""
    with secured(authority, url) as client:
        return client.getpeercert(binary_form=True)


def test_tls_serves_requests_and_streams(authority, tmp_path):
    with serving(FakeEngine(limits=issue(authority, tmp_path))) as url:
        url = url.replace("http:", "https:")
        with httpx.Client(verify=trusting(authority)) as client:
            answer = client.post(f"{url}/v1/completions", json={"prompt": "x"})
            assert answer.json()["choices"][0]["text"] == "Hello world"
            assert "[DONE]" in client.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True}).text


def test_tls_request_in_records_of_a_byte_is_answered(authority, tmp_path):
    with serving(FakeEngine(limits=issue(authority, tmp_path))) as url, secured(authority, url) as client:
        for byte in post("/v1/completions", b'{"prompt": "x"}'):
            client.sendall(bytes([byte]))
        assert read_until(client, b"\r\n") == b"HTTP/1.1 200 OK\r\n"


def test_tls_disconnect_aborts_the_request(authority, tmp_path):
    engine, aborted = FakeEngine(Script(hold_after=1), limits=issue(authority, tmp_path)), threading.Event()
    engine.aborted = type("Aborted", (list,), {"append": lambda self, item: aborted.set()})()
    with serving(engine) as url:
        with secured(authority, url) as client:
            client.sendall(post("/v1/completions", STREAM) + get())
            assert b"Hello" in read_until(client, b"Hello")
        assert aborted.wait(10)


def test_tls_connection_limits_are_enforced(authority, tmp_path):
    with serving(FakeEngine(limits=issue(authority, tmp_path))) as url, secured(authority, url) as client:
        client.sendall(b"GET /" + b"x" * 9000)
        assert read_all(client).startswith(b"HTTP/1.1 414 ")


def test_tls_unread_response_counts_as_buffered(authority, tmp_path, monkeypatch):
    """TLS buffers any response; clients that do not read theirs hold no more than the limit."""
    limits = issue(authority, tmp_path) | {"max_buffered_bytes": 40_000_000}
    long = "x" * 30_000_000  # more than the sockets hold
    engine = FakeEngine(Script(pieces=(Piece(long), Piece("", 1))), limits=limits)
    refused, refuse = threading.Event(), Connection.refuse
    monkeypatch.setattr(Connection, "refuse", lambda self, refusal: (refuse(self, refusal), refused.set()))
    with serving(engine) as url, secured(authority, url) as client, secured(authority, url) as other:
        for each in (client, other):
            each.sendall(post("/v1/completions", b'{"prompt": "x"}', "Connection: close"))
        assert refused.wait(30)
        assert len(read_all(client)) + len(read_all(other)) < 2 * len(long)


def test_tls_long_response_is_complete(authority, tmp_path):
    long = "x" * 10_000_000
    engine = FakeEngine(Script(pieces=(Piece(long), Piece("", 1))), limits=issue(authority, tmp_path))
    with serving(engine) as url, secured(authority, url) as client:
        client.sendall(post("/v1/completions", b'{"prompt": "x"}', "Connection: close"))
        assert len(read_all(client)) > len(long)


def test_tls_close_needs_no_reply(authority, tmp_path, monkeypatch):
    """Neither a connection slot nor the end of the server waits for a client that sends no close."""
    monkeypatch.setattr(tls, "TLS_SHUTDOWN_S", 0.01)
    with serving(FakeEngine(limits=issue(authority, tmp_path))) as url:
        client = secured(authority, url)
        client.sendall(get("/health", "Connection: close"))
        assert read_all(client).startswith(b"HTTP/1.1 200 ")
        with socket.socket(fileno=client.detach()) as bare:
            bare.settimeout(30)
            assert bare.recv(1) == b""


def test_tls_reloads_changed_certificates(authority, tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CERTIFICATE_PERIOD_S", 0.01)
    engine = FakeEngine(Script(hold_after=1), limits=issue(authority, tmp_path))
    with serving(engine) as url, secured(authority, url) as client:
        client.sendall(post("/v1/completions", STREAM))
        read_until(client, b"\n\n\r\n")
        before = client.getpeercert(binary_form=True)
        issue(authority, tmp_path)
        while shown(authority, url) == before:
            pass
        client.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):  # the stream goes on
            client.recv(1)


def test_tls_keeps_the_certificate_if_new_files_are_invalid(authority, tmp_path, caplog):
    limits = issue(authority, tmp_path)
    certificate = Certificate(ServerConfig(**limits))
    key = limits["ssl_keyfile"].read_bytes()
    limits["ssl_keyfile"].write_bytes(b"")
    assert [certificate.reload_if_changed(), certificate.reload_if_changed()] == [False, False]
    limits["ssl_keyfile"].unlink()
    assert not certificate.reload_if_changed()
    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 2
    assert "serving_config.ssl_keyfile: " in errors[0]
    limits["ssl_keyfile"].write_bytes(key)
    assert certificate.reload_if_changed()


def test_tls_refuses_invalid_files_at_start(tmp_path):
    with pytest.raises(ConfigError, match=r"serving_config\.ssl_certfile"):
        Certificate(ServerConfig(ssl_certfile=tmp_path / "none.pem"))


class TestHandshakes:
    def test_tls_handshake_times_out(self, authority, tmp_path):
        limits = issue(authority, tmp_path) | {"header_timeout_s": 0.05}
        with serving(FakeEngine(limits=limits)) as url:
            for sent in (b"", b"\x16\x03\x01", get()):
                with connect(url) as client:
                    with contextlib.suppress(ConnectionError):  # its time may be over before it sends anything
                        client.sendall(sent)
                    received = read_all(client)
                assert b"HTTP" not in received if sent == get() else received == b""

    def test_tls_handshake_timeout_is_reloadable(self, authority, tmp_path):
        limits = ServerConfig(**issue(authority, tmp_path), header_timeout_s=3600.0)

        async def main():
            with bind("127.0.0.1", 0) as listener:
                server = HttpServer(None, listener, limits)
                serving = asyncio.ensure_future(server.serve([listener]))
                while not server.started:
                    await asyncio.sleep(0)
                server.reload_limits(replace(limits, header_timeout_s=0.01))
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                async with asyncio.timeout(TIMEOUT_S):
                    assert await reader.read() == b""
                writer.close()
                server.should_exit = True
                await serving

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    def test_tls_handshake_with_many_records_ends_the_connection(self, authority, tmp_path, monkeypatch):
        removed, remove = threading.Event(), ConnectionLimits.remove
        monkeypatch.setattr(
            ConnectionLimits, "remove", lambda self, connection: (remove(self, connection), removed.set())
        )
        pieces = [bytes([byte]) for byte in client_hello()[tls.HEADER_BYTES :]]
        assert len(pieces) > tls.MAX_EMPTY_RECORDS
        with serving(FakeEngine(limits=issue(authority, tmp_path))) as url, connect(url) as client:
            client.sendall(b"".join(b"\x16\x03\x01\x00\x01" + piece for piece in pieces))
            assert read_all(client) == b""
            assert removed.wait(TIMEOUT_S)

    def test_tls_handshakes_count_as_connections(self, authority, tmp_path):
        limits = issue(authority, tmp_path) | {"max_connections": 4}
        with serving(FakeEngine(limits=limits)) as url:
            silent = [connect(url, "127.0.0.2") for _ in range(4)]
            with secured(authority, url) as client:
                client.sendall(get())
                assert read_until(client, b"\r\n").startswith(b"HTTP/1.1 200")
            assert read_all(silent[0]) == b""
            for each in silent:
                each.close()

    def test_tls_connection_beyond_the_limit_gets_no_response(self, authority, tmp_path):
        """A plain-text response would be invalid, and a handshake would cost more than the connection."""
        limits = issue(authority, tmp_path) | {"max_connections": 1}
        with serving(FakeEngine(Script(hold_after=1), limits=limits)) as url, secured(authority, url) as client:
            client.sendall(post("/v1/completions", STREAM))
            read_until(client, b"Hello")
            with connect(url) as refused:
                assert read_all(refused) == b""

    def test_tls_handshakes_end_with_the_server(self, authority, tmp_path):
        with serving(FakeEngine(limits=issue(authority, tmp_path))) as url:
            client = connect(url)
            client.sendall(b"\x16")
        with client:
            assert read_all(client) == b""
