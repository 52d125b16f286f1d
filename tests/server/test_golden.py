"""Recorded requests of real clients (`scripts/acceptance.sh --golden`) get the recorded responses and status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from support.fakes import FakeEngine, Piece, Script
from support.server_client import post

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    pytest.param(asked, id=f"{path.stem}-{index}")
    for path in sorted(GOLDEN.glob("*.json"))
    for index, asked in enumerate(json.loads(path.read_text())["requests"])
]


def engine_for(path: str) -> FakeEngine:
    is_vector = path in ("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/score")
    script = Script((Piece("", 0),), FinishReason.LENGTH) if is_vector else Script()
    engine = FakeEngine(script, max_body_bytes=2**20, limits={"tool_call_parser": "hermes"})
    engine.max_model_len = 4096
    engine.config.model.__dict__["max_generate_length"] = 4096
    return engine


@pytest.mark.parametrize("asked", CASES)
def test_golden_requests_have_the_same_responses(asked: dict[str, Any]) -> None:
    response = post(engine_for(asked["path"]), asked["path"], asked["body"])
    assert response.status_code == asked["status"], response.text


def test_golden_requests_cover_every_client() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 10
