"""Errors of an invalid URL or API key are one line."""

import argparse
import contextlib
import socket
import threading

import pytest
from llm_serving.cli.main import main
from llm_serving_tools.server_client import add_server_arguments, url_of

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("command", ["reload", "advice"])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8835", "--url must begin with http:// or https://"),
        ("http://[::1", "--url must be the address of a server: Invalid IPv6 URL"),
        ("http://127.0.0.1:port", "--url must be the address of a server: nonnumeric port: 'port'"),
        ("http://a b", "--url must be the address of a server: URL can't contain control characters"),
        ("http://127.0.0.1:9\n", "--url must be the address of a server: Invalid header value"),
        (f"http://{'a' * 70}.com", "--url must be the address of a server: encoding with 'idna' codec failed"),
    ],
)
def test_server_call_refuses_an_invalid_url(capsys, command, url, message):
    assert main([command, "--url", url]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "http://127.0.0.1:8835"),
        (["--url", "https://example.org"], "https://example.org"),
        (["--port", "9"], "http://127.0.0.1:9"),
        (["--host", "localhost"], "http://localhost:8835"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9"),
    ],
)
def test_server_is_named_by_url_or_by_host_and_port(arguments, url):
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    assert url_of(parser.parse_args(arguments)) == url


@pytest.mark.parametrize("command", ["chat", "reload", "advice", "timeline", "cluster replicas", "cluster drain 0"])
def test_every_command_that_calls_a_server_takes_host_and_port(capsys, command, tmp_path):
    output = ["--output", str(tmp_path / "x")] if command == "timeline" else []
    assert main([*command.split(), "--host", "127.0.0.1", "--port", "9", *output]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert main([*command.split(), "--url", NOWHERE, "--port", "9", *output]) == 2
    assert "--url or by --host and --port, not by both" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["a-key-of-the-tests\n", "a-key-of-the-tests€", "a\x00key"])
def test_server_call_refuses_an_invalid_key_without_showing_it(capsys, key):
    assert main(["reload", "--url", NOWHERE, "--api-key", key]) == 2
    error = capsys.readouterr().err
    assert "an API key must consist of printable ASCII characters" in error
    assert "key-of" not in error


def test_error_response_with_an_incomplete_body_is_reported_with_its_status(capsys):
    def answer():
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n400\r\nabc")

    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["reload", "--port", str(listener.getsockname()[1])]) == 1
        thread.join()
    assert capsys.readouterr().err == "error: 503: ''\n"
