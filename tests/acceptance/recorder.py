"""A proxy between a client and a server that records requests and responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 600.0
_OWN = {"connection", "transfer-encoding", "keep-alive", "content-length", "date", "server"}


@dataclass
class Recorder:
    """The recorded requests in order; clients use `url` in place of the server's."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def recording(host: str, port: int) -> Iterator[Recorder]:
    """Forward requests to the server at this address during the context."""
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on()

        do_POST = do_DELETE = do_GET  # noqa: N815

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")
            }
            connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
            try:
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                asked = {"method": self.command, "path": self.path, "status": answer.status}
                if body:
                    asked["body"] = json.loads(body)
                recorder.asked.append(asked)
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):  # a client that disconnects early
                    while piece := answer.read1(65536):
                        self.wfile.write(piece)
                        self.wfile.flush()
            finally:
                connection.close()
                self.close_connection = True

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # a response for which no client waits must not delay the end

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        recorder.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
