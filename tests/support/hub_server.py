"""A model hub on the loopback network with the routes that the packages of Hugging Face and ModelScope use."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StoredModel:
    """A model with one revision, which every branch in `branches` names."""

    files: dict[str, bytes]
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main", "master")
    gated: bool = False
    """Whether its files need the token of `HubServer`; the list of files is public."""


@dataclass
class HubServer:
    """The stored models, the recorded requests, and how responses are broken.

    Attributes:
        models: owner/name -> the model.
        token: Token that gives access to gated models.
        cut_after: Bytes of safetensors files, over all responses, after which a connection is closed.
        corrupt: Whether the first byte of such files is changed.
        asked: Method and path of each request.
        sent: File name -> (first byte, number of bytes sent) of each GET.
    """

    models: dict[str, StoredModel] = field(default_factory=dict)
    token: str = "hf_token"
    cut_after: int | None = None
    corrupt: bool = False
    asked: list[str] = field(default_factory=list)
    sent: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    url: str = ""

    def num_sent(self, file: str) -> int:
        return sum(count for _, count in self.sent.get(file, []))


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(file: str, content: bytes) -> str:
    """Return the hub's ETag: SHA-256 of files in large file storage, the git blob hash of other files."""
    if file.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", url.path):
            self._info(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._file(*match.groups())
        elif match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo/files", url.path):
            self._modelscope_files(match[1], query["Revision"], query["Recursive"] == "True")
        elif match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo", url.path):
            self._file(match[1], query["Revision"], query["FilePath"])
        else:
            self._answer(404, {"error": "no such route"})

    def _model(self, name: str, revision: str) -> StoredModel | None:
        model = self.hub.models.get(name)
        if model is None:
            # Without a token the real hub does not distinguish private from missing repositories.
            self._answer(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif revision not in (model.commit, *model.branches):
            self._answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            return model
        return None

    def _info(self, name: str, revision: str) -> None:
        if (model := self._model(name, revision)) is None:
            return
        siblings = [{"rfilename": file, "size": len(content)} for file, content in model.files.items()]
        gated = "manual" if model.gated else False
        self._answer(200, {"id": name, "sha": model.commit, "gated": gated, "siblings": siblings, "private": False})

    def _modelscope_files(self, name: str, revision: str, recursive: bool) -> None:
        model = self.hub.models.get(name)
        if model is None or revision not in model.branches:
            self._answer(404, {"Code": 10010205001, "Message": "not found", "Success": False})
            return
        files = [
            {"Path": file, "Name": file, "Size": len(content), "Type": "blob", "Sha256": _sha256(content)}
            for file, content in model.files.items()
            if recursive or "/" not in file
        ]
        self._answer(200, {"Code": 200, "Data": {"Files": files}, "Success": True})

    def _file(self, name: str, revision: str, file: str) -> None:
        if (model := self._model(name, revision)) is None:
            return
        if model.gated and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            status = 403 if self.headers.get("Authorization") else 401
            self._answer(status, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return
        if file not in model.files:
            self._answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = model.files[file]
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        last = int(match[2]) if match and match[2] else len(content) - 1
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{etag(file, content)}"')
        self.send_header("X-Repo-Commit", model.commit)
        self.send_header("Accept-Ranges", "bytes")
        if match:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            self._send(file, content, first, last + 1)

    def _send(self, file: str, content: bytes, first: int, end: int) -> None:
        is_weights = file.endswith(".safetensors")
        if is_weights and self.hub.corrupt:
            content = b"X" + content[1:]
        if is_weights and self.hub.cut_after is not None:
            end = min(end, max(first, self.hub.cut_after))
            self.close_connection = True
        self.hub.sent.setdefault(file, []).append((first, end - first))
        self.wfile.write(content[first:end])

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
