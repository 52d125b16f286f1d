"""The older servers' routes, byte for byte."""

from __future__ import annotations

import json

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams, as_float32
from llm_serving.errors import ContextLengthError, WorkerDiedError
from llm_serving.server.parsing.body import IGNORED_HEADER
from support.fakes import FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import leave_while_held, post, request

TOKENS = [
    '{"id": 500, "logprob": -0.5, "special": false, "text": "Grüß"}',
    '{"id": 501, "logprob": -0.5, "special": false, "text": " Gott"}',
    '{"id": 502, "logprob": -0.5, "special": true, "text": ""}',
]
SCRIPT = Script([Piece("Grüß"), Piece(" Gott"), Piece("")])


def body(stream=None, **parameters):
    content = {"inputs": "hello", "parameters": {"max_new_tokens": 50, **parameters}}
    return content if stream is None else content | {"stream": stream}


def summary(text, reason, count, tokens, seed=0):
    joined = ", ".join(tokens)
    return (
        f'"generated_text": "{text}", "finish_reason": "{reason}", "generated_tokens": {count}, '
        f'"prefill": [{tokens[0]}], "seed": {seed}, "tokens": [{joined}], "top_tokens": [[{tokens[0]}]]'
    )


@pytest.mark.parametrize(("route", "stream"), [("generate", True), ("generate_stream", False)])
def test_legacy_ignored_parameters_are_reported(route, stream):
    response = post(FakeEngine(SCRIPT), f"/models/demo/{route}", body(stream))
    assert response.headers[IGNORED_HEADER] == "stream"
    assert IGNORED_HEADER not in post(FakeEngine(SCRIPT), f"/models/demo/{route}", body(not stream)).headers


@pytest.mark.parametrize("path", ["/models/llama2", "/models/internlm/generate", "/models/demo/generate"])
def test_legacy_response_is_one_line(path):
    response = post(FakeEngine(SCRIPT), path, body())
    assert response.status_code == 200
    assert response.text == "{" + summary("Grüß Gott", "eos", 3, TOKENS) + ', "details": null}\n'


@pytest.mark.parametrize(("path", "stream"), [("/models/llama2", True), ("/models/llama2/generate_stream", None)])
def test_legacy_stream_is_json_lines(path, stream):
    response = post(FakeEngine(SCRIPT), path, body(stream, return_full_text="True"))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    texts = ["Grüß", " Gott", ""]
    lines = [
        '{"event": "message", "retry": 30000, "data": [{"details": null, '
        f'"generated_text": "{text}", "tokens": {token}, "top_tokens": [{token}]}}]}}\n'
        for text, token in zip(texts, TOKENS, strict=True)
    ]
    last = (
        '{"event": "message", "retry": 30000, "data": [{"details": null, '
        + summary("Grüß Gott", "eos", 3, TOKENS)
        + "}]}\n"
    )
    assert response.text == "".join(lines) + last


def test_legacy_tgi_stream_has_data_lines():
    response = post(FakeEngine(SCRIPT), "/models/llama2/generate_stream", body(return_protocol="http"))
    lines = response.text.splitlines()
    token = TOKENS[0]
    assert lines[0] == (
        f'data:{{"details": null, "generated_text": "Grüß", "tokens": {token}, "top_tokens": [{token}]}}'
    )
    assert lines[-1] == "data:{" + summary("Grüß Gott", "eos", 3, TOKENS) + ', "details": null}'


@pytest.mark.parametrize("value", [False, "False", "false"])
def test_legacy_full_text_is_optional(value):
    response = post(FakeEngine(SCRIPT), "/models/llama2/generate_stream", body(return_full_text=value))
    assert len(response.text.splitlines()) == 3


def test_legacy_stream_is_read_by_the_load_test():
    response = post(FakeEngine(SCRIPT), "/models/llama2/generate_stream", body(return_full_text="True"))
    pieces = [json.loads(line)["data"][0]["generated_text"] for line in response.text.splitlines()]
    assert "".join(pieces[:-1]) == pieces[-1] == "Grüß Gott"


def test_legacy_stream_has_a_line_for_each_token():
    engine = FakeEngine(Script([Piece("ab", 2), Piece("c", 1)], FinishReason.LENGTH))
    lines = post(engine, "/models/llama2/generate_stream", body()).text.splitlines()
    data = [json.loads(line)["data"][0] for line in lines]
    assert [(d["tokens"]["id"], d["generated_text"]) for d in data[:-1]] == [(500, ""), (501, "ab"), (502, "c")]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(finish_reason=FinishReason.STOP), "eos"),
        (Script(finish_reason=FinishReason.STOP, stop_reason="END"), "stop"),
        (Script(finish_reason=FinishReason.LENGTH), "length"),
    ],
)
def test_legacy_finish_reasons_are_eos_stop_and_length(script, reason):
    assert post(FakeEngine(script), "/models/llama2", body()).json()["finish_reason"] == reason


class TestParameters:
    def sampling(self, **parameters):
        engine = FakeEngine()
        assert post(engine, "/models/llama2", body(**{"max_new_tokens": 50, **parameters})).status_code == 200
        return engine.submitted[0].sampling

    def test_legacy_parameters_have_the_documented_defaults(self):
        sampling = self.sampling()
        assert sampling == SamplingParams(
            max_tokens=50, temperature=1.0, top_k=3, top_p=1.0, repetition_penalty=1.0, seed=sampling.seed, logprobs=0
        )

    def test_legacy_max_new_tokens_defaults_to_300(self):
        engine = FakeEngine()
        engine.max_model_len = 4096
        post(engine, "/models/llama2", {"inputs": "hello"})
        assert engine.submitted[0].sampling.max_tokens == 300

    @pytest.mark.parametrize("value", ["False", "false", False, 0, "0"])
    def test_legacy_booleans_may_be_strings(self, value):
        assert self.sampling(do_sample=value).greedy

    @pytest.mark.parametrize("value", ["True", "true", True, None])
    def test_legacy_sampling_is_the_default(self, value):
        assert self.sampling(do_sample=value).temperature == 1.0

    def test_legacy_numbers_may_be_strings(self):
        assert self.sampling(max_new_tokens="7", temperature="0.5", top_k="4").max_tokens == 7

    def test_legacy_formerly_ignored_parameters_are_honoured(self):
        sampling = self.sampling(repetition_penalty=1.25, seed=5, stop=["END"])
        assert (sampling.repetition_penalty, sampling.seed, sampling.stop) == (1.25, 5, ("END",))

    def test_legacy_seed_is_reported(self):
        assert post(FakeEngine(), "/models/llama2", body(seed=5, max_new_tokens=5)).json()["seed"] == 5

    @pytest.mark.parametrize(("sent", "used"), [(0, 1), (-5, 1), (2048, 2048), (2049, 1), (10**30, 1)])
    def test_legacy_top_k_outside_the_vocabulary_is_one(self, sent, used):
        assert self.sampling(top_k=sent).top_k == used

    @pytest.mark.parametrize(("sent", "used"), [(0.0, 0.01), (-1, 0.01), (5, 1.0), (0.5, 0.5)])
    def test_legacy_top_p_is_clipped_to_its_range(self, sent, used):
        assert self.sampling(top_p=sent).top_p == as_float32(used)

    @pytest.mark.parametrize("value", [0, -1.5])
    def test_legacy_temperature_not_above_zero_is_greedy(self, value):
        assert self.sampling(temperature=value).greedy

    def test_legacy_parameters_without_effect_accept_any_value(self):
        assert self.sampling(
            details="True", decoder_input_details=False, top_n_tokens=0, truncate=False, typical_p=0, watermark="False"
        )


class TestErrorsAsText:
    def test_legacy_prompt_beyond_the_limits_has_an_error_text(self):
        engine = FakeEngine()
        num_prompt = len(engine.tokenizer.encode("hello"))
        fits = engine.max_model_len - num_prompt - 1
        assert post(engine, "/models/llama2", body(max_new_tokens=fits)).json()["generated_text"] == "Hello world"
        response = post(engine, "/models/llama2", body(max_new_tokens=fits + 1))
        token = '{"id": 0, "logprob": 0.0, "special": false, "text": "Error202: prompt out of range"}'
        text = summary("Error202: prompt out of range", "prompt_out_of_range", 0, [token])
        assert response.status_code == 200
        assert response.text == "{" + text + ', "details": null}\n'

    def test_legacy_null_limit_error_names_the_field(self):
        response = post(FakeEngine(), "/models/llama2", body(max_new_tokens=0))
        assert response.status_code == 422
        assert "`parameters.max_new_tokens` must be an integer from 1" in response.text

    def test_legacy_prompt_too_long_for_the_engine_has_an_error_text(self):
        engine = FakeEngine(refusal=ContextLengthError("max_tokens", "must fit the cache", 9))
        response = post(engine, "/models/llama2/generate", body(max_new_tokens=5))
        assert response.json()["generated_text"] == "Error202: prompt out of range"

    def test_legacy_stream_of_an_empty_prompt_has_an_error_text(self):
        response = post(FakeEngine(), "/models/llama2", {"inputs": "", "stream": "True"})
        pieces = [json.loads(line)["data"][0]["generated_text"] for line in response.text.splitlines()]
        assert pieces == ["Error203: prompt token empty"] * 2
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"

    @pytest.mark.parametrize("script", [Script(error="gone"), Script(raises=WorkerDiedError("gone"))])
    def test_legacy_failed_stream_ends_with_an_error_text(self, script):
        response = post(FakeEngine(script), "/models/llama2/generate_stream", body())
        data = [json.loads(line)["data"][0] for line in response.text.splitlines()]
        failed = "error304: generation task stop abnormally!, please retry!"
        assert data[-2]["generated_text"] == failed
        assert data[-1]["generated_text"] == "Hello world" + failed
        assert data[-1]["finish_reason"] == "predict_failed"

    def test_legacy_failed_generation_has_an_error_text(self):
        answer = post(FakeEngine(Script(error="gone")), "/models/llama2", body()).json()
        assert answer["generated_text"].endswith("error304: generation task stop abnormally!, please retry!")
        assert answer["finish_reason"] == "predict_failed"


def test_legacy_unknown_model_name_is_404():
    for path in ("/models/gpt", "/models/gpt/generate", "/models/gpt/generate_stream"):
        response = post(FakeEngine(), path, body())
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_legacy_model_name_may_contain_slashes():
    engine = FakeEngine(SCRIPT, model_name="org/tiny")
    whole = post(engine, "/models/org/tiny/generate", body()).text
    assert json.loads(whole)["generated_text"] == "Grüß Gott"
    assert post(engine, "/models/org/tiny", body()).text == whole
    stream = post(engine, "/models/org/tiny/generate_stream", body()).text
    assert stream == post(engine, "/models/org/tiny", body(stream=True)).text != whole
    for path in ("/models/org", "/models/tiny/generate", "/models/generate"):
        response = post(engine, path, body())
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_legacy_malformed_body_keeps_its_status():
    response = post(FakeEngine(), "/models/llama2", {"inputs": 5})
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", "inputs"]


def test_legacy_full_queue_is_refused():
    assert post(FakeEngine(refusal=FULL_QUEUE), "/models/llama2", body(max_new_tokens=5)).status_code == 429


@pytest.mark.parametrize("path", ["/models/llama2/generate", "/models/llama2/generate_stream"])
def test_legacy_disconnect_aborts_the_request(path):
    engine = FakeEngine(Script(hold_after=1))
    leave_while_held(engine, path, body(max_new_tokens=5))
    assert len(engine.aborted) == len(engine.submitted) == 1


def test_legacy_batch_size_and_request_number_routes_send_one_event():
    response = request(FakeEngine(), "GET", "/serving/get_bs")
    assert response.text == 'data: {"event": "message", "retry": 30000, "data": 3}\r\n\r\n'
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    response = request(FakeEngine(), "GET", "/serving/get_request_numbers")
    assert response.text == 'data: {"event": "message", "retry": 30000, "data": 5}\r\n\r\n'


def test_legacy_model_info_describes_the_model():
    response = request(FakeEngine(), "GET", "/serving/get_serverd_model_info")
    assert response.text.startswith('data: {"docker_label": ')
    assert response.text.endswith("}\r\n\r\n")
    assert list(json.loads(response.text.removeprefix("data: "))) == [
        "docker_label", "max_batch_total_tokens", "max_concurrent_requests", "max_input_length", "max_total_tokens",
        "model_device_type", "model_dtype", "model_id", "model_pipeline_tag", "version",
    ]  # fmt: skip
