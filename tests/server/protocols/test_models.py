"""GET /v1/parameters: the parameters of requests, for programs."""

from __future__ import annotations

from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.fakes import FakeEngine
from support.server_client import request


def test_parameters_route_lists_rules_and_defaults():
    engine = FakeEngine()
    engine.sampling_defaults = {"temperature": 0.25}
    table = request(engine, "GET", "/v1/parameters").json()
    rows = {row["name"]: row for row in table["parameters"]}
    assert table["model"] == "demo"
    temperature = rows["temperature"]
    assert (temperature["kind"], temperature["default"]) == ("number", 0.25)
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 100.0)
    assert temperature["meaning"].startswith("Divisor of the logits")
    assert (rows["seed"]["default"], rows["seed"]["maximum"]) == (None, 2**64 - 1)
    assert (rows["max_tokens"]["default"], rows["max_tokens"]["chat_default"]) == (16, None)
    assert rows["stop"]["kind"] == "strings"
    assert all(row["completions"] and row["chat"] for row in rows.values())


def test_parameters_route_lists_the_classes_of_a_key():
    keys = (ApiKey(name="low", key_sha256=hash_key("l" * 20), highest_class="batch"),)
    table = request(FakeEngine(api_keys=keys), "GET", "/v1/parameters", headers={"x-api-key": "l" * 20}).json()
    assert [(row["name"], row["allowed"], row["default"]) for row in table["classes"]] == [
        ("interactive", False, False),
        ("standard", False, False),
        ("batch", True, True),
    ]
    free = request(FakeEngine(), "GET", "/v1/parameters").json()["classes"]
    assert [row["allowed"] for row in free] == [True, True, True]
    assert [row["name"] for row in free if row["default"]] == ["standard"]
