"""The routes of the older `llm-serving` server, which docs/reference/older_routes.md describes."""

from __future__ import annotations

import json
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, LLMServingError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation import pipeline
from llm_serving.server.generation.events import EVENT_STREAM
from llm_serving.server.generation.logprobs import token_outputs
from llm_serving.server.generation.response import ResponseBuilder, respond
from llm_serving.server.generation.sampling import sampling_params
from llm_serving.server.parsing.body import check_model, note_ignored, read_fields
from llm_serving.server.parsing.errors import legacy_error_response
from llm_serving.server.parsing.offload import INLINE_TOKENS, off_loop
from llm_serving.server.protocols.text_schemas import LegacyParameters, LegacyRequest

PROMPT_OUT_OF_RANGE: Final = "Error202: prompt out of range"
PROMPT_EMPTY: Final = "Error203: prompt token empty"
PREDICT_FAILED: Final = "error304: generation task stop abnormally!, please retry!"
RETRY_MS: Final = 30000
JSON_TYPE: Final = "application/json"

JsonObject = dict[str, Any]


async def _generate(engine: AsyncEngine, http_request: Request, *, stream: bool | None) -> Response:
    check_model(engine, http_request.path_params["name"])
    body = await read_fields(engine, http_request, LegacyRequest, strict=False)
    parameters = body.parameters or LegacyParameters()
    request = _LegacyRequest(engine, http_request, body, parameters)
    builder = LegacyBuilder(parameters)
    streams = bool(body.stream) if stream is None else stream
    if body.stream not in (None, streams):
        note_ignored(http_request, "stream")
    try:
        if not body.inputs:
            return builder.text_response(PROMPT_EMPTY, "prompt_token_ids_empty", stream=streams)
        started = await pipeline.start_generation(request)
    except ContextLengthError:
        return builder.text_response(PROMPT_OUT_OF_RANGE, "prompt_out_of_range", stream=streams)
    return await respond(http_request, started, builder, stream=streams)


class _LegacyRequest(pipeline.ProtocolRequest):
    def __init__(
        self, engine: AsyncEngine, http_request: Request, body: LegacyRequest, parameters: LegacyParameters
    ) -> None:
        super().__init__(engine, http_request, body, parameters)
        self._inputs = body.inputs
        self._sampling = _sampling(parameters, engine.model_spec.vocab_size)

    async def prepare(self) -> pipeline.PrecheckInput:
        return pipeline.PrecheckInput([self._inputs], self._sampling.max_tokens)

    async def encode(self) -> pipeline.EncodedRequest:
        prompt = await pipeline.encode_text(self.engine, self._inputs, "inputs")
        if len(prompt) + self._sampling.max_tokens >= self.engine.max_model_len:
            raise ContextLengthError("inputs", PROMPT_OUT_OF_RANGE, len(prompt))
        return pipeline.EncodedRequest([prompt], self._sampling)


def _sampling(parameters: LegacyParameters, vocab_size: int) -> SamplingParams:
    max_new_tokens = 300 if parameters.max_new_tokens is None else parameters.max_new_tokens
    temperature = 1.0 if parameters.temperature is None else parameters.temperature
    greedy = parameters.do_sample is False or temperature <= 0.0
    top_k = 3 if parameters.top_k is None else parameters.top_k
    return sampling_params(
        parameters,
        {"max_tokens": "parameters.max_new_tokens"},
        max_tokens=max_new_tokens,
        temperature=0.0 if greedy else temperature,
        top_k=0 if greedy else top_k if 1 <= top_k <= vocab_size else 1,
        top_p=1.0 if greedy or parameters.top_p is None else min(max(parameters.top_p, 0.01), 1.0),
        logprobs=0,
    )


def _line(content: JsonObject, prefix: str = "") -> bytes:
    return f"{prefix}{json.dumps(content, ensure_ascii=False)}\n".encode()


class LegacyBuilder(ResponseBuilder):
    """Builds responses of the older routes. A stream consists of server-sent events or of lines of JSON."""

    def __init__(self, parameters: LegacyParameters) -> None:
        self._is_sse = parameters.return_protocol in (None, "sse")
        self.media_type = EVENT_STREAM if self._is_sse else JSON_TYPE
        self._return_full_text = parameters.return_full_text is not False
        self._seed = parameters.seed or 0
        self._tokens: list[JsonObject] = []
        self._texts: list[str] = []
        self._finish_reason = ""
        self._num_generated = 0

    def check(self, output: RequestOutput) -> None:
        """Do nothing, because this protocol reports failed requests as text of the response, not as errors."""

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        return b"".join([self._token_line(token) for token in self._add(output)])

    async def finish(self) -> bytes:
        return self._end()

    def error_chunk(self, error: LLMServingError) -> bytes:
        return self._token_line(self._add_text(PREDICT_FAILED, "predict_failed")) + self._end()

    def fold(self, index: int, output: RequestOutput) -> None:
        self._add(output)

    async def response(self, headers: dict[str, str]) -> Response:
        line = await off_loop(len(self._tokens) > INLINE_TOKENS, self._whole_line)
        return Response(line, media_type=JSON_TYPE, headers=headers)

    def text_response(self, text: str, finish_reason: str, *, stream: bool) -> Response:
        token = self._add_text(text, finish_reason)
        content = self._token_line(token) + self._end() if stream else self._whole_line()
        media_type = self.media_type if stream else JSON_TYPE
        return Response(content, HTTPStatus.OK, headers={"content-type": media_type})

    def _end(self) -> bytes:
        if not self._return_full_text:
            return b""
        summary, details = self._summary(), {"details": None}
        return self._stream_line(details | summary if self._is_sse else summary | details)

    def _whole_line(self) -> bytes:
        return _line(self._summary() | {"details": None})

    def _add_text(self, text: str, finish_reason: str) -> JsonObject:
        token = {"id": 0, "logprob": 0.0, "special": False, "text": text}
        self._tokens.append(token)
        self._texts.append(text)
        self._finish_reason = finish_reason
        return token

    def _add(self, output: RequestOutput) -> list[JsonObject]:
        tokens: list[JsonObject] = [
            {"id": token.token_id, "logprob": token.logprob, "special": token.text == "", "text": token.text}
            for token in token_outputs(output)
        ]
        if output.text and not tokens:
            tokens = [{"id": 0, "logprob": 0.0, "special": False, "text": output.text}]
        self._tokens += tokens
        self._texts.append(output.text)
        self._num_generated = output.num_output_tokens
        if output.failed:
            tokens.append(self._add_text(PREDICT_FAILED, "predict_failed"))
        elif output.finish_reason is not None:
            ended_by_model = output.finish_reason is FinishReason.STOP and output.stop_reason is None
            self._finish_reason = "eos" if ended_by_model else output.finish_reason.value
        return tokens

    def _token_line(self, token: JsonObject) -> bytes:
        return self._stream_line(
            {"details": None, "generated_text": token["text"], "tokens": token, "top_tokens": [token]}
        )

    def _stream_line(self, content: JsonObject) -> bytes:
        if self._is_sse:
            return _line({"event": "message", "retry": RETRY_MS, "data": [content]})
        return _line(content, prefix="data:")

    def _summary(self) -> JsonObject:
        return {
            "generated_text": "".join(self._texts),
            "finish_reason": self._finish_reason,
            "generated_tokens": self._num_generated,
            "prefill": self._tokens[:1],
            "seed": self._seed,
            "tokens": self._tokens,
            "top_tokens": [self._tokens[:1]],
        }


async def show_batch_size(engine: AsyncEngine, http_request: Request) -> Response:
    return _event({"event": "message", "retry": RETRY_MS, "data": engine.num_running})


async def show_request_numbers(engine: AsyncEngine, http_request: Request) -> Response:
    return _event({"event": "message", "retry": RETRY_MS, "data": engine.num_running + engine.num_waiting})


async def show_model_info(engine: AsyncEngine, http_request: Request) -> Response:
    config = engine.config
    return _event(
        {
            "docker_label": "",
            "max_batch_total_tokens": engine.max_model_len * config.model.decode_batch_size,
            "max_concurrent_requests": config.model.decode_batch_size + config.scheduler.max_waiting_queue,
            "max_input_length": config.model.max_input_len,
            "max_total_tokens": engine.max_model_len,
            "model_device_type": config.device.device_target,
            "model_dtype": config.model.model_dtype,
            "model_id": config.model.model_name,
            "model_pipeline_tag": "text-generation",
            "version": __version__,
        }
    )


def _event(content: JsonObject) -> Response:
    data = f"data: {json.dumps(content, ensure_ascii=False)}\r\n\r\n"
    return Response(data.encode(), headers={"content-type": EVENT_STREAM, "cache-control": "no-store"})


def _generation_endpoint(path: str, stream: bool | None, summary: str) -> Endpoint:
    handler = partial(_generate, stream=stream)
    return Endpoint("POST", path, handler, summary, body=LegacyRequest, error_response=legacy_error_response)


ENDPOINTS: Final = (
    # A model's name may contain slashes, so the longer paths come first.
    _generation_endpoint("/models/{name:path}/generate", False, "Continue a prompt (older protocol)"),
    _generation_endpoint("/models/{name:path}/generate_stream", True, "Stream a continuation (older protocol)"),
    _generation_endpoint("/models/{name:path}", None, "Continue a prompt (older protocol)"),
    Endpoint("GET", "/serving/get_bs", show_batch_size, "Show the number of running requests"),
    Endpoint(
        "GET", "/serving/get_request_numbers", show_request_numbers, "Show the number of running and waiting requests"
    ),
    Endpoint("GET", "/serving/get_serverd_model_info", show_model_info, "Describe the served model"),
)
