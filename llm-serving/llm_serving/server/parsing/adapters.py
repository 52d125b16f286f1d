"""The adapter that a request names as its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from llm_serving.engine.adapters import Adapter
from llm_serving.server.protocols.openai.schemas import CallerFields


def adapter_of(
    adapters: Mapping[str, Adapter], http_request: Request, bodies: Sequence[CallerFields]
) -> Adapter | None:
    """Return the adapter that `model`, TGI's `adapter_id` or an older route's path names; None: the base model."""
    names: list[Any] = [getattr(body, field, None) for body in bodies for field in ("adapter_id", "model")]
    names.append(http_request.path_params.get("name"))
    return next((adapters[name] for name in names if name in adapters), None)
