"""Models, tokenizer routes, health, metrics, the OpenAPI document, and paths that do not exist."""

from __future__ import annotations

from datetime import datetime

import pytest
from llm_serving import __version__
from llm_serving.server.routes import ENDPOINTS
from support.fakes import DEMO_TOKENIZER, FakeEngine
from support.server_client import error_of, post, request


def test_tokenizer_info_route_describes_the_tokenizer():
    engine = FakeEngine()
    info = request(engine, "GET", "/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert info["chat_template"] == engine.tokenizer.chat_template() != ""
    assert (info["vocab_size"], info["model_max_length"]) == (engine.tokenizer.vocab_size, engine.max_model_len)


def test_models_route_lists_the_served_model():
    body = request(FakeEngine(), "GET", "/v1/models").json()
    assert body["object"] == "list"
    assert [(card["id"], card["max_model_len"]) for card in body["data"]] == [("demo", 128)]
    assert request(FakeEngine(), "GET", "/v1/models/demo").json() == body["data"][0]
    card = body["data"][0]  # in the words of Anthropic's protocol too
    assert (card["type"], card["display_name"], body["has_more"]) == ("model", "demo", False)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert request(FakeEngine(), "GET", "/v1/models/a/b").status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_reports_readiness(path):
    response = request(FakeEngine(), "GET", path)
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ready", "detail": "ready", "loading": False},
    )
    response = request(FakeEngine(ready=False), "GET", path)
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "detail": "loading the model", "loading": True}


def test_metrics_route_has_the_prometheus_format():
    response = request(FakeEngine(), "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'vllm:num_requests_running{model_name="demo"}' in response.text


def test_version_route_returns_the_package_version():
    assert request(FakeEngine(), "GET", "/version").json() == {"version": __version__}


def test_tokenize_and_detokenize_are_inverse():
    body = post(FakeEngine(), "/tokenize", {"prompt": "hello world"}).json()
    ids = DEMO_TOKENIZER.encode("hello world")
    assert body == {"count": len(ids), "max_model_len": 128, "tokens": ids}
    assert post(FakeEngine(), "/detokenize", {"tokens": ids[1:]}).json() == {"prompt": "hello world"}


def test_tokenize_without_special_tokens():
    body = post(FakeEngine(), "/tokenize", {"prompt": "hello", "add_special_tokens": False}).json()
    assert body["tokens"] == DEMO_TOKENIZER.encode("hello", add_special_tokens=False)


def test_tokenize_messages_as_chat_does():
    body = post(FakeEngine(), "/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()
    assert body["tokens"] == DEMO_TOKENIZER.encode("hello")


def test_tokenize_returns_token_texts_on_request():
    body = post(FakeEngine(), "/tokenize", {"prompt": "hello \U0001f600", "return_token_strs": True}).json()
    assert body["token_strs"] == [DEMO_TOKENIZER.token_text(token_id) for token_id in body["tokens"]]
    assert len(body["token_strs"]) == body["count"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_generation_prompt", False),
        ("continue_final_message", False),
        ("tools", []),
        ("chat_template_kwargs", {}),
    ],
)
def test_tokenize_accepts_chat_parameters_with_messages_only(field, value):
    error = error_of(post(FakeEngine(), "/tokenize", {"prompt": "x", field: value}))
    assert error["message"] == f"`{field}` requires `messages`"


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_requires_prompt_or_messages(body):
    error = error_of(post(FakeEngine(), "/tokenize", body))
    assert error["message"] == "`prompt` or `messages` must be given, and not both"


def test_unknown_path_is_404_and_unknown_method_405():
    assert error_of(request(FakeEngine(), "GET", "/nowhere"))["message"].startswith("not found")
    response = request(FakeEngine(), "GET", "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["message"].startswith("method not allowed")


def test_openapi_document_describes_every_endpoint():
    document = request(FakeEngine(), "GET", "/openapi.json").json()
    described = {(method, path) for path, entry in document["paths"].items() for method in entry}
    routes = {(e.method.lower(), e.path.replace(":path", "")) for e in ENDPOINTS}
    assert described == routes | {("get", "/openapi.json")}
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"]
    assert "temperature" in schema["properties"]
    operations = [operation["operationId"] for entry in document["paths"].values() for operation in entry.values()]
    assert len(set(operations)) == len(operations)


@pytest.mark.parametrize("path", ["/health/", "/v1/completions/", "/metrics/", "/v1//models"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_redirects_ignore_the_host_header(method, path):
    public = FakeEngine(limits={"server_ip": "0.0.0.0"})  # it goes by any name
    response = request(public, method, path, headers={"host": "evil.example"})
    assert response.status_code in (404, 405)
    assert "location" not in response.headers
    assert "evil" not in response.text
