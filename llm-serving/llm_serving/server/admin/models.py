"""Routes for administrators: load, unload and replace models of a server with several models."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.config.reload import read_all_again, row_of
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ConfigError, RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.served_models import ServedModels


class ModelChanged(Struct):
    model: str
    state: str
    """ready: the model accepts requests; draining: it finishes its requests and then stops."""


async def load_model(engine: AsyncEngine, http_request: Request) -> Response:
    """Read the YAML again, and load a model of its section `models`. Respond when all its replicas are ready."""
    models, name = _models(http_request), http_request.path_params["model"]
    await models.load(await _config(engine, name))
    return json_response(ModelChanged(name, "ready"))


async def replace_model(engine: AsyncEngine, http_request: Request) -> Response:
    """Read the YAML again, and load a served model again from its current files.

    Until all new replicas are ready, requests go to the old replicas. The old replicas then finish their requests and
    stop.
    """
    models, name = _models(http_request), http_request.path_params["model"]
    models.check_served(name)
    await models.replace(await _config(engine, name))
    return json_response(ModelChanged(name, "ready"))


async def unload_model(engine: AsyncEngine, http_request: Request) -> Response:
    """Refuse new requests of a model. It stops after its last request."""
    models, name = _models(http_request), http_request.path_params["model"]
    models.unload(name)
    return json_response(ModelChanged(name, "draining"))


def _models(http_request: Request) -> ServedModels:
    check_operator(http_request)
    models: ServedModels | None = http_request.app.models
    if models is None:
        raise RequestError("model", "can be loaded, replaced or unloaded only if the YAML has the section `models`")
    return models


async def _config(engine: AsyncEngine, name: str) -> ServingConfig:
    """Read a model's configuration from the YAML, because only the YAML may name paths."""
    try:
        return row_of(await asyncio.to_thread(read_all_again, engine.config), name)
    except ConfigError as error:
        raise RequestError("model", f"cannot be loaded: {error}") from None


ENDPOINTS: Final = (
    Endpoint("POST", "/v1/models/{model:path}/load", load_model, "Load a model of the YAML", answer=ModelChanged),
    Endpoint("POST", "/v1/models/{model:path}/replace", replace_model, "Load a model again", answer=ModelChanged),
    Endpoint("POST", "/v1/models/{model:path}/unload", unload_model, "Stop serving a model", answer=ModelChanged),
)
