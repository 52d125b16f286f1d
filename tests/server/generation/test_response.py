"""The memory of non-streaming responses in progress is bounded."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from llm_serving.errors import RequestError, UnavailableError
from llm_serving.server.app import build_site
from llm_serving.server.generation.response import LOGPROB_BYTES, OUTPUT_BYTES, ResponseBuffers
from support.fakes import FakeEngine, Piece, Script
from support.http_serving import serving
from support.server_client import error_of, events, post

LONG = Script([Piece("x")] * 50)
LIMITS = {"max_buffered_response_bytes": 100_000}
MESSAGES = [{"role": "user", "content": "Hello"}]
LARGE = {
    "/v1/completions": {"prompt": "x", "logprobs": 20, "max_tokens": 50},
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 50},
    "/generate": {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 5, "max_new_tokens": 50}},
}
LARGE["/v1/completions"]["n"] = LARGE["/v1/chat/completions"]["n"] = 2


def engine(**fields):
    return FakeEngine(LONG, limits=LIMITS, **fields)


def client_of(site):
    return httpx.AsyncClient(transport=httpx.ASGITransport(site.public), base_url="http://localhost")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_response_beyond_the_buffer_is_refused_and_aborted(path):
    served = engine()
    refused = post(served, path, LARGE[path])
    assert refused.status_code == 400
    assert error_of(refused)["message"] == (
        "`body` must ask for an answer that takes at most 100000 bytes of memory "
        "(serving_config.max_buffered_response_bytes), or for a stream"
    )
    assert len(served.aborted) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_uses_no_response_buffer(path):
    assert events(post(engine(), path, LARGE[path] | {"stream": True}))[-1] == "[DONE]"


def test_response_buffer_limits_every_protocol():
    served = FakeEngine(LONG, limits={"max_buffered_response_bytes": 50_000})
    refused = post(served, "/generate", LARGE["/generate"])
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    served = FakeEngine(Script([Piece("x" * 100)] * 100), limits={"max_buffered_response_bytes": 5_000})
    for path, body in (
        ("/v1/messages", {"model": "demo", "max_tokens": 100, "messages": MESSAGES}),
        ("/v1/responses", {"model": "demo", "input": "x"}),
        ("/models/llama2/generate", {"inputs": "x", "parameters": {"max_new_tokens": 100}}),
    ):
        assert "serving_config.max_buffered_response_bytes" in post(served, path, body).text
    embedded = FakeEngine(limits={"max_buffered_response_bytes": 500})
    assert "serving_config.max_buffered_response_bytes" in post(embedded, "/v1/embeddings", {"input": ["x"] * 3}).text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_last_output_may_exceed_the_response_buffer(path):
    served = FakeEngine(Script([Piece("Hello", 20)]), limits={"max_buffered_response_bytes": 100_000})
    refused = post(served, path, LARGE[path] | {"n": 1})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "body")


def test_response_buffer_counts_best_of_candidates():
    body = {"prompt": "x", "best_of": 8, "max_tokens": 50}
    assert post(engine(), "/v1/completions", body | {"best_of": 2}).status_code == 200
    served = FakeEngine(LONG, limits={"max_buffered_response_bytes": 20_000})
    assert post(served, "/v1/completions", body).status_code == 400


def test_sent_response_leaves_the_buffer():
    served = FakeEngine(Script(hold_after=1))

    async def talking():
        site = build_site(served)
        answers = site.routes.response_buffers
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site.public), base_url="http://localhost") as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x", "logprobs": 3}))
            await served.held.wait()
            held = answers.num_bytes
            served.gate.set()
            assert (await asking).status_code == 200
        return held, answers.num_bytes, answers._responses

    assert asyncio.run(talking()) == (OUTPUT_BYTES + len("Hello") + 4 * LOGPROB_BYTES, 0, set())


def test_background_response_beyond_the_buffer_fails():
    async def talking():
        site = build_site(FakeEngine(Script([Piece("x" * 100)] * 100), limits={"max_buffered_response_bytes": 5_000}))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site.public), base_url="http://localhost") as client:
            body = {"model": "demo", "input": "x", "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            shown = begun
            while shown["status"] == "in_progress":
                await asyncio.sleep(0)
                shown = (await client.get(f"/v1/responses/{begun['id']}")).json()
        return shown

    shown = asyncio.run(talking())
    assert shown["status"] == "failed"
    assert "serving_config.max_buffered_response_bytes" in shown["error"]["message"]


def test_full_response_buffer_ends_the_largest_response_of_the_largest_tenant():
    answers = ResponseBuffers(100)
    given_up = []
    alone = answers.open("one", lambda: given_up.append("alone"))
    several = [answers.open("many", lambda name=name: given_up.append(name)) for name in "abc"]
    answers.grow(alone, 40)
    for each, size in zip(several, (15, 20, 20), strict=True):
        answers.grow(each, size)
    answers.grow(several[0], 10)
    assert [each.failure for each in (alone, *several[1:])] == [None] * 3
    assert isinstance(several[0].failure, UnavailableError)
    assert several[0].failure.retry_after == 1.0
    assert answers.num_bytes == 80
    answers.grow(several[0], 1000)
    assert answers.num_bytes == 80, "it has ended"
    answers.grow(alone, 100)
    assert isinstance(alone.failure, RequestError)
    for each in several:
        answers.release(each)
    assert (answers.num_bytes, answers._bytes_by_source, given_up) == (0, {}, ["a", "alone"])


def test_response_that_would_exceed_the_buffer_is_refused():
    """A response larger than the buffers of all connections is never sent."""
    limits = {"max_buffered_bytes": 10_000}
    body = {key: value for key, value in LARGE["/v1/completions"].items() if key != "n"}
    with serving(FakeEngine(LONG, limits=limits)) as url:
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert httpx.post(f"{url}/v1/completions", json=body | {"logprobs": 1}).status_code == 200
    assert refused.status_code == 400
    assert "an answer of at most 10000 bytes (serving_config.max_buffered_bytes)" in error_of(refused)["message"]
    assert post(FakeEngine(LONG, limits=limits), "/v1/completions", body).status_code == 200, "without a connection"


def test_full_response_buffer_spares_other_tenants(caplog):
    """The aborted response is reported on its own connection, whatever it waits for."""
    served = engine()
    served.script_for = lambda submitted: LONG if submitted.sampling.logprobs else Script(hold_after=1)

    async def talking():
        site = build_site(served)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site.public), base_url="http://localhost") as client:
            small = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
            await served.held.wait()
            large = await client.post("/v1/completions", json=LARGE["/v1/completions"])
            served.gate.set()
            return (await small).status_code, large.status_code

    assert asyncio.run(talking()) == (200, 400)
    assert "failed" not in caplog.text
