"""GET /v1/models and /v1/parameters, the tokenizer routes, GET /version."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.admission.validation import check_token_ids
from llm_serving.config.report import key_texts
from llm_serving.config.tables import ApiKey
from llm_serving.core import sampling_params
from llm_serving.core.request_class import class_of
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.conversation import encode_chat
from llm_serving.server.generation.pipeline import encode_text
from llm_serving.server.generation.sampling import REQUEST_RULES
from llm_serving.server.generation.tools import offered_tools
from llm_serving.server.parsing.body import check_model, read_fields
from llm_serving.server.parsing.caller import ceiling_of
from llm_serving.server.parsing.offload import INLINE_ITEMS, json_response, large_json_response, off_loop
from llm_serving.server.protocols.openai import schemas
from llm_serving.server.request_context import api_key_of, source_of
from llm_serving.server.served_models import models_shown

ENDPOINTS: Final = Endpoints()


class Parameter(Struct, kw_only=True):
    """A sampling parameter: the field `name` of completion or chat requests."""

    name: str
    kind: str
    default: Any
    """Default of completions. null if there is no default. For `seed`, null means a random value."""
    chat_default: Any
    """Default of chat; null for `max_tokens` means the maximum that fits."""
    rule: str
    meaning: str
    minimum: float | int | None = None
    maximum: float | int | None = None
    completions: bool
    chat: bool


class ClassCard(Struct, kw_only=True):
    name: str
    rank: int
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    allowed: bool
    default: bool


class ParameterTable(Struct, kw_only=True):
    model: str
    max_model_len: int
    parameters: list[Parameter]
    classes: list[ClassCard]


@functools.cache
def meanings() -> Mapping[str, str]:
    """Return a map from each parameter to the docstring of its field in `SamplingParams`."""
    return key_texts(sampling_params.SamplingParams)


_KINDS: Final[Mapping[type, str]] = {
    sampling_params.Whole: "integer",
    sampling_params.Real: "number",
    sampling_params.Flag: "boolean",
    sampling_params.Texts: "strings",
    sampling_params.TokenIds: "token_ids",
    sampling_params.SomeTokenIds: "token_ids",
}


def _parameter(name: str, of_model: Mapping[str, Any]) -> Parameter:
    rule = REQUEST_RULES[name]
    default = chat_default = None if name == "seed" else of_model.get(name, sampling_params.DEFAULTS[name])
    if name == "max_tokens":
        default, chat_default = sampling_params.DEFAULTS[name], of_model.get(name)
    return Parameter(
        name=name,
        kind=_KINDS.get(type(rule), "other"),
        default=default,
        chat_default=chat_default,
        rule=rule.text,
        meaning=meanings()[name],
        minimum=getattr(rule, "low", None),
        maximum=getattr(rule, "high", None),
        completions=name in schemas.CompletionRequest.__struct_fields__,
        chat=name in schemas.ChatCompletionRequest.__struct_fields__,
    )


def _classes(engine: AsyncEngine, key: ApiKey | None) -> list[ClassCard]:
    config, ceiling = engine.config, ceiling_of(engine.config, key)
    default = class_of(0 if ceiling is None else max(0, ceiling.rank), config.request_classes)
    return [
        ClassCard(
            name=each.name,
            rank=each.rank,
            ttft_slo_s=each.ttft_slo_s,
            tpot_slo_s=each.tpot_slo_s,
            allowed=ceiling is None or each.rank >= ceiling.rank,
            default=each is default,
        )
        for each in config.request_classes
    ]


_CHAT_FIELDS: Final = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
_STARTED: Final = int(time.time())


@ENDPOINTS.add("GET", "/v1/models", "List the served models", answer=schemas.ModelList)
async def list_models(engine: AsyncEngine, http_request: Request) -> Response:
    models = models_shown(http_request)
    engines = [engine] if models is None else [model.engine for model in models]
    cards = []
    for each in engines:
        cards.append(_card(each, with_kind=models is not None))
        cards += [_adapter_card(each, adapter) for adapter in each.adapters.by_name.values()]
    return json_response(schemas.ModelList(data=cards))


@ENDPOINTS.add("GET", "/v1/models/{model:path}", "Show a model", answer=schemas.ModelCard)
async def show_model(engine: AsyncEngine, http_request: Request) -> Response:
    name, models = http_request.path_params["model"], models_shown(http_request)
    if models is not None:
        engine = models.find(name).engine
    else:
        check_model(engine, name)
    adapter = engine.adapters.by_name.get(name)
    if adapter is not None:
        return json_response(_adapter_card(engine, adapter))
    return json_response(_card(engine, with_kind=models is not None))


@ENDPOINTS.add("GET", "/v1/parameters", "List the sampling parameters that a request may set", answer=ParameterTable)
async def list_parameters(engine: AsyncEngine, http_request: Request) -> Response:
    parameters = [_parameter(name, engine.sampling_defaults) for name in sampling_params.RULES]
    table = ParameterTable(
        model=engine.config.model.model_name,
        max_model_len=engine.max_model_len,
        parameters=[each for each in parameters if each.completions or each.chat],  # others have no field of their own
        classes=_classes(engine, api_key_of(http_request)),
    )
    return json_response(table)


@ENDPOINTS.add(
    "POST", "/tokenize", "Convert text to token ids", body=schemas.TokenizeRequest, answer=schemas.TokenizeResponse
)
async def tokenize(engine: AsyncEngine, http_request: Request) -> Response:
    request = await read_fields(engine, http_request, schemas.TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt", "or `messages` must be given, and not both")
    if request.messages is not None:
        chat = schemas.ChatCompletionRequest(
            messages=request.messages,
            add_special_tokens=request.add_special_tokens,
            **{name: getattr(request, name) for name in _CHAT_FIELDS},
        )
        tokens = await encode_chat(engine, source_of(http_request), chat, offered_tools(engine, chat))
    else:
        assert request.prompt is not None
        for name in _CHAT_FIELDS:
            if getattr(request, name) is not None:
                raise RequestError(name, "requires `messages`")
        tokens = await encode_text(engine, request.prompt, "prompt", request.add_special_tokens is not False)
    response = schemas.TokenizeResponse(len(tokens), engine.max_model_len, tokens)
    if request.return_token_strs:
        text_of = engine.tokenizer.token_text
        response.token_strs = await off_loop(len(tokens) > INLINE_ITEMS, lambda: [text_of(each) for each in tokens])
    return await large_json_response(response)


@ENDPOINTS.add(
    "POST",
    "/detokenize",
    "Convert token ids to text",
    body=schemas.DetokenizeRequest,
    answer=schemas.DetokenizeResponse,
)
async def detokenize(engine: AsyncEngine, http_request: Request) -> Response:
    request = await read_fields(engine, http_request, schemas.DetokenizeRequest)

    def decode() -> schemas.DetokenizeResponse:
        check_token_ids("tokens", request.tokens, engine.model_spec.vocab_size)
        return schemas.DetokenizeResponse(engine.tokenizer.decode(request.tokens, skip_special_tokens=False))

    return await large_json_response(await off_loop(len(request.tokens) > INLINE_ITEMS, decode))


@ENDPOINTS.add("GET", "/tokenizer_info", "Describe the tokenizer and its chat template", answer=schemas.TokenizerInfo)
async def show_tokenizer(engine: AsyncEngine, http_request: Request) -> Response:
    tokenizer = engine.tokenizer
    info = schemas.TokenizerInfo(
        tokenizer_class=tokenizer.named_class,
        chat_template=tokenizer.chat_template() or None,
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.max_model_len,
        **{name: tokenizer.special_texts.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    )
    return await large_json_response(info)


@ENDPOINTS.add("GET", "/version", "Show the version of the server", answer=schemas.VersionResponse)
async def show_version(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(schemas.VersionResponse(__version__))


def _card(engine: AsyncEngine, *, with_kind: bool = False) -> schemas.ModelCard:
    name, pooling = engine.config.model.model_name, engine.pooling
    card = schemas.ModelCard(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(_STARTED, UTC).isoformat().replace("+00:00", "Z"),
        created=_STARTED,
        root=name,
        max_model_len=engine.max_model_len,
    )
    if with_kind:
        generates = pooling is None or not pooling.embedding_only
        card.kind = "generate" if generates or pooling is None else "score" if pooling.scores else "embed"
        card.aliases = engine.config.model.model_aliases
    return card


def _adapter_card(engine: AsyncEngine, adapter: Adapter) -> schemas.ModelCard:
    card = _card(engine)
    when = datetime.fromtimestamp(adapter.created, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.structs.replace(
        card, id=adapter.name, display_name=adapter.name, created=adapter.created, created_at=when, parent=card.id
    )
