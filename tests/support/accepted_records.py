"""Records of accepted requests."""

from __future__ import annotations

from llm_serving.server.idempotency.store import AcceptedRequest


def record(number=0, **fields) -> AcceptedRequest:
    values = {
        "stream_id": f"stream-{number}",
        "route": "/v1/completions",
        "tenant": "ann",
        "key": f"key-{number}",
        "digest": b"d",
        "request": b"{}",
        "seed": 5,
        "seeded": False,
        "streams": True,
        "request_id": f"request-{number}",
        "created": 7,
        "model": b"m",
        "prompts": b"p",
        "accepted_at": 1000.0,
    }
    return AcceptedRequest(**values | fields)
