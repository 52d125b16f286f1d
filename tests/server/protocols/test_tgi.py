"""The routes of text-generation-inference."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.server.generation.sampling import with_choice_seed
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.protocols.text_schemas import TGIParameters
from llm_serving.server.protocols.tgi import TGIBuilder
from support.fakes import DEMO_TOKENIZER, FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import events, leave_while_held, post, request


def body(**parameters):
    return {"inputs": "hello", "parameters": parameters}


def test_tgi_root_returns_a_list():
    assert post(FakeEngine(), "/", body()).json() == [{"generated_text": "Hello world"}]


def test_tgi_generate_returns_an_object():
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


def test_tgi_details_have_finish_reason_seed_and_tokens():
    script = Script([Piece("ab", 2)], FinishReason.LENGTH)
    details = post(FakeEngine(script), "/generate", body(details=True, seed=4, do_sample=True)).json()["details"]
    assert details["finish_reason"] == "length"
    assert details["seed"] == 4
    assert [token["text"] for token in details["tokens"]] == ["", "ab"]


def test_tgi_top_n_tokens_are_returned_for_each_token():
    received = events(post(FakeEngine(), "/generate_stream", body(top_n_tokens=2)))
    assert [token["id"] for token in received[0]["top_tokens"]] == [500, 501]


def test_tgi_return_full_text_includes_the_prompt():
    assert post(FakeEngine(), "/generate", body(return_full_text=True)).json()["generated_text"] == "helloHello world"


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.75}, 0.75),
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
    ],
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
        {"best_of": 2}, {"typical_p": 0.0}, {"grammar": {"type": "regex"}}, {"watermark": True}, {"temperature": 0.0},
        {"best_of": 0}, {"best_of": 129, "do_sample": True}, {"max_new_tokens": 0}, {"truncate": 0},
        {"top_n_tokens": 21}, {"stop_sequences": ["x"] * 17}, {"min_new_tokens": 9, "max_new_tokens": 8},
    ],
)  # fmt: skip
def test_tgi_unsupported_values_are_validation_errors(parameters):
    response = post(FakeEngine(), "/generate", body(**parameters))
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert f"`{next(iter(parameters))}" in response.json()["error"]


@pytest.mark.parametrize("parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
def test_tgi_stream_has_one_sequence_without_prompt_tokens(parameters):
    response = post(FakeEngine(), "/generate_stream", body(**parameters))
    assert response.status_code == 422
    assert f"`{next(iter(parameters))}`" in response.json()["error"]


def test_tgi_decoder_input_details_are_the_prompt_with_logprobs():
    engine = FakeEngine()
    details = post(engine, "/generate", body(decoder_input_details=True)).json()["details"]
    prompt = DEMO_TOKENIZER.encode("hello")
    assert [token["id"] for token in details["prefill"]] == prompt
    assert "".join(token["text"] for token in details["prefill"]).endswith("hello")
    first, *others = [token["logprob"] for token in details["prefill"]]
    assert first is None and all(logprob <= 0 for logprob in others)
    assert engine.submitted[0].sampling.prompt_logprobs == 0
    assert len(details["tokens"]) == 3
    assert post(FakeEngine(), "/generate", body(details=True)).json()["details"]["prefill"] == []


def test_tgi_best_of_returns_the_most_likely_sequence_and_the_others():
    parameters = TGIParameters(best_of=3, do_sample=True, details=True)
    sampling = SamplingParams(seed=7)
    builder = TGIBuilder(DEMO_TOKENIZER, "hello", [5], parameters, sampling, as_list=False)
    for index, (text, logprob) in enumerate((("a", -3.0), ("b", -1.0), ("c", -2.0))):
        builder.fold(index, finished(text, logprob))
    answer = json.loads(asyncio.run(builder.response({})).body)
    assert answer["generated_text"] == "b"
    others = answer["details"]["best_of_sequences"]
    assert [each["generated_text"] for each in others] == ["c", "a"]
    assert [each["tokens"][0]["logprob"] for each in others] == [-2.0, -3.0]
    seeds = [each["seed"] for each in (answer["details"], *others)]
    assert seeds == [with_choice_seed(sampling, choice).seed for choice in (1, 2, 0)]


def finished(text, logprob):
    return RequestOutput(
        request_id="x",
        text=text,
        token_ids=(500,),
        logprobs=(TokenLogprobs(500, logprob, (), ()),),
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=1,
        finish_reason=FinishReason.LENGTH,
    )


def test_tgi_best_of_generates_as_many_sequences():
    engine = FakeEngine()
    details = post(engine, "/generate", body(best_of=3, do_sample=True, seed=7, details=True)).json()["details"]
    assert [submitted.sampling.seed == 7 for submitted in engine.submitted] == [True, False, False]
    names = {"generated_text", "finish_reason", "generated_tokens", "seed", "input_length", "prefill", "tokens"}
    assert [set(each) for each in details["best_of_sequences"]] == [names] * 2
    assert post(FakeEngine(), "/generate", body(best_of=1, details=True)).json()["details"]["best_of_sequences"] is None


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


def test_tgi_full_queue_is_an_overloaded_error():
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


def test_tgi_info_describes_the_model():
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
    streamed = [each["token"] for each in events(post(engine, "/generate_stream", {"inputs": "x"}))]
    for tokens in (details["tokens"], streamed):
        assert "".join(token["text"] for token in tokens if not token["special"]) == f"Hello world{held}"
        assert [token["special"] for token in tokens] == [False, False, special]
    assert [top["special"] for [top] in details["top_tokens"]] == [False, False, True]
