"""Receipts of completions and conversations."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import llm_serving.demo_model
import pytest
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.core.request import FinishReason
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.errors import ConfigError
from llm_serving.executor.model_files import ModelFiles, content_hashes
from llm_serving.server.protocols.openai import requests
from llm_serving.server.receipts import ReceiptHook
from llm_serving_receipts import issuer, receipt
from llm_serving_receipts.receipt import open_receipt
from support.fakes import FakeEngine, Piece, Script
from support.server_client import error_of, events, post

DEMO = Path(llm_serving.demo_model.__file__).parent
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.config = replace(engine.config, model=replace(engine.config.model, model_path=DEMO))
    return engine


def the_receipt(content):
    found = open_receipt(content)
    assert found.altered == ()
    return found.receipt


def test_receipt_is_absent_by_default(engine):
    assert "receipt" not in post(engine, "/v1/completions", {"prompt": "hello"}).json()
    assert "receipt" not in post(engine, CHAT, {"messages": MESSAGES, "receipt": False}).json()


def test_receipt_has_inputs_results_and_fingerprints(engine):
    body = {"prompt": ["hello", "you"], "receipt": True, "n": 2, "temperature": 0.7, "logit_bias": {"7": 1.5}}
    answer = post(engine, "/v1/completions", body).json()
    receipt = the_receipt(answer["receipt"])
    assert receipt.id == answer["id"]
    assert receipt.prompts == [engine.submitted[0].prompt_token_ids, engine.submitted[2].prompt_token_ids]
    assert receipt.sampling == engine.submitted[0].sampling, "with the seed that the server drew"
    assert receipt.computed_by == engine.compute_fingerprint
    assert receipt.configuration["model_config.model_dtype"] == "bfloat16"
    assert (receipt.n, receipt.best_of, receipt.beam_search) == (2, 2, None)
    assert [choice.token_ids for choice in receipt.choices] == [[500, 501, 502]] * 4
    assert {choice.finish_reason for choice in receipt.choices} == {"stop"}
    assert receipt.tokenizer == content_hashes(ModelFiles.of(DEMO, None)).tokenizer


def test_receipt_names_the_adapter_and_the_hash_of_its_files(engine):
    engine.adapters = AdapterRegistry(replace(engine.config, lora=LoraConfig(lora_folder=DEMO)), engine.model_spec)
    engine.adapters.add(Adapter("sql", DEMO, "1" * 64))
    body = {"prompt": "hello", "receipt": True, "temperature": 0}
    found = the_receipt(post(engine, "/v1/completions", body | {"model": "sql"}).json()["receipt"])
    assert found.adapter == receipt.ReceiptAdapter(name="sql", files="1" * 64)
    assert the_receipt(post(engine, "/v1/completions", body).json()["receipt"]).adapter is None


def test_receipt_omits_cache_salt_and_user(engine):
    asked = {"prompt": "hello", "receipt": True, "cache_salt": "pepper", "user": "ann", "priority": 0, "temperature": 0}
    text = json.dumps(post(engine, "/v1/completions", asked).json()["receipt"])
    assert "pepper" not in text
    assert "ann" not in text


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_receipt_is_in_the_last_chunk_of_a_stream(engine, path, usage):
    ask = {"prompt": "hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = ask | {"stream": True, "receipt": True, "seed": 5, "stream_options": {"include_usage": usage}}
    *others, last, done = events(post(engine, path, body))
    assert done == "[DONE]"
    assert all("receipt" not in each for each in others)
    assert (last["choices"], "usage" in last) == ([], usage)
    whole = post(engine, path, ask | {"receipt": True, "seed": 5}).json()["receipt"]
    assert the_receipt(last["receipt"]).choices == the_receipt(whole).choices


@pytest.mark.parametrize(("most", "is_beside"), [(0, True), (1000, False)])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_long_receipt_is_sealed_off_the_event_loop(engine, path, most, is_beside, monkeypatch):
    threads = []

    def seal(receipt):
        threads.append(threading.current_thread())
        return original(receipt)

    original = issuer.seal
    monkeypatch.setattr(issuer, "seal", seal)
    monkeypatch.setattr(requests, "MAX_INLINE_TOKENS", most)
    ask = {"prompt": "hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    *_, last, _ = events(post(engine, path, ask | {"stream": True, "receipt": True}))
    the_receipt(last["receipt"])
    assert [thread is not threading.main_thread() for thread in threads] == [is_beside]


def test_receipt_hashes_returned_logprobs_only(engine):
    def choice(**fields):
        content = post(engine, "/v1/completions", {"prompt": "hello", "receipt": True, **fields}).json()["receipt"]
        return the_receipt(content)

    assert choice().choices[0].logprobs is None
    one, two = choice(logprobs=1).choices[0].logprobs, choice(logprobs=2).choices[0].logprobs
    assert None not in (one, two)
    assert one != two
    assert choice(prompt_logprobs=1).prompt_logprobs != choice(prompt_logprobs=2).prompt_logprobs != [None]


def test_receipt_of_beams_and_best_of_covers_the_returned_choices(engine):
    body = {"prompt": "x", "receipt": True, "best_of": 3, "n": 2}
    receipt = the_receipt(post(engine, "/v1/completions", body).json()["receipt"])
    assert (receipt.n, receipt.best_of, len(receipt.choices)) == (2, 3, 2)
    assert receipt.sampling.logprobs is None, "as asked for"
    beams = {"prompt": "x", "receipt": True, "use_beam_search": True, "best_of": 2, "temperature": 0}
    receipt = the_receipt(post(engine, "/v1/completions", beams).json()["receipt"])
    assert receipt.beam_search is not None
    assert receipt.beam_search.width == 2


def test_failed_request_has_no_receipt(engine):
    engine.script = Script(pieces=[Piece("a", 1), Piece("b", 1)], error="broken", finish_reason=FinishReason.ERROR)
    response = post(engine, "/v1/completions", {"prompt": "x", "receipt": True})
    assert response.status_code == 500
    assert "receipt" not in post(engine, CHAT, {"messages": MESSAGES, "receipt": True, "stream": True}).text


def test_receipt_beyond_the_size_limit_is_refused(engine, monkeypatch):
    monkeypatch.setattr(issuer, "MAX_TOKENS", 40)
    body = {"prompt": "x", "receipt": True, "max_tokens": 20, "n": 2}
    response = post(engine, "/v1/completions", body)
    assert (response.status_code, error_of(response)["param"]) == (400, "receipt")
    assert engine.submitted == []
    assert receipt.MAX_TOKENS == 2**18


def test_receipts_can_be_disabled(engine):
    none = FakeEngine(limits={"receipts": "none"})
    none.config = replace(none.config, model=engine.config.model)
    response = post(none, "/v1/completions", {"prompt": "x", "receipt": True})
    assert (response.status_code, error_of(response)["param"]) == (400, "receipt")


def test_receipt_is_refused_after_model_files_changed(engine, tmp_path, monkeypatch):
    for file in DEMO.iterdir():
        if file.is_file() and file.suffix != ".py":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    engine.config = replace(engine.config, model=replace(engine.config.model, model_path=tmp_path))
    original = ModelFiles.check

    def exchanged(files):
        with (tmp_path / "model.safetensors").open("ab") as file:
            file.write(b"x")
        original(files)

    monkeypatch.setattr(ModelFiles, "check", exchanged)
    response = post(engine, "/v1/completions", {"prompt": "x", "receipt": True})
    assert response.status_code == 503
    assert "has changed" in error_of(response)["message"]


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_serving_receipts.issuer", None)


def test_receipt_error_names_the_missing_package(engine, without_package):
    assert post(engine, "/v1/completions", {"prompt": "x"}).status_code == 200
    response = post(engine, "/v1/completions", {"prompt": "x", "receipt": True})
    assert response.status_code == 503
    assert "needs the package llm_serving_receipts, which is not installed" in error_of(response)["message"]


def test_missing_receipts_package_is_reported_before_loading(engine, without_package):
    serving = replace(engine.config.serving, receipts="at_start")
    with pytest.raises(ConfigError, match="needs the package llm_serving_receipts, which is not installed"):
        ReceiptHook(replace(engine.config, serving=serving))


def test_receipts_package_is_imported_on_demand(engine, without_package):
    ReceiptHook(engine.config).start()
