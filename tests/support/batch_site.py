"""A server that keeps its batches in a folder, and the files that its client uploads."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
from llm_serving.server.app import build_site, open_batches

CHAT = "/v1/chat/completions"


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hello", **body}}


def jsonl(*lines):
    return "\n".join(json.dumps(each) for each in lines).encode()


class Site:
    """A client of an engine whose batches are kept in a folder."""

    def __init__(self, engine, folder, headers=None):
        self.engine = engine
        serving = replace(engine.config.serving, batch_path=folder / "batches.db")
        engine.config = replace(engine.config, serving=serving)
        self._site = build_site(engine)
        self.public = self._site.public
        transport = httpx.ASGITransport(self.public)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async def __aenter__(self):
        self.batches = self._site.routes.batches = open_batches(self.engine, self._site.internal)
        await self.batches.start()
        return self

    async def __aexit__(self, *_):
        await self.batches.stop()
        await self.client.aclose()

    async def upload(self, content):
        form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        return (await self.client.post("/v1/files", **form)).json()["id"]

    async def begin(self, content, endpoint="/v1/completions", **fields):
        file_id = await self.upload(content)
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **fields}
        answer = await self.client.post("/v1/batches", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    async def show(self, batch_id):
        return (await self.client.get(f"/v1/batches/{batch_id}")).json()

    async def answered(self, batch_id, count):
        while (await self.show(batch_id))["request_counts"]["completed"] < count:
            await asyncio.sleep(0)

    async def ended(self, batch_id):
        await asyncio.wait([self.batches.task(batch_id)])
        return await self.show(batch_id)

    async def lines(self, file_id):
        text = (await self.client.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(each) for each in text.splitlines()]


FORM = {"content-type": "multipart/form-data; boundary=b"}
FORM_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
FORM_TAIL = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'


def form_of(num_bytes):
    return FORM_HEAD + b"x" * num_bytes + FORM_TAIL


class SlowForm:
    """A form whose file is complete, and whose end arrives when the test allows it."""

    def __init__(self, num_bytes):
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self._num_bytes = num_bytes

    async def content(self):
        yield FORM_HEAD + b"x" * self._num_bytes
        self.has_begun.set()
        await self.may_end.wait()
        yield FORM_TAIL


def run(talking):
    return asyncio.run(talking())
