"""The access log: one line a request, counted by route and status, without texts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import HttpTimings
from llm_serving.errors import ConfigError
from llm_serving.server.app import create_app
from llm_serving.server.middleware import access_log
from llm_serving.server.middleware import access_log as accounting
from llm_serving.server.middleware.access_log import AccessLine, AccessLog, open_access_log
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.middleware.rate_limits import LineBudget
from llm_serving.server.request_context import RequestContext
from support.fakes import FULL_QUEUE, FakeEngine, Script
from support.server_client import RawClient

KEY = "0123456789abcdef"
SECRET = "a word that no log may hold"


class Site:
    """An application with an access log in memory; each reading of the engine's clock is one second later."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.texts: list[str] = []
        log = AccessLog(self.texts.append, lambda: datetime(2026, 1, 2, 3, 4, 5, 678000, UTC))
        self.app = create_app(engine, log)

    def send(
        self, method: str, path: str, times: int = 1, address: str = "192.0.2.7", **arguments: object
    ) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return [await client.request(method, path, **arguments) for _ in range(times)][-1]

        return asyncio.run(run())

    @property
    def lines(self) -> list[dict]:
        return [json.loads(text) for text in self.texts]

    @property
    def counts(self) -> Counter:
        metric = next(self.engine.metrics.http.collect())
        keys = ("method", "route", "status")
        return Counter({tuple(s.labels[key] for key in keys): s.value for s in metric.samples})


def answer(num_output_tokens: int) -> RequestOutput:
    return RequestOutput("id", "", (), (), 1, 0, num_output_tokens)


@pytest.mark.parametrize("address", ["x" * 65, "\x9b31m", "192.0.2.7\t", "\xe4"])
def test_invalid_client_address_is_not_logged(address, caplog):
    """`X-Forwarded-For` of a program of this machine."""
    site = Site(FakeEngine())
    assert site.send("GET", "/nowhere", address=address).status_code == 404
    assert site.lines[0]["client"] == ""
    assert address not in caplog.text


def test_access_line_has_client_route_tokens_and_times():
    site = Site(FakeEngine())
    body = {"prompt": "Hello", "user": "ann", "priority": -1, "request_id": "mine"}
    site.send("POST", "/v1/completions", json=body)
    assert site.lines == [
        {
            "time": "2026-01-02T03:04:05.678+00:00",
            "client": "192.0.2.7",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "total_ms": 2000.0,
            "id": "mine",
            "tenant": "ann",
            "class": "interactive",
            "prompt_tokens": 4,
            "cached_tokens": 2,
            "output_tokens": 3,
            "finish": "stop",
            "queue_ms": 250.0,
            "ttft_ms": 1000.0,
        }
    ]
    assert site.counts == {("POST", "/v1/completions", "200"): 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/", {"inputs": SECRET, "parameters": {"max_new_tokens": 4}}),
        ("/models/llama2", {"inputs": SECRET, "parameters": {"max_new_tokens": 4}}),
    ],
)
def test_access_line_of_every_protocol_has_tokens_and_no_text(path, body, stream):
    site = Site(FakeEngine())
    site.send("POST", path, json=body | {"stream": stream})
    [line] = site.lines
    assert (line["output_tokens"], line["finish"]) == (3, "stop")
    assert line["prompt_tokens"] > 2
    assert "id" in line
    assert not any(word in site.texts[0] for word in (*SECRET.split()[2:], "Hello"))


def test_access_line_sums_choices_and_counts_the_prompt_once():
    site = Site(FakeEngine())
    site.send("POST", "/v1/completions", json={"prompt": ["Hello", "Hello"], "n": 2, "best_of": 3, "temperature": 1})
    [line] = site.lines
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (8, 4, 18)


def test_metrics_count_the_longest_answer_of_each_prompt():
    note = RequestContext(HttpTimings(0.0), "POST", "/v1/completions", streams_per_prompt=2)
    assert note.longest_answers == []
    note.streams = [SimpleNamespace(latest=each) for each in (answer(7), answer(2), None, answer(3))]
    assert note.longest_answers == [7, 3]
    site = Site(FakeEngine())
    site.send("POST", "/v1/completions", json={"prompt": ["Hello", "Hello"], "n": 3, "temperature": 1})
    site.send("GET", "/health")
    *_, metric = site.engine.metrics.http.collect()
    values = {each.name.removeprefix(metric.name): each.value for each in metric.samples}
    assert (values["_count"], values["_sum"]) == (2, 6)


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
def test_disconnected_client_has_an_access_line(stream, status):
    site = Site(FakeEngine(script=Script(hold_after=1)))

    async def run() -> None:
        client = RawClient(site.engine, "/v1/completions", {"prompt": "Hello", "stream": stream})
        client._app = site.app
        task = asyncio.create_task(client.run())
        await site.engine.held.wait()
        client.leave()
        await task

    asyncio.run(run())
    [line] = site.lines
    assert (line["status"], line["finish"], line["output_tokens"]) == (status, "abort", 1)


def test_access_line_of_an_error_has_kind_and_field_only():
    site = Site(FakeEngine())
    assert site.send("POST", "/v1/completions", json={"prompt": "x", "temperature": SECRET}).status_code == 400
    [line] = site.lines
    assert (line["status"], line["error"]) == (400, "RequestError temperature")
    assert "a word" not in site.texts[0]
    assert site.counts == {("POST", "/v1/completions", "400"): 1}


def test_unknown_field_name_is_not_logged(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(accounting.logger, "warning", lambda text, *values: logged.append(text % values))
    site = Site(FakeEngine())
    site.send("POST", "/v1/completions", json={"prompt": "x", f"{SECRET}\n": 1})
    assert logged == ["POST /v1/completions from 192.0.2.7: status 400, RequestError"]
    assert "a word" not in site.texts[0]


def test_failed_generation_has_an_error_line():
    site = Site(FakeEngine(script=Script(finish_reason=FinishReason.ERROR, error=SECRET)))
    site.send("POST", "/v1/completions", json={"prompt": "x"})
    [line] = site.lines
    assert (line["status"], line["finish"], line["error"]) == (500, "error", "WorkerError")


def test_unknown_paths_and_methods_create_no_metric_series():
    site = Site(FakeEngine())
    for path in ("/nowhere", f"/{SECRET}", "/v1/requests/one/explain", "/v1/requests/two/explain", "/health"):
        site.send("GET", path)
    site.send("BREW", "/health")
    assert site.counts == {
        ("GET", "other", "404"): 2,
        ("GET", "/v1/requests/{request_id}/explain", "404"): 2,
        ("GET", "/health", "200"): 1,
        ("other", "/health", "405"): 1,
    }
    assert "a word" not in "".join(site.texts)


def test_access_line_has_the_tenant_of_a_known_key():
    site = Site(FakeEngine(api_keys=(ApiKey(name="team-a", key_sha256=hash_key(KEY)),)))
    site.send("GET", "/v1/models", headers={"x-api-key": "wrong"})
    site.send("GET", "/v1/models", headers={"x-api-key": KEY})
    assert [(line["status"], line.get("tenant"), line.get("error")) for line in site.lines] == [
        (401, None, "AuthenticationError"),
        (200, "team-a", None),
    ]
    assert site.counts == {("GET", "/v1/models", "401"): 1, ("GET", "/v1/models", "200"): 1}


def test_successful_probes_are_counted_but_not_logged(monkeypatch):
    monkeypatch.setattr(accounting.logger, "warning", pytest.fail)
    site = Site(FakeEngine(ready=False))
    for path in ("/health", "/ping", "/metrics"):
        site.send("GET", path)
    assert site.texts == []
    assert sum(site.counts.values()) == 3
    monkeypatch.undo()
    site.send("POST", "/health")
    assert [line["status"] for line in site.lines] == [405]


def test_refused_origin_has_an_access_line():
    site = Site(FakeEngine())
    site.send("GET", "/v1/models", headers={"host": "elsewhere.example.com"})
    [line] = site.lines
    assert (line["status"], line["route"], line["error"]) == (403, "/v1/models", "PermissionDeniedError Host")


def test_application_exception_is_logged_as_500(monkeypatch):
    site = Site(FakeEngine())

    async def fail(scope, receive, send):
        raise RuntimeError

    monkeypatch.setattr(site.app, "app", fail)
    assert site.send("GET", "/health").status_code == 500
    assert site.counts == {("GET", "/health", "500"): 1}


def test_refusals_are_counted_and_their_lines_rate_limited(monkeypatch):
    engine = FakeEngine(refusal=FULL_QUEUE)
    times = [100.0]
    engine.clock = lambda: times[0]
    site = Site(engine)
    logged: list[str] = []
    monkeypatch.setattr(accounting.logger, "warning", lambda text, *values: logged.append(text % values))
    site.send("POST", "/v1/completions", 250, json={"prompt": "x"})
    times[0] = 105.0
    site.send("POST", "/v1/completions", json={"prompt": "x"})
    assert site.counts == {("POST", "/v1/completions", "429"): 251}
    assert len(site.lines) == access_log.REFUSED_BURST + 1
    assert site.lines[-1]["suppressed"] == 50
    assert len(logged) == accounting.REFUSED_LOG_BURST + 1
    assert logged[0] == "POST /v1/completions from 192.0.2.7: status 429, CapacityError"
    assert logged[-1] == f"{logged[0]}; 240 more suppressed"


def test_refused_connections_are_logged_at_a_limited_rate():
    engine = FakeEngine()
    engine.clock = lambda: 100.0
    site = Site(engine)
    for _ in range(250):
        site.app.refused("192.0.2.7", 503)
    assert site.counts == {("other", "other", "503"): 250}
    assert len(site.lines) == access_log.REFUSED_BURST


def test_line_budget_allows_a_burst_and_a_rate():
    budget = LineBudget(2, 0.5)
    assert [budget.take(10.0) for _ in range(4)] == [0, 0, None, None]
    assert budget.take(11.0) is None
    assert budget.take(12.0) == 3
    assert [budget.take(1000.0) for _ in range(3)] == [0, 0, None]


def test_access_log_is_written_to_the_configured_file(tmp_path):
    path = tmp_path / "access.log"
    log, close = open_access_log(ServerConfig(access_log=path))
    site = Site(FakeEngine())
    site.app.access_log = log
    site.send("GET", "/version", 3)
    close()
    assert [json.loads(text)["route"] for text in path.read_text().splitlines()] == ["/version"] * 3


def test_access_log_is_written_to_standard_output(capsys):
    log, close = open_access_log(ServerConfig(access_log=Path("-")))
    site = Site(FakeEngine())
    site.app.access_log = log
    site.send("GET", "/version")
    close()
    assert json.loads(capsys.readouterr().out)["route"] == "/version"


def test_unwritable_access_log_is_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match=r"serving_config\.access_log: .*/a/b cannot be written: No such file"):
        open_access_log(ServerConfig(access_log=tmp_path / "a" / "b"))


def test_requests_are_counted_without_an_access_log():
    engine = FakeEngine()
    site = Site(engine)
    site.app.access_log = None
    site.send("GET", "/health")
    assert (site.lines, site.counts) == ([], {("GET", "/health", "200"): 1})


def test_access_line_fields_are_documented():
    text = (Path(__file__).parents[3] / "docs/guides/observability.md").read_text()
    names = {AccessLine.__struct_encode_fields__[i] for i in range(len(AccessLine.__struct_fields__))}
    assert {name for name in names if f"`{name}`" not in text} == set()
