"""Looking for what is known of requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.core.timings import monotonic
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.engine.request_lookup import RequestLookup
from llm_serving.errors import RequestNotFoundError


def test_another_replica_may_begin_to_serve_while_a_request_is_looked_for() -> None:
    engines: dict[int, Any] = {}

    def lives() -> list[Any]:
        engines[len(engines)] = engine  # as the thread of a replica does that has loaded its model
        return []

    engine = engines[0] = SimpleNamespace(journal=SimpleNamespace(lives=lives))
    replicas: Any = SimpleNamespace(engines=engines)
    with pytest.raises(RequestNotFoundError):
        RequestLookup(ServingConfig(), replicas, OpenRequests(), monotonic).find("r", None)
