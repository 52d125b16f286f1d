"""Errors of a body that is not JSON."""

from __future__ import annotations

import pytest
from llm_serving.errors import RequestError
from llm_serving.server.batches.runner import check_lines
from llm_serving.server.parsing.body import decode_body
from llm_serving.server.protocols.openai.schemas import CompletionRequest
from support.fakes import FakeEngine
from support.server_client import error_of, post

HALF = "half of a surrogate pair, which is no character, at byte"


@pytest.mark.parametrize("body", [rb'{"prompt": "\ud800"}', rb'{"prompt": "ab\ud800cdefghijkl"}', rb'{"\ud800": 1}'])
@pytest.mark.parametrize("half", [rb"\ud800", rb"\uDFFF", rb"\ud800\ud801"])
def test_lone_surrogate_error_is_explicit(body, half):
    response = post(FakeEngine(), "/v1/completions", body.replace(rb"\ud800", half))
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(f"`body` must be valid JSON: {HALF} ")


def test_lone_surrogate_in_an_unknown_field_is_reported():
    response = post(FakeEngine(), "/v1/completions", rb'{"prompt": "x", "other": "\ud800 and more"}')
    assert HALF in error_of(response)["message"]


def test_lone_surrogate_in_a_batch_line_is_reported():
    [fault] = check_lines([rb'{"custom_id": "\ud800", "url": "/v1/completions", "body": {}}'], "/v1/completions")
    assert fault.message == f"is not a request: {HALF} 21"


@pytest.mark.parametrize("body", [b'{"prompt": "ab', b'{"prompt": ', rb'{"prompt": "\ud83d\ude00'])
def test_truncated_json_error_is_explicit(body):
    with pytest.raises(RequestError, match=r"`body` must be valid JSON: Input data was truncated"):
        decode_body(body, CompletionRequest)


def test_surrogate_pair_is_accepted():
    assert decode_body(rb'{"prompt": "\ud83d\ude00"}', CompletionRequest).prompt == "\U0001f600"
