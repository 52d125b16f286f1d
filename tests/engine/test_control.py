"""Request lookup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llm_serving.config.schema import ServingConfig
from llm_serving.core.timings import monotonic
from llm_serving.engine.control import RequestLookup
from llm_serving.engine.open_requests import OpenRequests
from llm_serving.errors import RequestNotFoundError


def test_request_lookup_works_while_a_replica_starts_to_serve() -> None:
    engines: dict[int, Any] = {}

    def records() -> list[Any]:
        engines[len(engines)] = engine  # as the thread of a replica does that has loaded its model
        return []

    engine = engines[0] = SimpleNamespace(event_log=SimpleNamespace(records=records))
    replicas: Any = SimpleNamespace(engines=engines)
    with pytest.raises(RequestNotFoundError):
        RequestLookup(ServingConfig(), replicas, OpenRequests(), monotonic).find("r", None)
