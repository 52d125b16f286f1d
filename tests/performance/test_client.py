import asyncio
import json

import client
import pytest
from client import GenerationOptions, PreflightError
from http_client import HttpClient, HttpResponse
from streams import AnswerError


def resolve(fake_server, api, model):
    return asyncio.run(client.resolve_model(HttpClient("127.0.0.1", fake_server.port), api, model))


def generate(fake_server, options, prompt):
    return asyncio.run(client.generate(HttpClient("127.0.0.1", fake_server.port), options, prompt, 9))


def test_legacy_request():
    options = GenerationOptions("legacy", "llama2")
    assert options.path == "/models/llama2/generate_stream"
    assert json.loads(options.body("Hello", 7)) == {
        "inputs": "Hello",
        "parameters": {"do_sample": "False", "return_full_text": "True", "max_new_tokens": 7},
        "stream": True,
    }


def test_openai_request():
    options = GenerationOptions("openai", "demo", ignore_eos=True, priority=-1)
    assert options.path == "/v1/completions"
    assert json.loads(options.body("Hello", 7)) == {
        "model": "demo",
        "prompt": "Hello",
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": -1,
    }


@pytest.mark.parametrize("api", ["legacy", "openai"])
def test_both_routes_give_the_same_answer(fake_server, api):
    fake_server.answers["Count to three."] = "one two three"
    result = generate(fake_server, GenerationOptions(api, "demo"), "Count to three.")
    assert result.answer.text == "one two three"
    assert result.answer.num_output_tokens == 3
    assert len(result.answer.token_times_s) == 3
    assert result.end_s >= result.answer.token_times_s[-1]


def test_refused_requests_are_sent_again_as_often_as_allowed(fake_server):
    result = generate(fake_server, GenerationOptions("openai", "demo", max_retries=2), "refuse")
    assert (result.answer.text, result.num_retries) == ("ok", 2)


def test_a_refusal_is_an_error_with_the_servers_words(fake_server):
    with pytest.raises(AnswerError, match=r"^HTTP 503: the queue is full$"):
        generate(fake_server, GenerationOptions("openai", "demo", max_retries=1), "refuse")


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [
        (503, "2", 2.0),
        (429, "0.5", 0.5),
        (429, "86400", 120.0),
        (429, "-1", 0.0),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT", None),
        (503, "nan", None),
        (500, "2", None),
    ],
)
def test_retry_after(status, value, seconds):
    assert client.retry_after_s(HttpResponse(status, {"retry-after": value}, ())) == seconds


def test_milliseconds_count_before_whole_seconds():
    headers = {"retry-after": "3", "retry-after-ms": "2250"}
    assert client.retry_after_s(HttpResponse(429, headers, ())) == 2.25
    assert client.retry_after_s(HttpResponse(429, {"retry-after": "3", "retry-after-ms": "soon"}, ())) is None


def test_the_served_model_is_the_default(fake_server):
    assert resolve(fake_server, "openai", None) == "demo"
    assert resolve(fake_server, "legacy", None) == "demo"


def test_the_legacy_names_stand_for_any_model_on_the_legacy_route_only(fake_server):
    assert resolve(fake_server, "legacy", "llama2") == "llama2"
    with pytest.raises(PreflightError, match=r"`--model` must be one of demo\. Given: llama2"):
        resolve(fake_server, "openai", "llama2")


def test_tokens_are_counted_by_the_server_where_it_can(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    assert asyncio.run(client.count_tokens(http, "one two three")) == 3
    fake_server.has_tokenizer = False
    assert asyncio.run(client.count_tokens(http, "one two three")) is None
