import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test import api_client
from load_test.api_client import (
    AnswerError,
    GenerationOptions,
    PreflightError,
    error_text,
    parse_legacy_stream,
    parse_openai_stream,
    split_lines,
)
from load_test.http_client import HttpClient, HttpResponse, TimedPiece


def legacy_line(**fields: Any) -> bytes:
    return json.dumps({"event": "message", "retry": 30000, "data": [fields]}, ensure_ascii=False).encode() + b"\n"


def openai_event(text: str, finish_reason: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


LEGACY = [
    legacy_line(generated_text="Ça"),
    legacy_line(generated_text=""),
    legacy_line(generated_text=" 好"),
    legacy_line(generated_text="Ça 好", finish_reason="eos", generated_tokens=3),
]
OPENAI = [
    openai_event("Ça"),
    openai_event(""),
    openai_event(" 好"),
    openai_event("", "stop"),
    b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n',
    b"data: [DONE]\n\n",
]


def timed(parts: list[bytes]) -> list[TimedPiece]:
    return [TimedPiece(float(second), data) for second, data in enumerate(parts)]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """Split at every position of `cuts`, modulo the length."""
    borders = sorted({c % len(data) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(borders)]


def test_legacy_client_reads_an_answer():
    answer = parse_legacy_stream(timed(LEGACY))
    assert answer.text == "Ça 好"
    assert answer.token_times_s == (0.0, 1.0, 2.0)
    assert answer.num_output_tokens == 3
    assert answer.finish_reason == "eos"


def test_openai_client_takes_token_counts_from_usage_and_times_from_events_with_tokens():
    answer = parse_openai_stream(timed(OPENAI))
    assert answer.text == "Ça 好"
    assert answer.token_times_s == (0.0, 1.0, 2.0)
    assert answer.num_output_tokens == 4
    assert answer.finish_reason == "stop"


def test_openai_answer_without_usage_counts_events():
    assert parse_openai_stream(timed([*OPENAI[:4], OPENAI[5]])).num_output_tokens == 3


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_legacy_answer_does_not_depend_on_where_the_bytes_are_split(cuts):
    answer = parse_legacy_stream(timed(cut(b"".join(LEGACY), cuts)))
    assert (answer.text, len(answer.token_times_s), answer.num_output_tokens) == ("Ça 好", 3, 3)


@given(st.lists(st.integers(0, 10_000), max_size=40), st.booleans())
def test_openai_answer_does_not_depend_on_where_the_bytes_are_split_or_how_lines_end(cuts, crlf):
    data = b"".join(OPENAI)
    answer = parse_openai_stream(timed(cut(data.replace(b"\n", b"\r\n") if crlf else data, cuts)))
    assert (answer.text, len(answer.token_times_s), answer.num_output_tokens) == ("Ça 好", 3, 4)


def test_legacy_client_times_a_line_by_its_last_byte():
    assert list(split_lines(timed([b"ab", b"c\nd", b"e\n\nf"]))) == [(1.0, b"abc"), (2.0, b"de"), (2.0, b"f")]


def test_legacy_lines_of_other_protocols_start_with_data():
    assert parse_legacy_stream(timed([b"data:" + line for line in LEGACY])).text == "Ça 好"


def test_legacy_last_line_needs_no_line_end_and_may_list_its_tokens():
    last = legacy_line(generated_text="a", finish_reason="length", generated_tokens=[{"id": 1}, {"id": 2}])
    assert parse_legacy_stream(timed([last.rstrip()])).num_output_tokens == 2


@pytest.mark.parametrize(
    "parts",
    [
        [b"Error202: prompt out of range"],
        [legacy_line(generated_text="Error202: prompt out of range", finish_reason="error")],
        [LEGACY[0], b"Error202: prompt out of range\n"],
    ],
)
def test_legacy_errors_come_with_status_200(parts):
    with pytest.raises(AnswerError, match=r"^Error202: prompt out of range$"):
        parse_legacy_stream(timed(parts))


def test_legacy_client_accepts_text_that_mentions_an_error():
    line = legacy_line(generated_text="Error handling", finish_reason="eos")
    assert parse_legacy_stream(timed([line])).text == "Error handling"


@pytest.mark.parametrize("parts", [[], LEGACY[:2], [*LEGACY[:2], LEGACY[3][:40]]])
def test_legacy_client_fails_for_an_incomplete_stream(parts):
    with pytest.raises(AnswerError):
        parse_legacy_stream(timed(parts))


def test_openai_client_fails_for_an_incomplete_stream():
    with pytest.raises(AnswerError, match=r"ended after 3 tokens without `\[DONE\]`"):
        parse_openai_stream(timed(OPENAI[:5]))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'data: {"error": {"message": "the WorkAgent died"}}\n\n', "^the WorkAgent died$"),
        (b"data: not json\n\n", "not a completion event: not json"),
        (b'data: {"choices": [1]}\n\n', "not a completion event"),
        (b'data: {"choices": [{"text": null, "finish_reason": null}]}\n\n', "not a completion event"),
        (b"data: []\n\n", "not a completion event"),
    ],
)
def test_openai_client_raises_for_error_events_and_malformed_ones(event, message):
    with pytest.raises(AnswerError, match=message):
        parse_openai_stream(timed([OPENAI[0], event]))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "overloaded"}', "overloaded"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "bad"}', "bad"),
        (b"Bad Gateway\n", "Bad Gateway"),
        (b"", ""),
    ],
)
def test_error_text_is_the_server_message(body, text):
    assert error_text(body) == text


def resolve(fake_server, api, model):
    return asyncio.run(api_client.resolve_model(HttpClient("127.0.0.1", fake_server.port), api, model))


def generate(fake_server, options, prompt):
    return asyncio.run(api_client.generate(HttpClient("127.0.0.1", fake_server.port), options, prompt, 9))


def test_legacy_request_has_path_and_body_of_the_older_servers():
    options = GenerationOptions("legacy", "llama2")
    assert options.path == "/models/llama2/generate_stream"
    assert json.loads(options.body("Hello", 7)) == {
        "inputs": "Hello",
        "parameters": {"do_sample": "False", "return_full_text": "True", "max_new_tokens": 7},
        "stream": True,
    }


def test_openai_request_has_path_and_options_in_the_body():
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
def test_legacy_and_openai_clients_return_the_same_answer(fake_server, api):
    fake_server.answers["Count to three."] = "one two three"
    result = generate(fake_server, GenerationOptions(api, "demo"), "Count to three.")
    assert result.answer.text == "one two three"
    assert result.answer.num_output_tokens == 3
    assert len(result.answer.token_times_s) == 3
    assert result.end_s >= result.answer.token_times_s[-1]


def test_client_retries_refused_requests_up_to_the_limit(fake_server):
    result = generate(fake_server, GenerationOptions("openai", "demo", max_retries=2), "refuse")
    assert (result.answer.text, result.num_retries) == ("ok", 2)


def test_client_raises_the_message_of_a_refusal(fake_server):
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
def test_retry_after_header_is_parsed_and_limited(status, value, seconds):
    assert api_client.retry_after_s(HttpResponse(status, {"retry-after": value}, ())) == seconds


def test_retry_after_ms_takes_precedence():
    headers = {"retry-after": "3", "retry-after-ms": "2250"}
    assert api_client.retry_after_s(HttpResponse(429, headers, ())) == 2.25
    assert api_client.retry_after_s(HttpResponse(429, {"retry-after": "3", "retry-after-ms": "soon"}, ())) is None


def test_client_uses_the_served_model_by_default(fake_server):
    assert resolve(fake_server, "openai", None) == "demo"
    assert resolve(fake_server, "legacy", None) == "demo"


def test_legacy_model_names_are_accepted_on_the_legacy_route_only(fake_server):
    assert resolve(fake_server, "legacy", "llama2") == "llama2"
    with pytest.raises(PreflightError, match=r"`--model` must be one of demo\. Given: llama2"):
        resolve(fake_server, "openai", "llama2")


def test_count_tokens_uses_the_tokenize_route(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    assert asyncio.run(api_client.count_tokens(http, "one two three")) == 3
    fake_server.has_tokenizer = False
    assert asyncio.run(api_client.count_tokens(http, "one two three")) is None
