"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.models.pooling import Pooling
from llm_serving.server.parsing import offload
from llm_serving.server.protocols.openai import embeddings
from llm_serving.server.protocols.openai.embeddings import cosine, normalised
from support.fakes import DEMO_SPEC, DEMO_TOKENIZER, FakeEngine, Piece, Script
from support.server_client import error_of, leave_while_held, post

PATH = "/v1/embeddings"
HIDDEN = DEMO_SPEC.network.hidden
SILENT = Script((Piece("", 0),), FinishReason.LENGTH)


def ask(engine=None, **body):
    return post(engine or FakeEngine(SILENT), PATH, {"input": "hello", **body})


def numbers(response):
    assert response.status_code == 200, response.text
    return [np.array(each["embedding"], np.float32) for each in response.json()["data"]]


def test_embedding_response_has_the_vector_of_a_text():
    engine = FakeEngine(SILENT)
    response = ask(engine, model="demo", user="u", priority=3)
    answer = response.json()
    [asked] = engine.submitted
    assert (asked.wants_vector, asked.sampling.max_tokens, asked.tenant, asked.priority) == (True, 0, "u", 3)
    assert asked.prompt_token_ids == DEMO_TOKENIZER.encode("hello")
    [item] = answer.pop("data")
    num_tokens = len(asked.prompt_token_ids)
    assert answer.pop("created") > 0
    assert answer.pop("id") == f"embd-{response.headers['x-request-id']}"
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    assert answer == {"object": "list", "model": "demo", "usage": usage}
    vector = np.array(item.pop("embedding"), np.float32)
    assert item == {"object": "embedding", "index": 0}
    assert vector.tobytes() == normalised(engine.vector_of(asked.prompt_token_ids)).tobytes()
    assert np.isclose(np.linalg.norm(vector), 1)


@pytest.mark.parametrize(
    ("given", "count"), [("a", 1), (["a", "b", "a"], 3), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["a"] * 18, 18)]
)
def test_embedding_input_forms(given, count):
    vectors = numbers(ask(input=given))
    assert len(vectors) == count
    if given == ["a", "b", "a"]:
        assert vectors[0].tobytes() == vectors[2].tobytes() != vectors[1].tobytes()


def test_embedding_base64_equals_floats():
    text = ask(encoding_format="base64").json()["data"][0]["embedding"]
    assert base64.b64decode(text) == numbers(ask(encoding_format="float"))[0].astype("<f4").tobytes()


def test_embedding_dimensions_are_truncated_and_normalized():
    engine = FakeEngine(SILENT)
    [vector] = numbers(ask(engine, dimensions=8))
    whole = engine.vector_of(engine.submitted[0].prompt_token_ids)
    assert vector.tobytes() == normalised(whole[:8]).tobytes()
    assert numbers(ask(dimensions=8, normalize=False))[0].tobytes() == whole[:8].tobytes()


def test_embedding_normalization_follows_the_folder():
    engine = FakeEngine(SILENT)
    engine.pooling = Pooling(normalises=False)
    [vector] = numbers(ask(engine))
    assert vector.tobytes() == engine.vector_of(engine.submitted[0].prompt_token_ids).tobytes()
    assert np.isclose(np.linalg.norm(numbers(ask(engine, normalize=True))[0]), 1)


class TestLongTexts:
    def test_embedding_input_too_long_is_refused_by_field(self):
        engine = FakeEngine(SILENT)
        error = error_of(ask(engine, input=[[5], [5] * 129]))
        assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
        assert engine.submitted == []

    def test_embedding_input_is_truncated_at_the_end(self):
        engine = FakeEngine(SILENT)
        ask(engine, input=[[*range(5, 150)]], truncate_prompt_tokens=4)
        ask(engine, input=[[*range(5, 150)]], truncate_prompt_tokens=-1)
        assert [each.prompt_token_ids for each in engine.submitted] == [[5, 6, 7, 8], [*range(5, 133)]]

    def test_embedding_truncation_keeps_the_final_special_token(self, monkeypatch):
        class Ending:
            max_token_chars = 8

            def encode(self, text, add_special_tokens=True):
                ids = [ord(char) for char in text]
                return [1, *ids, 2] if add_special_tokens else ids

        engine = FakeEngine(SILENT)
        engine.tokenizer = Ending()
        for count in (4, 2, 1):
            ask(engine, input="hello", truncate_prompt_tokens=count)
        prompts = [each.prompt_token_ids for each in engine.submitted]
        assert prompts == [[1, ord("h"), ord("e"), 2], [1, 2], [2]]
        monkeypatch.setattr(embeddings, "COUNTED_CHARS", 2000)
        ask(engine, input="h" * 2000, truncate_prompt_tokens=3)
        assert engine.submitted[-1].prompt_token_ids == [1, ord("h"), 2]
        refused = ask(engine, input="h" * 2001, truncate_prompt_tokens=3)
        assert error_of(refused)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, None),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [5, "a"]}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5, 10**6]}, "input"),
        ({"input": [[5], [-1]]}, "input[1]"),
        ({"input": [10**30]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN + 1}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input_type": "query"}, "input_type"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"model": "other"}, "model"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_embedding_errors_name_the_field(fields, param):
    engine = FakeEngine(SILENT, max_body_bytes=2**16)
    response = ask(engine, **fields)
    if param is None:  # this tokenizer puts a token before the text
        assert response.status_code == 200
        return
    assert response.status_code in (400, 404)
    assert error_of(response)["param"] == param
    assert engine.submitted == []


def test_embedding_response_is_bounded(monkeypatch):
    monkeypatch.setattr(embeddings, "MAX_VALUES", 3 * HIDDEN)
    assert ask(input=["a"] * 3).status_code == 200
    assert error_of(ask(input=["a"] * 4))["param"] == "input"
    assert ask(input=["a"] * 4, dimensions=2).status_code == 200


def test_embedding_error_names_the_pooling_key():
    engine = FakeEngine(SILENT)
    engine.pooling = None
    assert "model_config.pooling" in error_of(ask(engine))["message"]


def test_failed_embedding_is_an_error():
    engine = FakeEngine(Script((Piece("", 0),), error="the model's last hidden state is not finite"))
    response = ask(engine, input=["a", "b"])
    assert response.status_code == 500
    assert "not finite" in error_of(response)["message"]


def test_cancelled_embedding_is_409():
    response = ask(FakeEngine(Script((Piece("", 0),), FinishReason.ABORT)), input=["a", "b"])
    assert (response.status_code, error_of(response)["code"]) == (409, "cancelled")


def test_embedding_is_aborted_on_disconnect():
    engine = FakeEngine(Script((Piece("", 0),), FinishReason.LENGTH, hold_after=0))
    leave_while_held(engine, PATH, {"input": ["a", "b"]})
    assert len(engine.aborted) == 2


def test_long_embeddings_are_serialized_off_the_event_loop(monkeypatch):
    calls = []
    original = offload.asyncio.to_thread

    async def to_thread(work, *arguments):
        calls.append(work)
        return await original(work, *arguments)

    monkeypatch.setattr(offload.asyncio, "to_thread", to_thread)
    ask(input=["a"] * (offload.INLINE_ITEMS // HIDDEN + 1))
    assert len(calls) == 2


def test_embedding_norm_is_rounded_once():
    ones = np.ones(4, np.float32)
    assert normalised(ones).tolist() == [0.5] * 4
    assert normalised(np.zeros(3, np.float32)).tolist() == [0.0] * 3
    large = np.array([1e30, -1e-30, 3e20], np.float32)
    assert normalised(large).tolist() == [1.0, np.float32(-1e-30 / np.float32(1e30)), np.float32(large[2] / large[0])]
    assert (cosine(ones, -ones), cosine(3 * ones, large[:1].repeat(4)), cosine(ones, 0 * ones)) == (-1.0, 1.0, 0.0)
