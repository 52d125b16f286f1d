"""The routes of text-generation-inference."""

from __future__ import annotations

import copy

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.server.parsing.body import IGNORED_HEADER
from support.fakes import DEMO_TOKENIZER, FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import events, leave_while_held, post, request


def body(**parameters):
    return {"inputs": "hello", "parameters": parameters}


def test_root_answers_with_a_list():
    assert post(FakeEngine(), "/", body()).json() == [{"generated_text": "Hello world"}]


def test_generate_answers_with_an_object():
    assert post(FakeEngine(), "/generate", {"inputs": "hello"}).json() == {"generated_text": "Hello world"}


@pytest.mark.parametrize(("path", "stream"), [("/", True), ("/generate_stream", False)])
def test_tgi_stream_has_one_token_per_event(path, stream):
    response = post(FakeEngine(), path, body(details=True) | {"stream": stream})
    received = events(response)
    assert [event["token"] for event in received] == [
        {"id": 500, "text": "Hello", "logprob": -0.5, "special": False},
        {"id": 501, "text": " world", "logprob": -0.5, "special": False},
        {"id": 502, "text": "", "logprob": -0.5, "special": False},
    ]
    assert [event["index"] for event in received] == [1, 2, 3]
    assert [event["generated_text"] for event in received] == [None, None, "Hello world"]
    assert received[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 3,
        "seed": None,
        "input_length": len(DEMO_TOKENIZER.encode("hello")),
    }


def test_tgi_details():
    script = Script([Piece("ab", 2)], FinishReason.LENGTH)
    details = post(FakeEngine(script), "/generate", body(details=True, seed=4, do_sample=True)).json()["details"]
    assert details["finish_reason"] == "length"
    assert details["seed"] == 4
    assert [token["text"] for token in details["tokens"]] == ["", "ab"]


def test_tgi_top_tokens():
    received = events(post(FakeEngine(), "/generate_stream", body(top_n_tokens=2)))
    assert [token["id"] for token in received[0]["top_tokens"]] == [500, 501]


def test_tgi_return_full_text():
    assert post(FakeEngine(), "/generate", body(return_full_text=True)).json()["generated_text"] == "helloHello world"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [({}, 0.0), ({"do_sample": True}, 1.0), ({"temperature": 0.75}, 0.75), ({"top_k": 5}, 1.0), ({"top_p": 0.9}, 1.0)],
)
def test_tgi_sampling_parameters_enable_sampling(parameters, temperature):
    engine = FakeEngine()
    post(engine, "/generate", body(**parameters))
    assert engine.submitted[0].sampling.temperature == temperature


def test_tgi_truncate_keeps_the_end_of_the_prompt():
    engine = FakeEngine()
    post(engine, "/generate", {"inputs": "one two three", "parameters": {"truncate": 2}})
    assert engine.submitted[0].prompt_token_ids == DEMO_TOKENIZER.encode("one two three")[-2:]


def test_tgi_stop_sequence_is_part_of_the_text():
    engine = FakeEngine(Script(stop_reason="world"))
    answer = post(engine, "/generate", body(stop=["world"], details=True)).json()
    assert answer["details"]["finish_reason"] == "stop_sequence"
    assert engine.submitted[0].sampling.include_stop_str_in_output


@pytest.mark.parametrize(
    "parameters",
    [
        {"best_of": 2}, {"typical_p": 0.5}, {"grammar": {"type": "regex"}}, {"watermark": True}, {"temperature": 0.0},
        {"decoder_input_details": True}, {"max_new_tokens": 0}, {"truncate": 0}, {"top_n_tokens": 21},
        {"stop_sequences": ["x"] * 17}, {"min_new_tokens": 9, "max_new_tokens": 8},
    ],
)  # fmt: skip
def test_tgi_unsupported_values_are_validation_errors(parameters):
    response = post(FakeEngine(), "/generate", body(**parameters))
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert f"`{next(iter(parameters))}" in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "parameters", "ignored"),
    [
        ("/generate", {"stream": True}, {}, "stream"),
        ("/generate", {"stream": False}, {}, None),
        ("/generate_stream", {"stream": False}, {}, "stream"),
        ("/", {"stream": True}, {"top_n_tokens": 2}, None),
        ("/generate", {}, {"top_n_tokens": 2}, "top_n_tokens"),
        ("/generate", {}, {"top_n_tokens": 2, "details": True}, None),
    ],
)
def test_tgi_parameters_without_effect_are_reported(path, fields, parameters, ignored):
    response = post(FakeEngine(), path, body(**parameters) | fields)
    assert response.headers.get(IGNORED_HEADER) == ignored


def test_tgi_full_queue_is_overloaded():
    response = post(FakeEngine(refusal=FULL_QUEUE), "/generate_stream", body())
    assert response.status_code == 429
    assert response.json()["error_type"] == "overloaded"


def test_tgi_stream_error_is_an_event():
    received = events(post(FakeEngine(Script(error="gone")), "/generate_stream", body()))
    assert received[-1] == {"error": "gone", "error_type": "generation"}


def test_tgi_disconnect_aborts_the_request():
    engine = FakeEngine(Script(hold_after=1))
    leave_while_held(engine, "/generate_stream", body())
    assert len(engine.aborted) == len(engine.submitted) == 1


def test_tgi_info():
    info = request(FakeEngine(), "GET", "/info").json()
    assert info["model_id"] == "demo"
    assert info["max_total_tokens"] == 128


@pytest.mark.parametrize(("held", "special"), [("<", False), ("", True)])
def test_tgi_token_texts_join_to_the_answer(held, special):
    """Text that was held back for a stop string arrives with the last token."""
    engine = FakeEngine(Script([Piece("Hello"), Piece(" world"), Piece(held)]))
    engine.tokenizer = copy.copy(DEMO_TOKENIZER)
    engine.tokenizer.special_token_ids = frozenset({502})
    parameters = {"details": True, "top_n_tokens": 1}
    details = post(engine, "/generate", {"inputs": "x", "parameters": parameters}).json()["details"]
    told = [each["token"] for each in events(post(engine, "/generate_stream", {"inputs": "x"}))]
    for tokens in (details["tokens"], told):
        assert "".join(token["text"] for token in tokens if not token["special"]) == f"Hello world{held}"
        assert [token["special"] for token in tokens] == [False, False, special]
    assert [top["special"] for [top] in details["top_tokens"]] == [False, False, True]
