"""POST /v1/completions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import CapacityError, ContextLengthError, UnavailableError, WorkerDiedError
from support.fakes import DEMO_TOKENIZER, FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import error_of, events, leave_while_held, post

PATH = "/v1/completions"


def test_completion_response_has_all_fields():
    engine = FakeEngine()
    response = post(engine, PATH, {"model": "demo", "prompt": "hello"})
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    num_prompt = len(DEMO_TOKENIZER.encode("hello"))
    assert body == {
        "object": "text_completion",
        "model": "demo",
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 3,
            "total_tokens": num_prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert engine.submitted[0].prompt_token_ids == DEMO_TOKENIZER.encode("hello")
    assert engine.aborted == []


def test_completion_absent_and_null_fields_have_defaults():
    engine = FakeEngine()
    names = (
        "max_tokens temperature top_p top_k min_p seed stop n logprobs echo stream logit_bias min_tokens user"
    ).split()
    assert post(engine, PATH, {"prompt": "x", **dict.fromkeys(names)}).status_code == 200
    sampling = engine.submitted[0].sampling
    assert sampling == SamplingParams(max_tokens=16, temperature=1.0, seed=sampling.seed)


def test_requests_without_seed_get_different_seeds():
    engine = FakeEngine()
    for _ in range(3):
        post(engine, PATH, {"prompt": "x"})
    assert len({submitted.sampling.seed for submitted in engine.submitted}) == 3


def test_every_sampling_field_reaches_the_engine():
    engine = FakeEngine()
    body = {
        "prompt": "x", "max_tokens": 5, "min_tokens": 2, "temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": 42, "stop": ["a", "b"],
        "logit_bias": {"7": -100, "9": 1.5}, "stop_token_ids": [3], "include_stop_str_in_output": True,
        "ignore_eos": True, "logprobs": 2, "skip_special_tokens": False, "priority": -3,
    }  # fmt: skip
    assert post(engine, PATH, body).status_code == 200
    assert engine.submitted[0].sampling == SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0.0, top_k=7, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, logit_bias=((7, -100.0), (9, 1.5)), seed=42, stop=("a", "b"),
        stop_token_ids=(3,), include_stop_str_in_output=True, ignore_eos=True, logprobs=2, skip_special_tokens=False,
    )  # fmt: skip
    assert engine.submitted[0].priority == -3


@pytest.mark.parametrize(("sent", "seed"), [(-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63), (0, 0)])
def test_seeds_of_both_signs_are_accepted(sent, seed):
    engine = FakeEngine()
    post(engine, PATH, {"prompt": "x", "seed": sent})
    assert engine.submitted[0].sampling.seed == seed


def test_logit_bias_keys_are_normalized():
    error = error_of(post(FakeEngine(), PATH, {"prompt": "x", "logit_bias": {"7": 1, "07": -100}}))
    assert error["message"] == "`logit_bias` must name each token only once. Given: 2"


def test_top_k_minus_one_keeps_all():
    engine = FakeEngine()
    post(engine, PATH, {"prompt": "x", "top_k": -1})
    assert engine.submitted[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [DEMO_TOKENIZER.encode("a")]),
        (["a", "b"], [DEMO_TOKENIZER.encode("a"), DEMO_TOKENIZER.encode("b")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_completion_prompts_may_be_texts_or_token_ids(prompt, expected):
    engine = FakeEngine()
    body = post(engine, PATH, {"prompt": prompt}).json()
    assert [submitted.prompt_token_ids for submitted in engine.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("prompt", [[], ["a", 5], [5, [6]], ["a", [5]]])
def test_completion_refuses_invalid_prompts(prompt):
    error = error_of(post(FakeEngine(), PATH, {"prompt": prompt}))
    assert error["param"] == "prompt"
    assert "must be a text, a list of texts, token ids or a list of lists of token ids" in error["message"]


def test_choices_have_distinct_seeds():
    engine = FakeEngine()
    body = post(engine, PATH, {"prompt": ["a", "b"], "n": 3, "seed": 7}).json()
    seeds = [submitted.sampling.seed for submitted in engine.submitted]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert body["usage"]["completion_tokens"] == 18
    assert body["usage"]["prompt_tokens"] == len(DEMO_TOKENIZER.encode("a")) + len(DEMO_TOKENIZER.encode("b"))


class TestStream:
    def test_stream_has_chunks_then_done(self):
        response = post(FakeEngine(), PATH, {"prompt": "x", "stream": True})
        *chunks, done = events(response)
        assert done == "[DONE]"
        assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
            ("Hello", None),
            (" world", None),
            ("", "stop"),
        ]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all("usage" not in chunk for chunk in chunks)

    def test_chunks_without_text_are_not_sent(self):
        script = Script([Piece("a"), Piece(""), Piece("b"), Piece("")], FinishReason.LENGTH)
        chunks = events(post(FakeEngine(script), PATH, {"prompt": "x", "stream": True}))[:-1]
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def test_completion_stream_usage_is_in_a_chunk_without_choices(self):
        body = {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}}
        *pieces, usage, done = events(post(FakeEngine(), PATH, body))
        assert done == "[DONE]"
        assert [piece["usage"] for piece in pieces] == [None] * 3
        assert usage["choices"] == []
        assert usage["usage"]["prompt_tokens"] == 2
        assert usage["usage"]["completion_tokens"] == 3

    def test_continuous_usage_of_a_stream_is_cumulative(self):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(post(FakeEngine(), PATH, {"prompt": [5, 6], "stream": True, "stream_options": options}))[:-1]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
        del options["include_usage"]
        alone = events(post(FakeEngine(), PATH, {"prompt": [5, 6], "stream": True, "stream_options": options}))[:-1]
        assert [chunk["usage"]["completion_tokens"] for chunk in alone] == [1, 2, 3]

    def test_stream_interleaves_choices(self):
        chunks = events(post(FakeEngine(), PATH, {"prompt": "x", "stream": True, "n": 3}))[:-1]
        texts = ["", "", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["Hello world"] * 3

    def test_stream_has_token_ids_of_prompt_and_output(self):
        body = {"prompt": [5, 6], "stream": True, "return_token_ids": True}
        chunks = events(post(FakeEngine(), PATH, body))[:-1]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[500], [501], [502]]
        assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[5, 6], None, None]

    def test_stream_error_is_an_event(self):
        response = post(FakeEngine(Script(error="WorkAgent 0 died")), PATH, {"prompt": "x", "stream": True})
        *_, failure, done = events(response)
        assert response.status_code == 200
        assert failure["error"]["message"] == "WorkAgent 0 died"
        assert done == "[DONE]"

    def test_engine_exception_in_a_stream_is_an_event(self):
        script = Script(raises=WorkerDiedError("gone"))
        assert events(post(FakeEngine(script), PATH, {"prompt": "x", "stream": True}))[-2]["error"]["message"] == "gone"

    def test_internal_error_in_a_stream_hides_its_text(self, caplog):
        engine = FakeEngine(Script(raises=ZeroDivisionError("secret /dev/shm/name")))
        chunks = events(post(engine, PATH, {"prompt": "x", "stream": True}))
        assert chunks[-2]["error"]["message"] == "internal error"
        assert re.search("The response stream failed; .* request_id=[0-9a-f]+-0", caplog.text)

    def test_stream_options_without_stream_are_refused(self):
        body = {"prompt": "x", "stream_options": {"include_usage": True}}
        assert error_of(post(FakeEngine(), PATH, body))["param"] == "stream_options"


class TestClientDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("hold_after", [0, 2])
    def test_disconnect_aborts_the_requests_of_a_completion(self, stream, hold_after):
        engine = FakeEngine(Script(hold_after=hold_after))
        messages = leave_while_held(engine, PATH, {"prompt": "x", "n": 2, "stream": stream, "request_id": "r"})
        assert engine.aborted == ["r", "r"]
        sent = b"".join(message.get("body", b"") for message in messages if message["type"] == "http.response.body")
        assert b"[DONE]" not in sent

    def test_disconnect_does_not_abort_finished_choices(self):
        engine = FakeEngine()
        slow = Script(hold_after=2)
        engine.script_for = lambda submitted: Script() if submitted.sampling.seed == 7 else slow
        leave_while_held(engine, PATH, {"prompt": "x", "n": 2, "seed": 7, "stream": True, "request_id": "r"})
        assert engine.aborted == ["r"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("structured_outputs", {}),
    ],
)
def test_completion_unsupported_values_are_refused(field, value):
    engine = FakeEngine()
    response = post(engine, PATH, {"prompt": "x", field: value})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith(field)
    assert engine.submitted == []


def test_best_of_equal_to_n_has_no_effect():
    assert post(FakeEngine(), PATH, {"prompt": "x", "best_of": 2, "n": 2}).status_code == 200


class TestRequestId:
    def test_request_id_of_the_body_takes_precedence(self):
        engine = FakeEngine()
        response = post(engine, PATH, {"prompt": "x", "request_id": "my-1"}, headers={"x-request-id": "other"})
        assert response.json()["id"] == "cmpl-my-1"
        assert response.headers["x-request-id"] == "my-1"
        assert engine.submitted[0].request_id == "my-1"

    def test_request_id_header_is_used(self):
        assert post(FakeEngine(), PATH, {"prompt": "x"}, headers={"x-request-id": "h-1"}).json()["id"] == "cmpl-h-1"

    def test_error_response_has_a_request_id(self):
        bodies = ({"prompt": "x", "temperature": -1}, {"prompt": "x", "temperature": -1, "request_id": "h-1"}, {"x": 1})
        for path in (PATH, "/v1/messages"):
            for body in bodies:
                response = post(FakeEngine(), path, body, headers={"x-request-id": "h-1"})
                assert (response.status_code, response.headers["x-request-id"]) == (400, "h-1")
        assert len(post(FakeEngine(), PATH, {"x": 1}).headers["x-request-id"]) == 32

    def test_malformed_request_id_header_is_ignored(self):
        response = post(FakeEngine(), PATH, {"prompt": "x"}, headers={"x-request-id": "a b" * 99})
        assert response.status_code == 200
        assert "a b" not in response.json()["id"]

    def test_malformed_request_id_field_is_refused(self):
        assert error_of(post(FakeEngine(), PATH, {"prompt": "x", "request_id": "a\nb"}))["param"] == "request_id"


class TestRefusals:
    def test_unknown_model_is_404(self):
        response = post(FakeEngine(), PATH, {"model": "gpt-4", "prompt": "x"})
        assert response.status_code == 404
        assert error_of(response) == {
            "message": "`model` must be demo, the model that is served, or one of its aliases. Given: 'gpt-4'",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }

    @pytest.mark.parametrize("name", ["demo", "llama2", "internlm", "tgi", "dummy", "", None])
    def test_model_aliases_name_the_served_model(self, name):
        assert post(FakeEngine(), PATH, {"model": name, "prompt": "x"}).json()["model"] == "demo"

    @pytest.mark.parametrize(("aliases", "status"), [(("gpt-4",), 200), (("*",), 200), (("gpt-5",), 404), ((), 404)])
    def test_model_aliases_of_the_configuration(self, aliases, status):
        engine = FakeEngine()
        engine.config = replace(engine.config, model=replace(engine.config.model, model_aliases=aliases))
        response = post(engine, PATH, {"model": "gpt-4", "prompt": "x"})
        assert response.status_code == status
        assert status == 404 or response.json()["model"] == "demo"

    def test_full_queue_has_retry_after(self):
        response = post(FakeEngine(refusal=FULL_QUEUE), PATH, {"prompt": "x"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "4"
        assert error_of(response)["code"] == "queue_full"

        assert "x-queue-estimate-ms" not in response.headers

    def test_queue_estimate_is_returned(self):
        refusal = CapacityError("the first token would come too late", 2.5, 2500.4)
        response = post(FakeEngine(refusal=refusal), PATH, {"prompt": "x"})
        assert (response.headers["retry-after"], response.headers["x-queue-estimate-ms"]) == ("3", "2501")

    def test_missing_work_agent_is_503(self):
        response = post(
            FakeEngine(refusal=UnavailableError("no WorkAgent serves")), PATH, {"prompt": "x", "stream": True}
        )
        assert response.status_code == 503
        assert "retry-after" in response.headers

    def test_prompt_too_long_has_its_error_code(self):
        engine = FakeEngine(refusal=ContextLengthError("max_tokens", "must be at most 9 tokens", 10))
        response = post(engine, PATH, {"prompt": "x"})
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"

    def test_oversized_text_is_refused_before_tokenization(self):
        engine = FakeEngine()
        error = error_of(post(engine, PATH, {"prompt": "a " * 2000}))
        assert error["code"] == "context_length_exceeded"
        assert "must be at most 128 tokens long" in error["message"]

    def test_refused_choice_refuses_the_whole_request(self):
        engine = FakeEngine(refusal=FULL_QUEUE, refuse_from=2)
        assert post(engine, PATH, {"prompt": "x", "n": 3, "request_id": "r"}).status_code == 429
        assert engine.aborted == ["r", "r"]

    def test_choices_are_counted_before_submission(self):
        engine = FakeEngine(num_waiting=10)
        assert post(engine, PATH, {"prompt": "x", "n": 11}).status_code == 429
        assert engine.submitted == []

    def test_failed_generation_is_a_server_error(self):
        response = post(FakeEngine(Script(error="row 3: logits are NaN")), PATH, {"prompt": "x"})
        assert response.status_code == 500
        assert error_of(response)["message"] == "row 3: logits are NaN"

    def test_internal_error_response_hides_its_text(self):
        engine = FakeEngine(Script(raises=ZeroDivisionError("secret /dev/shm/name")))
        response = post(engine, PATH, {"prompt": "x"})
        assert response.status_code == 500
        assert error_of(response)["message"] == "internal error"


def test_request_without_living_replicas_is_503():
    error = "the WorkAgent of the request was not restarted within 300 s"
    script = Script(error=error, finish_reason=FinishReason.UNAVAILABLE)
    response = post(FakeEngine(script), PATH, {"prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.json()["error"]["code"] == "unavailable"
