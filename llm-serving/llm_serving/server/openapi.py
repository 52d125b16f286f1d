"""The OpenAPI document, generated from the endpoints, with value ranges that the Python types do not express."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from llm_serving import __version__
from llm_serving.core.sampling_params import ParameterRule, Real, SomeTokenIds, Texts, TokenBiases, TokenIds, Whole
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation.sampling import REQUEST_RULES
from llm_serving.server.parsing.errors import openai_error_response
from llm_serving.server.protocols.openai.schemas import ErrorResponse

JsonObject = dict[str, Any]

OTHER_RANGES: Final[dict[str, JsonObject]] = {"messages": {"minItems": 1, "maxItems": 4096}}

_UNBOUND: Final = "Not allowed with structured output."
_FITS: Final = "Prompt and answer must fit into the context of the model and the KV cache."
LIMITS: Final[dict[str, str]] = {
    "model": "The served model, as in /v1/models, or one of `model_config.model_aliases`.",
    "name": "The served model, as in /v1/models.",
    "version": "A folder in `model_config.weights_folder`.",
    "level": "1: the KV cache is dropped. 2: the weights too.",
    "running": "What happens to accepted requests: finish, abort or freeze. Default: finish.",
    "new_requests": "Whether later requests wait or are refused. Default: wait.",
    "request_id": "In a body: a text of limited length without control characters. In a path: id of a known request.",
    "prompt": f"One or more texts, or one or more lists of token ids of the vocabulary, none empty. {_FITS}",
    "inputs": f"Not empty. {_FITS}",
    "messages": f"Messages that the model's chat template accepts. {_FITS}",
    "role": "Role of a message: system, developer, user, assistant, tool or function.",
    "system": "A text of limited size.",
    "content": "Only text.",
    "stop_sequences": "Up to 16 strings of 1 to 256 characters.",
    "input": "Text messages that the model's chat template accepts. In /v1/embeddings: up to 2048 texts or lists of "
    f"token ids, none of them empty. {_FITS}",
    "encoding_format": "float or base64.",
    "dimensions": "1 to the size of the model's vectors.",
    "text_1": "One text, or as many as in text_2; needs text_2 and a model that returns vectors.",
    "text_2": "1 to 2047 texts; needs text_1 and a model that returns vectors.",
    "queries": "One text, or as many as in documents; needs documents and a model that returns vectors.",
    "documents": "1 to 2047 texts, which are not empty, within the context of the model.",
    "query": "Not empty, within the context of the model.",
    "top_n": "At least 0.",
    "max_tokens_per_doc": "At least 1.",
    "max_output_tokens": "Together with the prompt, this must fit into the context of the model and the KV cache.",
    "previous_response_id": "Id of a stored response that has ended.",
    "minutes": "1 to 60; in these minutes the server must have recorded at least 20 requests.",
    "record_path": "The server must record the decisions of its schedulers (`scheduler_config.record_path`).",
    "configuration": "The server's YAML, which is read again, must be valid.",
    "replica": "0 to the number of replicas - 1. The last replica that serves cannot be drained.",
    "response_id": "Id of a stored response. Only background responses can be cancelled.",
    "resume_from": "An event id of the stream, or the part of the id after the colon; ignored with `Last-Event-ID`.",
    "stream_id": "Id of a stream whose request is still known; `serving_config.resume_streams` must be on.",
    "background": "Requires `store`; not allowed with `stream`.",
    "metadata": "Up to 16 pairs, keys of up to 64 characters, values of up to 512.",
    "input_file_id": "Id of a stored file.",
    "file_id": "Id of a stored file.",
    "batch_id": "Id of a stored batch.",
    "endpoint": "/v1/completions, /v1/chat/completions, /v1/responses or /v1/embeddings.",
    "batch_path": "Files and batches need `serving_config.batch_path`.",
    "limit": "1 to 100.",
    "after": "Id of the last item of the previous page.",
    "order": "asc or desc.",
    "purpose": "Purpose of the files to list.",
    "receipt": "Allowed only if `serving_config.receipts` is not none.",
    "lora_name": "The name of an adapter: a new one to load it, a loaded one to unload it.",
    "lora_path": "A folder inside lora_config.lora_folder with an adapter that can be served.",
    "adapter_id": "The name of a loaded adapter.",
    "text": "A text. In /v1/responses an object with `format`: a supported structured output.",
    "output_config": "A `format` of type json_schema, with a supported schema.",
    "tools": "Functions of different names, of 1 to 64 letters, digits or any of _ . -; up to 128, and only if the "
    "server can parse the calls of the model.",
    "tool_choice": "auto, none, or with `tools` also required or the name of a tool. `required` excludes the same "
    "fields as structured output.",
    "tool_calls": "Arguments are JSON objects.",
    "tokens": "Ids of the vocabulary.",
    "max_tokens": "Together with the prompt, this must fit into the context of the model and the KV cache; 0 only in "
    "completions.",
    "max_completion_tokens": "Together with the prompt, this must fit into the context of the model and the KV cache. "
    "If `max_tokens` is given too, the smaller one applies.",
    "max_new_tokens": "Together with the prompt, this must fit into the context of the model and the KV cache.",
    "min_tokens": f"At most the maximum number of generated tokens; 0 with a beam search. {_UNBOUND}",
    "min_new_tokens": f"At most the maximum number of generated tokens. {_UNBOUND}",
    "ignore_eos": _UNBOUND,
    "stream_options": "Allowed only with `stream`.",
    "stream": "Not allowed with a beam search, or with `best_of` above `n`.",
    "n": "At most `best_of`; a request needs a running slot for each choice.",
    "best_of": "At least `n`; 10 at most where it is the width of a beam search.",
    "use_beam_search": "Not allowed with `stream` or with sampling.",
    "temperature": "0 to 100; 0 with a beam search.",
    "repetition_penalty": "0.01 to 100; 1 with a beam search.",
    "presence_penalty": "-2 to 2; 0 with a beam search.",
    "frequency_penalty": "-2 to 2; 0 with a beam search.",
    "seed": "-2^63 to 2^64 - 1, written without a fraction.",
    "top_k": "-1 or more, written without a fraction; 0 and -1 keep all tokens.",
    "length_penalty": "Only with a beam search: a finite number.",
    "early_stopping": "Allowed only with a beam search.",
    "logprobs": "0 to 20; in chat completions a boolean.",
    "top_logprobs": "0 to 20; only with `logprobs`.",
    "echo": "With `logprobs` not in a stream; in chat only effective if the last message is the assistant's.",
    "prompt_logprobs": "0 to 20, for prompts of a limited length; not streamed, and not with a beam search.",
    "priority": "Not allowed with `priority_class`; API keys and configuration limit it.",
    "priority_class": "One of `request_classes`; API keys and configuration limit it.",
    "service_tier": "A `service_tier` of `request_classes`, or auto, default or standard_only; API keys limit it.",
    "user": "A text of limited length.",
    "cache_salt": "A text of limited length.",
    "timeout_s": "Above 0, at most `serving_config.max_timeout_s`.",
    "stop": "Up to 16 strings of 1 to 256 characters.",
    "stop_token_ids": "Up to 128 ids of the vocabulary.",
    "bad_words": f"A limited number of texts of limited length, each with at least one token. {_UNBOUND}",
    "allowed_token_ids": f"At least one id of the vocabulary. {_UNBOUND}",
    "logit_bias": "Up to 1024 ids of the vocabulary, each -100 to 100.",
    **dict.fromkeys(
        "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex "
        "ebnf grammar".split(),
        "Must compile. At most one of these fields is allowed; not with a beam search, `min_tokens`, `ignore_eos`, "
        "`bad_words` or `allowed_token_ids`.",
    ),
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "max_thinking_tokens", "reasoning_effort", "thinking"),
        "At most one of these fields, and only if a token of the model ends reasoning; not with a beam search, "
        "`min_tokens`, `ignore_eos`, `bad_words` or `allowed_token_ids`.",
    ),
    "guided_whitespace_pattern": "A regular expression.",
    "truncate_prompt_tokens": "-1, or 1 or more, within the context of the model.",
    "truncate": "1 or more, within the context of the model.",
    "add_generation_prompt": "Not allowed with `continue_final_message`.",
    "continue_final_message": "Not allowed with `add_generation_prompt`, or if the template drops the last message.",
    "chat_template_kwargs": "Of a limited size; without the variables that the server sets.",
    "parameters": "An object; each of its fields has its own limits.",
    "steps": "1 to `serving_config.timeline_steps`.",
}
"""Name of a field, path parameter or query parameter -> text about its values, where the type does not express it."""

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


def with_limits(components: dict[str, JsonObject], bodies: set[type]) -> dict[str, JsonObject]:
    """Add ranges and descriptions to the schemas of `bodies` and of all types nested in them. Return `components`."""
    for name in msgspec.json.schema_components(bodies)[1]:
        schema = components[name]
        schema["additionalProperties"] = False
        for field, about in schema.get("properties", {}).items():
            _add_range(about, OTHER_RANGES.get(field) or _range_of(REQUEST_RULES.get(field)))
            if text := LIMITS.get(field) or (REQUEST_RULES[field].text if field in REQUEST_RULES else ""):
                about["description"] = text
    return components


def _range_of(rule: ParameterRule | None) -> JsonObject:
    match rule:
        case Whole(low, high):
            return {"minimum": low, "maximum": high}
        case Real(low, high, above_low):
            # A value that is above 0 in double precision but 0 in single precision is refused.
            return {"minimum": max(low, 2.0**-126) if above_low else low, "maximum": high}
        case Texts(count, _) | TokenIds(count):
            return {"maxItems": count}
        case SomeTokenIds(count):
            return {"minItems": 1, "maxItems": count}
        case TokenBiases(count, _):
            return {"maxProperties": count}
    return {}


def _add_range(about: JsonObject, limits: JsonObject) -> None:
    kinds = {"minimum": {"integer", "number"}, "maximum": {"integer", "number"}}
    kinds |= {"minItems": {"array"}, "maxItems": {"array"}, "maxProperties": {"object"}}
    for branch in about.get("anyOf", [about]):
        branch.update({key: value for key, value in limits.items() if branch.get("type") in kinds[key]})


def openapi_document(endpoints: Sequence[Endpoint], *, with_keys: bool) -> JsonObject:
    kinds = {kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None}
    ordered = sorted({*kinds, ErrorResponse}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    references = dict(zip(ordered, schemas, strict=True))
    bodies = {endpoint.body for endpoint in endpoints if endpoint.body is not None}
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
    text: JsonObject = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    parameters: list[JsonObject] = [
        {"name": name, "in": "path", "required": True, "description": LIMITS[name], "schema": text}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
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
