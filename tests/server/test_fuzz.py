"""No route fails with an internal error for any JSON."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.server.app import create_app
from llm_serving.server.routes import ENDPOINTS
from support.fakes import FakeEngine, Script

POSTS = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]
USUAL = {
    "prompt": "hello",
    "inputs": "hello",
    "input": "hello",
    "query": "hello",
    "documents": ["hello"],
    "text_1": "hello",
    "text_2": "hello",
    "messages": [{"role": "user", "content": "hello"}],
    "tokens": [5],
    "max_tokens": 4,
    "parameters": {"max_new_tokens": 4},
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["demo", "True", "text", "user", "sse", "\x00", "<s>", "{{ 1/0 }}"])
)
KEYS = st.text(max_size=4) | st.sampled_from(["role", "content", "type", "text", "5"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def fields_of(struct, prefix=""):
    """Return the names of all fields, and of those in `parameters`, which is another struct."""
    names = []
    for field in msgspec.structs.fields(struct):
        names.append(prefix + field.encode_name)
        if field.encode_name == "parameters":
            inner = next(kind for kind in field.type.__args__ if issubclass(kind, msgspec.Struct))
            names += fields_of(inner, "parameters.")
    return names


async def status_of(engine, path, body):
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(path, content=json.dumps(body).encode())
        return response.status_code


@pytest.mark.parametrize("endpoint", POSTS, ids=lambda endpoint: endpoint.path)
@given(data=st.data())
@settings(max_examples=30)
def test_fuzzed_field_value_is_answered_or_refused(endpoint, data):
    names = fields_of(endpoint.body)
    body = {name: value for name, value in USUAL.items() if name in names}
    body["parameters"] = dict(USUAL["parameters"])
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        value = data.draw(VALUES)
        inner = name.removeprefix("parameters.")
        if inner == name:
            body[name] = value
        elif isinstance(body["parameters"], dict):
            body["parameters"][inner] = value
    engine = FakeEngine(Script(), max_body_bytes=2**20)
    status = asyncio.run(status_of(engine, endpoint.path.replace("{name:path}", "demo"), body))
    assert status in (200, 400, 404, 413, 422, 429)
    assert engine.aborted == []
