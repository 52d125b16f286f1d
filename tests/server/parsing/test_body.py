"""What is said of a body that is no JSON."""

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
def test_half_a_character_is_told_as_that(body, half):
    response = post(FakeEngine(), "/v1/completions", body.replace(rb"\ud800", half))
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(f"`body` must be valid JSON: {HALF} ")


def test_half_a_character_in_a_field_that_is_not_served_is_told_too():
    response = post(FakeEngine(), "/v1/completions", rb'{"prompt": "x", "other": "\ud800 and more"}')
    assert HALF in error_of(response)["message"]


def test_half_a_character_in_a_line_of_a_batch_is_told_too():
    [fault] = check_lines([rb'{"custom_id": "\ud800", "url": "/v1/completions", "body": {}}'], "/v1/completions")
    assert fault.message == f"is not a request: {HALF} 21"


@pytest.mark.parametrize("body", [b'{"prompt": "ab', b'{"prompt": ', rb'{"prompt": "\ud83d\ude00'])
def test_what_is_cut_off_is_told_as_that(body):
    with pytest.raises(RequestError, match=r"`body` must be valid JSON: Input data was truncated"):
        decode_body(body, CompletionRequest)


def test_a_whole_pair_is_a_character():
    assert decode_body(rb'{"prompt": "\ud83d\ude00"}', CompletionRequest).prompt == "\U0001f600"
