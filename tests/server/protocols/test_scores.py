"""POST /v1/score and /v1/rerank."""

from __future__ import annotations

import math

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.models.pooling import Pooling
from llm_serving.server.protocols.openai.embeddings import cosine
from support.fakes import FakeEngine, Piece, Script
from support.server_client import error_of, post

SILENT = Script((Piece("", 0),), FinishReason.LENGTH)
RERANK = {"query": "a", "documents": ["b", "a", {"text": "c"}]}


def score(first: str, second: str) -> float:
    engine = FakeEngine()
    return cosine(*(engine.vector_of(engine.tokenizer.encode(text)) for text in (first, second)))


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, ["ab"]),
        ({"text_1": "a", "text_2": ["a", "b"]}, ["aa", "ab"]),
        ({"text_1": ["a", "b"], "text_2": ["b", "c"]}, ["ab", "bc"]),
        ({"queries": ["a"], "documents": ["b", "c", "a"]}, ["ab", "ac", "aa"]),
    ],
)
def test_score_route_returns_the_scores_of_pairs(body, pairs):
    answer = post(FakeEngine(SILENT), "/v1/score", body).json()
    assert [each["index"] for each in answer["data"]] == list(range(len(pairs)))
    assert [each["score"] for each in answer["data"]] == [score(*pair) for pair in pairs]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents_by_score(path):
    answer = post(FakeEngine(SILENT), path, RERANK).json()
    results = answer["results"]
    assert [each["relevance_score"] for each in results] == sorted((score("a", x) for x in "bac"), reverse=True)
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == 1.0
    assert {each["index"]: each["document"]["text"] for each in results} == {0: "b", 1: "a", 2: "c"}


def test_rerank_returns_top_n_without_texts_on_request():
    answer = post(FakeEngine(SILENT), "/rerank", RERANK | {"top_n": 2, "return_documents": False}).json()
    assert [set(each) for each in answer["results"]] == [{"index", "relevance_score"}] * 2


def test_rerank_keeps_the_order_of_equal_documents():
    answer = post(FakeEngine(SILENT), "/rerank", {"query": "a", "documents": ["b"] * 5}).json()
    assert [each["index"] for each in answer["results"]] == list(range(5))


def test_rerank_truncates_documents_only():
    engine = FakeEngine(SILENT)
    post(engine, "/rerank", {"query": "one two three", "documents": ["one two three"], "max_tokens_per_doc": 2})
    query, document = (each.prompt_token_ids for each in engine.submitted)
    assert (document, len(query) > 2) == (query[:2], True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 2048}, "text_2"),
        ("/v1/score", {"text_1": "a " * 200, "text_2": "b"}, "text_1[0]"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a " * 200, "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", "b " * 200]}, "documents[1]"),
        ("/rerank", RERANK | {"top_n": -1}, "top_n"),
        ("/rerank", RERANK | {"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": [{"text": "b", "image": "x"}]}, "documents[0].image"),
        ("/rerank", {"query": "a", "documents": ["b"], "texts": ["c"]}, "texts"),
    ],
)
def test_score_errors_name_the_field(path, body, param):
    engine = FakeEngine(SILENT, max_body_bytes=2**16)
    response = post(engine, path, body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert engine.submitted == []


def create_reranker(**pooling):
    engine = FakeEngine(SILENT, max_body_bytes=2**16)
    engine.pooling = Pooling(False, embedding_only=True, scores=True, **pooling)
    return engine


def result_of(engine, text):
    """Return the score of a pair before the sigmoid: the first number of the fake model's vector."""
    return float(engine.vector_of(engine.tokenizer.encode(text, add_special_tokens=False))[0])


def test_reranker_reads_both_texts_together():
    engine = create_reranker(pair_template="query {query} document {document}")
    answer = post(engine, "/v1/score", {"text_1": "a", "text_2": ["b", "c"]}).json()
    raw = [result_of(engine, f"query a document {each}") for each in "bc"]
    assert [each["score"] for each in answer["data"]] == pytest.approx([1 / (1 + math.exp(-each)) for each in raw])
    assert len(engine.submitted) == 2
    engine = create_reranker(pair_template="query {query} document {document}", applies_sigmoid=False)
    body = {"query": "a", "documents": ["b", "c"]}
    results = post(engine, "/rerank", body).json()["results"]
    assert [each["relevance_score"] for each in results] == sorted(raw, reverse=True)
    results = post(engine, "/rerank", body | {"use_activation": True}).json()["results"]
    assert results[0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-max(raw))))


def test_reranker_joins_client_texts_by_the_template():
    engine = create_reranker(pair_template="query {query} document {document}")
    answer = post(engine, "/v1/score", {"text_1": "query a document ", "text_2": "b"}).json()
    raw = result_of(engine, "query a document b")
    assert answer["data"][0]["score"] == pytest.approx(1 / (1 + math.exp(-raw)))


def test_reranker_without_template_joins_the_tokens():
    engine = create_reranker()
    post(engine, "/v1/score", {"text_1": "one two", "text_2": "three"})
    encode = engine.tokenizer.encode
    assert engine.submitted[0].prompt_token_ids == encode("one two", False) + encode("three", False)


def test_reranker_truncates_long_pairs_on_request():
    engine = create_reranker(pair_template="query {query} document {document}")
    body = {"query": "a", "documents": ["b " * 300]}
    error = error_of(post(engine, "/rerank", body))
    assert (error["param"], error["code"]) == ("documents[0]", "context_length_exceeded")
    assert post(engine, "/rerank", body | {"truncate_prompt_tokens": 40}).status_code == 200
    assert post(engine, "/rerank", body | {"max_tokens_per_doc": 5}).status_code == 200
    whole, document = (len(each.prompt_token_ids) for each in engine.submitted)
    assert document < whole <= 40
    error = error_of(post(engine, "/rerank", body | {"truncate_prompt_tokens": 3}))
    assert error["param"] == "truncate_prompt_tokens"


def test_reranker_refuses_embeddings():
    response = post(create_reranker(), "/v1/embeddings", {"input": "a"})
    assert "is a reranker" in error_of(response)["message"]


def test_model_without_text_names_the_routes_that_it_answers(monkeypatch):
    engine = create_reranker()
    monkeypatch.setattr(engine.tokenizer, "chat_template", lambda **_: "")
    error = error_of(post(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}))
    assert error["message"] == "`model` is a reranker, which answers only /v1/score and /rerank"
