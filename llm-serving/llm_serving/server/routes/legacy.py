"""The routes of the older `llm-serving`, down to the bytes of their answers.

`POST /models/{name}` (`stream` selects), `/models/{name}/generate`, `/models/{name}/generate_stream`; `name` is the
served model, `llama2` or `internlm`, which all mean the served model. Body: `{"inputs": text, "parameters": {...},
"stream": bool}`. Numbers and booleans may arrive as strings ("True", "300"). Parameters:

| parameter | default | meaning |
| --- | --- | --- |
| do_sample | true | false: the most likely token, whatever the next three say |
| top_k | 3 | outside 1 to the size of the vocabulary: 1 |
| top_p | 1.0 | cut to 0.01 to 1.0 |
| temperature | 1.0 | not above 0: as do_sample false |
| repetition_penalty | 1.0 | as everywhere |
| max_new_tokens | 300 | most tokens to generate |
| return_full_text | true | streams end with a line that repeats the whole output |
| return_protocol | "sse" | the form of a stream, see below |
| seed | none | same seed, same tokens; reported as `seed`, 0 when none was given |
| stop | [] | strings that end the output |
| details, decoder_input_details, top_n_tokens, truncate, typical_p, watermark | | accepted, without effect |

`priority`, `priority_class`, `user` and `cache_salt` may stand in the body or in its `parameters`.

A whole answer is one line of JSON: `generated_text`; `finish_reason` (`eos`, `stop`, `length`, `abort` or
`predict_failed`); `generated_tokens`, their number; `prefill`, a list with the first token; `seed`; `tokens`, each with
`id`, `logprob`, `special` (it has no text of its own: an end token, or a part of a character) and `text`; `top_tokens`,
the first token in two lists; `details`, null.

A stream has a line for each token. Protocol `sse`: bare JSON `{"event", "retry", "data": [...]}` without the `data:`
that its content type promises; else `data:` and the JSON of the inner object alone.

Three errors are texts in place of an output, with status 200: a prompt that with `max_new_tokens` reaches the longest
length (202), a prompt without tokens (203), a generation that failed (304).

`GET /serving/get_bs` tells the number of running requests, `/serving/get_request_numbers` of running and waiting ones,
`/serving/get_serverd_model_info` describes the model: each one server-sent event.
"""

from __future__ import annotations

import json
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
from llm_serving.server.caller import HttpCaller, caller_of
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import legacy_error_response
from llm_serving.server.generation import Generation, encode_text, start_generation, token_pieces
from llm_serving.server.knock import knock
from llm_serving.server.off_loop import INLINE_TOKENS, off_loop
from llm_serving.server.openai_requests import check_model, request_id_of
from llm_serving.server.parameters import note_ignored, read_fields
from llm_serving.server.sampling import sampling_params
from llm_serving.server.streaming import EVENT_STREAM, StreamResponse
from llm_serving.server.text_schemas import LegacyParameters, LegacyRequest
from llm_serving.server.whole_answers import complete_whole

PROMPT_OUT_OF_RANGE: Final = "Error202: prompt out of range"
PROMPT_EMPTY: Final = "Error203: prompt token empty"
PREDICT_FAILED: Final = "error304: generation task stop abnormally!, please retry!"
RETRY_MS: Final = 30000
JSON_TYPE: Final = "application/json"

JsonObject = dict[str, Any]


async def generate_as_asked(engine: AsyncEngine, http_request: Request) -> Response:
    return await _generate(engine, http_request, None)


async def generate_whole(engine: AsyncEngine, http_request: Request) -> Response:
    return await _generate(engine, http_request, stream=False)


async def generate_stream(engine: AsyncEngine, http_request: Request) -> Response:
    return await _generate(engine, http_request, stream=True)


async def _generate(engine: AsyncEngine, http_request: Request, stream: bool | None) -> Response:
    check_model(engine, http_request.path_params["name"])
    request = await read_fields(engine, http_request, LegacyRequest, strict=False)
    parameters = request.parameters or LegacyParameters()
    caller = caller_of(engine.config, http_request, request, parameters)
    sampling = _sampling(parameters, engine.model_spec.vocab_size)
    answer = _Answer(parameters)
    stream = bool(request.stream) if stream is None else stream
    if request.stream not in (None, stream):
        note_ignored(http_request, "stream")
    request_id = request_id_of(http_request)
    generation = await _start(engine, request.inputs, sampling, caller, request_id)
    if isinstance(generation, str):
        reason = "prompt_token_ids_empty" if generation == PROMPT_EMPTY else "prompt_out_of_range"
        answer.add_text(generation, reason)
        content = answer.stream_of_text(generation) if stream else answer.whole_line()
        media_type = EVENT_STREAM if stream and answer.is_sse else JSON_TYPE
        return Response(content, HTTPStatus.OK, headers={"content-type": media_type})
    headers = {"x-request-id": request_id}
    if stream:
        media_type = EVENT_STREAM if answer.is_sse else JSON_TYPE
        return StreamResponse(generation, answer, answer.failure_line, media_type=media_type, headers=headers)
    await complete_whole(http_request, generation, answer.read(generation))
    line = await off_loop(sampling.max_tokens > INLINE_TOKENS, answer.whole_line)
    return Response(line, media_type=JSON_TYPE, headers=headers | generation.headers)


async def _start(
    engine: AsyncEngine, inputs: str, sampling: SamplingParams, caller: HttpCaller, request_id: str
) -> Generation | str:
    """The running generation, or the text that stands for it."""
    if not inputs:
        return PROMPT_EMPTY
    try:
        entry = await knock(engine, caller, [inputs], sampling.max_tokens)
        prompt = await encode_text(engine, inputs, "inputs")
        if len(prompt) + sampling.max_tokens >= engine.max_model_len:
            return PROMPT_OUT_OF_RANGE
        return await start_generation(entry, [prompt], [sampling], request_id=request_id)
    except ContextLengthError:
        return PROMPT_OUT_OF_RANGE


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


class _Answer:
    """Collects the tokens of one answer and writes its lines."""

    def __init__(self, parameters: LegacyParameters) -> None:
        self.is_sse = parameters.return_protocol in (None, "sse")
        self._return_full_text = parameters.return_full_text is not False
        self._seed = parameters.seed or 0
        self._tokens: list[JsonObject] = []
        self._text = ""
        self._finish_reason = ""
        self._num_generated = 0

    async def read(self, generation: Generation) -> None:
        async for _, output in generation.outputs():
            self._add(output)

    def piece(self, index: int, output: RequestOutput) -> bytes:
        del index
        return b"".join([self._token_line(token) for token in self._add(output)])

    async def end(self) -> bytes:
        return self._end()

    def _end(self) -> bytes:
        return self._last_line() if self._return_full_text else b""

    def stream_of_text(self, text: str) -> bytes:
        """A whole stream whose one piece is a text that `add_text` was given."""
        return self._token_line(self._tokens[-1]) + self._end()

    def add_text(self, text: str, finish_reason: str) -> JsonObject:
        """Takes a text that no token stands for, such as an error, as the end of the answer."""
        token = {"id": 0, "logprob": 0.0, "special": False, "text": text}
        self._tokens.append(token)
        self._text += text
        self._finish_reason = finish_reason
        return token

    def failure_line(self, error: LLMServingError) -> bytes:
        return self._token_line(self.add_text(PREDICT_FAILED, "predict_failed")) + self._end()

    def whole_line(self) -> bytes:
        return _line(self._summary() | {"details": None})

    def _add(self, output: RequestOutput) -> list[JsonObject]:
        pieces = token_pieces(output)
        tokens: list[JsonObject] = [
            {"id": piece.token_id, "logprob": piece.logprob, "special": piece.text == "", "text": piece.text}
            for piece in pieces
        ]
        if output.text and not tokens:
            tokens = [{"id": 0, "logprob": 0.0, "special": False, "text": output.text}]
        self._tokens += tokens
        self._text += output.text
        self._num_generated = output.num_output_tokens
        if output.failed:
            tokens.append(self.add_text(PREDICT_FAILED, "predict_failed"))
        elif output.finish_reason is not None:
            ended_by_model = output.finish_reason is FinishReason.STOP and output.stop_reason is None
            self._finish_reason = "eos" if ended_by_model else output.finish_reason.value
        return tokens

    def _token_line(self, token: JsonObject) -> bytes:
        return self._stream_line(
            {"details": None, "generated_text": token["text"], "tokens": token, "top_tokens": [token]}
        )

    def _last_line(self) -> bytes:
        summary, details = self._summary(), {"details": None}
        return self._stream_line(details | summary if self.is_sse else summary | details)

    def _stream_line(self, content: JsonObject) -> bytes:
        if self.is_sse:
            return _line({"event": "message", "retry": RETRY_MS, "data": [content]})
        return _line(content, prefix="data:")

    def _summary(self) -> JsonObject:
        return {
            "generated_text": self._text,
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


def _generation_endpoint(path: str, handler: Any, summary: str) -> Endpoint:
    return Endpoint("POST", path, handler, summary, body=LegacyRequest, error_response=legacy_error_response)


ENDPOINTS: Final = (
    # The names of models may hold slashes, so the paths with an end of their own come first.
    _generation_endpoint("/models/{name:path}/generate", generate_whole, "Continue a prompt (older protocol)"),
    _generation_endpoint(
        "/models/{name:path}/generate_stream", generate_stream, "Stream a continuation (older protocol)"
    ),
    _generation_endpoint("/models/{name:path}", generate_as_asked, "Continue a prompt (older protocol)"),
    Endpoint("GET", "/serving/get_bs", show_batch_size, "Number of running requests"),
    Endpoint("GET", "/serving/get_request_numbers", show_request_numbers, "Number of running and waiting requests"),
    Endpoint("GET", "/serving/get_serverd_model_info", show_model_info, "Describe the served model"),
)
