"""Every protocol takes the one pipeline, and a whole response is the fold of the deltas that a stream sends."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.errors import RequestError
from llm_serving.server.generation import pipeline
from support.fakes import FakeEngine, Piece, Script
from support.server_client import events, post

OUTPUTS = Script((Piece("Hé"), Piece("", 1), Piece("llo wor", 2), Piece("ld", 3)), FinishReason.LENGTH)
USER = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/generate": {"inputs": "Hello"},
    "/models/demo/generate": {"inputs": "Hello"},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_goes_through_the_admission_precheck(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    precheck = pipeline.precheck

    def recorded(engine, caller, request):
        checked.append(request.prompts)
        precheck(engine, caller, request)

    monkeypatch.setattr(pipeline, "precheck", recorded)
    assert post(FakeEngine(OUTPUTS), path, BODIES[path]).status_code == 200
    assert len(checked) == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "Hello"}, "prompt"),
        ("/v1/chat/completions", {"messages": USER}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "SPECIALHello"}]}, "messages"),
        ("/v1/responses", {"input": "Hello"}, "input"),
        ("/v1/embeddings", {"input": ["Hello"]}, "input"),
        ("/generate", {"inputs": "Hello"}, "inputs"),
    ],
    ids=str,
)
def test_error_of_a_text_that_cannot_be_encoded_names_the_field_of_the_protocol(
    path: str, body: dict[str, Any], field: str
) -> None:
    engine = FakeEngine(OUTPUTS)
    engine.tokenizer = tokenizer = copy.copy(engine.tokenizer)
    encode, special = tokenizer.encode, tokenizer.token_bytes(min(tokenizer.special_token_ids)).decode()
    tokenizer.__dict__.pop("typed_text", None)

    def encode_without_hello(text: str, add_special_tokens: bool = True) -> list[int]:
        if "Hello" in text:
            raise RequestError("prompt", "cannot be encoded")
        return encode(text, add_special_tokens)

    tokenizer.encode = encode_without_hello  # type: ignore[method-assign]
    text = json.loads(json.dumps(body).replace("SPECIAL", special))
    response = post(engine, path, text)
    assert response.status_code == (422 if path == "/generate" else 400)
    assert f"`{field}` cannot be encoded" in response.text


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": 2}, {"echo": True}, {"return_token_ids": True}])
def test_completion_response_is_the_fold_of_its_chunks(fields: dict[str, Any]) -> None:
    body = {"prompt": ["Hello", "you"], "echo": False, **fields}
    if fields == {"echo": True}:
        body["prompt"] = "Hello"
    whole = post(FakeEngine(OUTPUTS), "/v1/completions", body).json()["choices"]
    *chunks, done = events(post(FakeEngine(OUTPUTS), "/v1/completions", body | {"stream": True}))
    assert done == "[DONE]"
    for choice in whole:
        deltas = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert choice["text"] == "".join(delta["text"] for delta in deltas)
        assert choice["finish_reason"] == deltas[-1]["finish_reason"]
        if "logprobs" in fields:
            for name, values in choice["logprobs"].items():
                assert values == [value for delta in deltas for value in delta["logprobs"][name]]
        if "return_token_ids" in fields:
            assert choice["token_ids"] == [token for delta in deltas for token in delta["token_ids"]]
            assert choice["prompt_token_ids"] == deltas[0]["prompt_token_ids"]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
def test_chat_response_is_the_fold_of_its_chunks(fields: dict[str, Any]) -> None:
    body = {"messages": USER, **fields}
    whole = post(FakeEngine(OUTPUTS), "/v1/chat/completions", body).json()["choices"]
    *chunks, _ = events(post(FakeEngine(OUTPUTS), "/v1/chat/completions", body | {"stream": True}))
    for choice in whole:
        deltas = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]][1:]
        assert choice["message"]["content"] == "".join(delta["delta"].get("content", "") for delta in deltas)
        assert choice["finish_reason"] == deltas[-1]["finish_reason"]
        if "logprobs" in fields:
            reported = [value for delta in deltas for value in delta["logprobs"]["content"]]
            assert choice["logprobs"]["content"] == reported
        if "return_token_ids" in fields:
            assert choice["token_ids"] == [token for delta in deltas for token in delta["token_ids"]]
