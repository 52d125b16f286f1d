"""The OpenAPI document, made from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from llm_serving import __version__
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import openai_error_response
from llm_serving.server.openapi_limits import LIMITS, with_limits
from llm_serving.server.schemas import ErrorResponse

JsonObject = dict[str, Any]


DOCUMENT_PATH: Final = "/openapi.json"
DOCUMENT_OPERATION: Final[JsonObject] = {
    "summary": "This document",
    "operationId": "get_openapi_json",
    "responses": {
        "200": {"description": "The answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    },
}
SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def openapi_document(endpoints: Sequence[Endpoint], *, with_keys: bool) -> JsonObject:
    """OpenAPI 3.1; schemas come from the structs that read and write the bodies.

    Args:
        endpoints: What the server answers.
        with_keys: Whether API keys are needed.
    """
    kinds = {kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None}
    ordered = sorted({*kinds, ErrorResponse}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, schemas, strict=True))
    bodies = {references[endpoint.body]["$ref"].rsplit("/", 1)[1] for endpoint in endpoints if endpoint.body}
    paths: dict[str, JsonObject] = {DOCUMENT_PATH: {"get": DOCUMENT_OPERATION}}
    for endpoint in endpoints:
        path = _shown_path(endpoint)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, references)
    document: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "llm-serving", "version": __version__},
        "paths": paths,
        "components": {"schemas": with_limits(components, bodies)},
    }
    if with_keys:
        document["components"]["securitySchemes"] = SECURITY_SCHEMES
        document["security"] = [{name: []} for name in SECURITY_SCHEMES]
        for endpoint in endpoints:
            if not endpoint.needs_key:
                paths[_shown_path(endpoint)][endpoint.method.lower()]["security"] = []
    return document


def _path_parameter(name: str) -> JsonObject:
    schema = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    return {"name": name, "in": "path", "required": True, "description": LIMITS[name], "schema": schema}


def _shown_path(endpoint: Endpoint) -> str:
    return re.sub(r":path\}", "}", endpoint.path)


def _operation(endpoint: Endpoint, path: str, references: dict[type, JsonObject]) -> JsonObject:
    answer: JsonObject = {"description": "The answer"}
    if endpoint.answer is not None:
        answer["content"] = {"application/json": {"schema": references[endpoint.answer]}}
    error: JsonObject = {"description": "An error"}
    if endpoint.error_response is openai_error_response:
        error["content"] = {"application/json": {"schema": references[ErrorResponse]}}
    operation: JsonObject = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{re.sub(r'[^a-z0-9]+', '_', path)}".rstrip("_"),
        "responses": {"200": answer, "default": error},
    }
    parameters = [_path_parameter(name) for name in re.findall(r"\{(\w+)\}", path)]
    parameters += [
        {"name": name, "in": "query", "description": LIMITS[name], "schema": schema}
        for name, schema in endpoint.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": references[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation
