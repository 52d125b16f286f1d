"""`llm-serving timeline` with a server that answers, refuses or is not running."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from llm_serving.cli import main
from llm_serving.cli.arguments import API_KEY_VARIABLE

TRACE = {"traceEvents": [{"ph": "X"}, {"ph": "X"}], "displayTimeUnit": "ms"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        authorized = self.headers.get("Authorization") == "Bearer the-key"
        if self.path.startswith("/other"):
            self._answer(200, b"hello")
        else:
            self._answer(200 if authorized else 401, json.dumps(TRACE | {"path": self.path}).encode())

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_timeline_is_saved(url: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key")
    output = tmp_path / "trace.json"
    assert main.main(["timeline", "--url", url + "/", "--output", str(output), "--steps", "7"]) == 0
    assert json.loads(output.read_text()) == TRACE | {"path": "/v1/timeline?steps=7"}
    assert capsys.readouterr().out == f"{output}: 2 events; open it at https://ui.perfetto.dev\n"


def test_timeline_failure_leaves_no_file(url: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    output = tmp_path / "trace.json"
    for address, message, code in (
        (url, "401: ", main.EXIT_FAILED),
        (f"{url}/other", "sent a response that is not a trace", main.EXIT_FAILED),
        ("http://127.0.0.1:1", "no server answers", main.EXIT_FAILED),
        ("file:///etc/passwd", "must begin with http", main.EXIT_CONFIG),
    ):
        assert main.main(["timeline", "--url", address, "--output", str(output)]) == code
        assert message in capsys.readouterr().err
    assert not output.exists()
