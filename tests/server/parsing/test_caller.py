"""Priority, class, tenant and salt of a request in every protocol, and the class limit of its API key."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.request_context import source_of
from starlette.requests import Request as HttpRequest
from support.fakes import FakeEngine
from support.server_client import error_of, post, request

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/": {"inputs": "x"},
    "/generate": {"inputs": "x"},
    "/models/demo": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
    "/models/demo/generate": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
}
WITH_PARAMETERS = [path for path, body in BODIES.items() if "inputs" in body]
KEY = "k" * 20
HEADERS = {"authorization": f"Bearer {KEY}"}


def key(highest_class: str | None) -> tuple[ApiKey, ...]:
    return (ApiKey(name="team-a", key_sha256=hash_key(KEY), highest_class=highest_class),)


def submitted(path, fields, engine=None, **arguments):
    engine = engine or FakeEngine()
    assert post(engine, path, BODIES[path] | fields, **arguments).status_code == 200
    return engine.submitted[-1]


@pytest.mark.parametrize("path", BODIES)
def test_caller_defaults_to_priority_0_without_tenant(path):
    request = submitted(path, {})
    assert (request.priority, request.tenant, request.cache_salt) == (0, "", "")


@pytest.mark.parametrize("path", BODIES)
def test_caller_fields_are_accepted_by_every_protocol(path):
    request = submitted(path, {"priority": -3, "user": "ann", "cache_salt": "s"})
    assert (request.priority, request.tenant, request.cache_salt) == (-3, "ann", "s")
    assert submitted(path, {"priority_class": "batch"}).priority == 1
    assert submitted(path, {"priority_class": "interactive"}).priority == -1


@pytest.mark.parametrize("path", WITH_PARAMETERS)
def test_caller_fields_may_be_in_parameters(path):
    fields = {"priority_class": "batch", "user": "ann", "cache_salt": "s"}
    request = submitted(path, {"parameters": {"max_new_tokens": 4} | fields, "user": "ann"})
    assert (request.priority, request.tenant, request.cache_salt) == (1, "ann", "s")


def test_addresses_of_a_network_are_one_source():
    """Otherwise a client could get more than its share by using many addresses."""
    hosts = ["2001:db8:1:2::3", "2001:db8:1:2:3:4:5:6", "2001:db8:1:3::3", "10.0.0.1", "::ffff:10.0.0.1"]
    sources = [source_of(HttpRequest({"type": "http", "client": (host, 1)})) for host in hosts]
    assert sources[0] == sources[1] != sources[2]
    assert sources[3] == sources[4] == "10.0.0.1"
    assert source_of(HttpRequest({"type": "http", "client": None})) == ""


def test_contradictory_caller_fields_are_refused():
    response = post(FakeEngine(), "/generate", {"inputs": "x", "user": "a", "parameters": {"user": "b"}})
    assert response.status_code == 422
    assert response.json()["error"] == "`user` must not be given twice with different values"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 1, "priority_class": "batch"}, "`priority_class` must not be given together with a priority"),
        (
            {"priority_class": "urgent"},
            "`priority_class` must be one of interactive, standard, batch. Given: 'urgent'",
        ),
        ({"user": "u" * 257}, "`user` must be text of at most 256 characters. Given: 257"),
        ({"cache_salt": "u" * 257}, "`cache_salt` must be text of at most 256 characters. Given: 257"),
    ],
)
def test_caller_error_names_the_field(path, fields, message):
    engine = FakeEngine()
    response = post(engine, path, BODIES[path] | fields)
    assert response.status_code == (400 if path.startswith("/v1") else 422)
    assert message in response.text
    assert engine.submitted == []


def test_caller_of_a_request_applies_to_every_choice():
    engine = FakeEngine()
    submitted("/v1/completions", {"n": 2, "priority_class": "batch", "user": "ann"}, engine)
    assert [(each.priority, each.tenant) for each in engine.submitted] == [(1, "ann"), (1, "ann")]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"priority": -1},
            "`priority` must not go before class standard, rank 0, with the API key of team-a. Given: -1",
        ),
        ({"priority_class": "interactive"}, "`priority_class` must not go before class standard, rank 0"),
    ],
)
def test_priority_above_the_key_limit_is_refused(path, fields, named):
    engine = FakeEngine(api_keys=key("standard"))
    response = post(engine, path, BODIES[path] | fields, headers=HEADERS)
    assert response.status_code == 403
    assert named in response.text
    assert engine.submitted == []


def test_priority_refusal_has_the_openai_type():
    engine = FakeEngine(api_keys=key("standard"))
    error = error_of(post(engine, "/v1/completions", {"prompt": "x", "priority": -1}, headers=HEADERS))
    assert (error["type"], error["param"]) == ("permission_error", "priority")


@pytest.mark.parametrize(
    ("highest_class", "fields", "priority"),
    [
        ("standard", {"priority": 0}, 0),
        ("standard", {"priority_class": "batch"}, 1),
        ("standard", {}, 0),
        ("batch", {}, 1),
        ("interactive", {}, 0),
        ("interactive", {"priority": -1}, -1),
        (None, {"priority": -1000}, -1000),
    ],
)
def test_priority_within_the_key_limit_is_accepted(highest_class, fields, priority):
    engine = FakeEngine(api_keys=key(highest_class))
    request = submitted("/v1/completions", fields, engine, headers=HEADERS)
    assert (request.priority, request.tenant) == (priority, "team-a")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("user", "ignored"), [("team-b", "user"), ("team-a", None), ("", None)])
def test_tenant_is_the_key_and_user_is_ignored(path, user, ignored):
    engine = FakeEngine(api_keys=key(None))
    response = post(engine, path, BODIES[path] | {"user": user}, headers=HEADERS)
    assert [each.tenant for each in engine.submitted] == ["team-a"]
    assert response.headers.get(IGNORED_HEADER) == ignored
    assert IGNORED_HEADER not in post(FakeEngine(), path, BODIES[path] | {"user": user}).headers


def anonymous(highest_class: str | None) -> FakeEngine:
    engine = FakeEngine()
    serving = replace(engine.config.serving, anonymous_highest_class=highest_class)
    engine.config = replace(engine.config, serving=serving)
    return engine


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"priority": -1},
            "`priority` must not go before class standard, rank 0, without an API key "
            "(serving_config.anonymous_highest_class). Given: -1",
        ),
        ({"priority_class": "interactive"}, "`priority_class` must not go before class standard, rank 0"),
    ],
)
def test_anonymous_priority_above_the_limit_is_refused(path, fields, named):
    engine = anonymous("standard")
    response = post(engine, path, BODIES[path] | fields)
    assert response.status_code == 403
    assert named in response.text
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("highest_class", "fields", "priority"),
    [("standard", {}, 0), ("standard", {"priority": 5}, 5), ("batch", {}, 1), (None, {"priority": -1000}, -1000)],
)
def test_anonymous_priority_within_the_limit_is_accepted(highest_class, fields, priority):
    assert submitted("/v1/completions", fields, anonymous(highest_class)).priority == priority


def test_key_limit_replaces_the_anonymous_limit():
    engine = FakeEngine(api_keys=key("interactive"))
    engine.config = replace(engine.config, serving=replace(engine.config.serving, anonymous_highest_class="batch"))
    assert submitted("/v1/completions", {"priority": -1}, engine, headers=HEADERS).priority == -1


def test_openapi_document_has_the_caller_fields():
    schemas = request(FakeEngine(), "GET", "/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest", "TGIRequest", "TGIParameters", "LegacyRequest"):
        assert {"priority", "priority_class", "user", "cache_salt"} <= set(schemas[name]["properties"]), name


def engine_with_tiers():
    engine = FakeEngine()
    tiers = {"interactive": "priority", "batch": "flex"}
    classes = tuple(replace(each, service_tier=tiers.get(each.name)) for each in engine.config.request_classes)
    engine.config = replace(engine.config, request_classes=classes)
    return engine


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("tier", "priority"), [("priority", -1), ("flex", 1), ("auto", 0), ("default", 0)])
def test_service_tier_selects_the_class(path, tier, priority):
    assert submitted(path, {"service_tier": tier}, engine_with_tiers()).priority == priority


@pytest.mark.parametrize("fields", [{"priority": 0}, {"priority_class": "standard"}])
def test_service_tier_beside_a_priority_is_reported_as_ignored(fields):
    engine = engine_with_tiers()
    response = post(engine, "/v1/completions", {"prompt": "x", "service_tier": "flex", **fields})
    assert response.headers[IGNORED_HEADER] == "service_tier"
    assert engine.submitted[-1].priority == 0


def test_service_tier_without_tiers_in_the_configuration_is_reported_as_ignored():
    response = post(FakeEngine(), "/v1/completions", {"prompt": "x", "service_tier": "flex"})
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "service_tier"


def test_unknown_service_tier_is_refused():
    engine = engine_with_tiers()
    response = post(engine, "/v1/completions", {"prompt": "x", "service_tier": "fast"})
    assert response.status_code == 400
    assert "`service_tier` must be one of priority, flex, auto, default, standard_only. Given: 'fast'" in response.text
    assert engine.submitted == []


def test_service_tier_is_limited_by_the_api_key():
    engine = engine_with_tiers()
    engine.config = replace(engine.config, api_keys=key("standard"))
    response = post(engine, "/v1/completions", {"prompt": "x", "service_tier": "priority"}, headers=HEADERS)
    assert response.status_code == 403
    assert "`service_tier` must not go before class standard" in response.text
    assert "Given: 'priority'" in response.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "priority"), [({"x-priority": "-3"}, -3), ({"x-request-class": "batch"}, 1), ({"x-priority": "5"}, 5)]
)
def test_gateway_headers_set_priority_or_class(path, headers, priority):
    assert submitted(path, {}, headers=headers).priority == priority


@pytest.mark.parametrize(
    ("headers", "fields", "message"),
    [
        ({"x-priority": "high"}, {}, "`x-priority` must be an integer of at most 7 digits. Given: 'high'"),
        (
            {"x-priority": "1"},
            {"priority": 2},
            "`priority` must equal the header x-priority if both are given. Given: 2",
        ),
        (
            {"x-request-class": "batch"},
            {"priority_class": "standard"},
            "`priority_class` must equal the header x-request-class if both are given. Given: 'standard'",
        ),
        ({"x-request-class": "urgent"}, {}, "`x-request-class` must be one of interactive, standard, batch"),
        ({"x-request-class": "batch", "x-priority": "1"}, {}, "`x-request-class` must not be given together with"),
        ({"x-priority": "1"}, {"priority_class": ""}, "`priority_class` must not be given together with"),
    ],
)
def test_invalid_gateway_headers_are_refused(headers, fields, message):
    engine = FakeEngine()
    response = post(engine, "/v1/completions", {"prompt": "x", **fields}, headers=headers)
    assert response.status_code == 400
    assert message in response.text
    assert engine.submitted == []


def test_gateway_headers_equal_to_the_body_are_accepted():
    headers = {"x-request-class": "batch"}
    assert submitted("/v1/completions", {"priority_class": "batch"}, headers=headers).priority == 1


def test_gateway_headers_on_other_routes_are_reported_as_ignored():
    response = post(FakeEngine(), "/tokenize", {"prompt": "x"}, headers={"x-priority": "1"})
    assert response.headers[IGNORED_HEADER] == "x-priority"


@pytest.mark.parametrize("serving", [{}, {"coalesce_identical_requests": True}])
def test_error_of_a_priority_out_of_range_names_the_field_or_header_that_gave_it(serving):
    engine = FakeEngine()
    engine.config = replace(engine.config, serving=replace(engine.config.serving, **serving))
    refused = post(engine, "/v1/completions", {"prompt": "x", "seed": 1, "priority": 10**30})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "priority")
    refused = post(engine, "/v1/completions", {"prompt": "x"}, headers={"x-priority": "9999999"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "x-priority")
