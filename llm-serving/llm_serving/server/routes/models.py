"""GET /v1/models and /v1/parameters, the tokenizer routes, GET /version."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.admission.validation import check_token_ids
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.caller import source_of
from llm_serving.server.conversation import render_chat
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response
from llm_serving.server.generation import encode_text
from llm_serving.server.middleware.authentication import api_key_of
from llm_serving.server.off_loop import INLINE_ITEMS, large_json_response, off_loop
from llm_serving.server.openai_requests import check_model
from llm_serving.server.parameter_table import ParameterTable, parameter_table
from llm_serving.server.parameters import read_fields
from llm_serving.server.schemas import (
    ChatCompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    VersionResponse,
)
from llm_serving.server.tools import offered_tools

_OF_CONVERSATIONS: Final = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
"""Fields of chat that change its prompt."""
_STARTED: Final = int(time.time())


async def list_models(engine: AsyncEngine, http_request: Request) -> Response:
    """The one model that is served."""
    return json_response(ModelList(data=[_card(engine)]))


async def show_model(engine: AsyncEngine, http_request: Request) -> Response:
    """One model by its id."""
    check_model(engine, http_request.path_params["model"])
    return json_response(_card(engine))


async def list_parameters(engine: AsyncEngine, http_request: Request) -> Response:
    """What a request may say, and what it has that says nothing."""
    return json_response(parameter_table(engine, api_key_of(http_request)))


async def tokenize(engine: AsyncEngine, http_request: Request) -> Response:
    """Token ids of a prompt or of a rendered conversation."""
    request = await read_fields(engine, http_request, TokenizeRequest)
    check_model(engine, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt", "or `messages` must be given, and not both")
    if request.messages is not None:
        chat = ChatCompletionRequest(
            messages=request.messages, **{name: getattr(request, name) for name in _OF_CONVERSATIONS}
        )
        text = await render_chat(engine, source_of(http_request), chat, offered_tools(engine, chat))
        tokens = await encode_text(engine, text, "messages", bool(request.add_special_tokens))
    else:
        assert request.prompt is not None
        for name in _OF_CONVERSATIONS:
            if getattr(request, name) is not None:
                raise RequestError(name, "must be given with `messages` only")
        tokens = await encode_text(engine, request.prompt, "prompt", request.add_special_tokens is not False)
    answer = TokenizeResponse(len(tokens), engine.max_model_len, tokens)
    if request.return_token_strs:
        text_of = engine.tokenizer.token_text
        answer.token_strs = await off_loop(len(tokens) > INLINE_ITEMS, lambda: [text_of(each) for each in tokens])
    return await large_json_response(answer)


async def detokenize(engine: AsyncEngine, http_request: Request) -> Response:
    """The text of token ids."""
    request = await read_fields(engine, http_request, DetokenizeRequest)
    check_model(engine, request.model)

    def decode() -> DetokenizeResponse:
        check_token_ids("tokens", request.tokens, engine.model_spec.vocab_size)
        return DetokenizeResponse(engine.tokenizer.decode(request.tokens, skip_special_tokens=False))

    return await large_json_response(await off_loop(len(request.tokens) > INLINE_ITEMS, decode))


async def show_tokenizer(engine: AsyncEngine, http_request: Request) -> Response:
    """What the tokenizer is called, its special tokens and the chat template."""
    tokenizer = engine.tokenizer
    info = TokenizerInfo(
        tokenizer_class=tokenizer.named_class,
        chat_template=tokenizer.chat_template() or None,
        vocab_size=tokenizer.vocab_size,
        model_max_length=engine.max_model_len,
        **{name: tokenizer.special_texts.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
    )
    return await large_json_response(info)


async def show_version(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(VersionResponse(__version__))


def _card(engine: AsyncEngine) -> ModelCard:
    name = engine.config.model.model_name
    return ModelCard(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(_STARTED, UTC).isoformat().replace("+00:00", "Z"),
        created=_STARTED,
        root=name,
        max_model_len=engine.max_model_len,
    )


ENDPOINTS: Final = (
    Endpoint("GET", "/v1/models", list_models, "List the served models", answer=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", show_model, "Show a model", answer=ModelCard),
    Endpoint("GET", "/v1/parameters", list_parameters, "Tell what a request may say", answer=ParameterTable),
    Endpoint("POST", "/tokenize", tokenize, "Text to token ids", body=TokenizeRequest, answer=TokenizeResponse),
    Endpoint("POST", "/detokenize", detokenize, "Token ids to text", body=DetokenizeRequest, answer=DetokenizeResponse),
    Endpoint("GET", "/tokenizer_info", show_tokenizer, "What the tokenizer is like", answer=TokenizerInfo),
    Endpoint("GET", "/version", show_version, "Version of the server", answer=VersionResponse),
)
