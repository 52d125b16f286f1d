"""A fake server with both routes and fixed answers, in a thread of its own."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest


class FakeServer:
    """A server that sends the texts in `answers`, one word per token; other prompts get `ok`.

    Some prompts cause failures: `break` loses the connection inside the answer, `refuse` is refused twice with
    `Retry-After`, `silent` is never answered, `long` is out of range.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.served_models = ["demo"]
        self.has_tokenizer = True
        self.cpu_s: float | None = None
        self.bodies: list[dict[str, Any]] = []
        self.num_refusals_left = 2
        self.port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        # A server closed between accepting a connection and attaching its transport would leave the transport open.
        while pending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(pending)
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if line.startswith("content-length")).split(":")[1]
                body = json.loads(await reader.readexactly(int(length)) or b"{}")
                await self._answer(writer, head.split(" ")[1], body)
            finally:
                writer.close()
                await writer.wait_closed()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        if path == "/v1/models":
            _respond(writer, 200, {"data": [{"id": name} for name in self.served_models]})
        elif path == "/tokenize" and self.has_tokenizer:
            count = len(body["prompt"].split()) + (body.get("add_special_tokens") is not False)
            _respond(writer, 200, {"count": count, "tokens": []})
        elif path == "/metrics" and self.cpu_s is not None:
            self.cpu_s += 0.5  # between any two scrapes
            _respond(writer, 200, f"# HELP process_cpu_seconds_total\nprocess_cpu_seconds_total {self.cpu_s}\n")
        elif path == "/v1/completions" or path.endswith("/generate_stream"):
            self.bodies.append(body)
            await self._generate(writer, body.get("prompt") or body["inputs"], "inputs" in body)
        else:
            _respond(writer, 404, {"detail": "Not Found"})

    async def _generate(self, writer: asyncio.StreamWriter, prompt: str, legacy: bool) -> None:
        if prompt == "refuse" and self.num_refusals_left > 0:
            self.num_refusals_left -= 1
            _respond(writer, 503, {"error": {"message": "the queue is full"}}, "retry-after: 0\r\n")
            return
        if prompt == "silent":
            await self._stopped.wait()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if prompt == "long":
            _chunk(writer, b"Error202: prompt out of range")
        else:
            text = self.answers.get(prompt, "ok")
            for event in _legacy_events(text) if legacy else _openai_events(text):
                # Borders of chunks inside an event, as a proxy may set them.
                _chunk(writer, event[:7])
                _chunk(writer, event[7:])
                await writer.drain()
                if prompt == "break":
                    return
        writer.write(b"0\r\n\r\n")


def _respond(writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str, headers: str = "") -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(f"HTTP/1.1 {status} Fake\r\n{headers}content-length: {len(data)}\r\n\r\n".encode() + data)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _pieces(text: str) -> list[str]:
    first, *pending = text.split(" ")
    return [first, *(f" {word}" for word in pending)]


def _legacy_events(text: str) -> Iterator[bytes]:
    def line(**fields: Any) -> bytes:
        return json.dumps({"event": "message", "retry": 30000, "data": [fields]}).encode() + b"\n"

    for piece in _pieces(text):
        yield line(generated_text=piece)
    yield line(generated_text=text, finish_reason="eos", generated_tokens=len(_pieces(text)))


def _openai_events(text: str) -> Iterator[bytes]:
    def event(data: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(data).encode() + b"\n\n"

    for piece in _pieces(text):
        yield event({"choices": [{"text": piece, "finish_reason": None}]})
    yield event({"choices": [{"text": "", "finish_reason": "stop"}]})
    yield event({"choices": [], "usage": {"completion_tokens": len(_pieces(text))}})
    yield b"data: [DONE]\n\n"


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()
