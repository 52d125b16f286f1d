"""The routes of text-generation-inference (TGI): POST / , /generate and /generate_stream, GET /info.

`priority`, `priority_class`, `user` and `cache_salt` may stand in the body or in its `parameters`.

As there, sampling starts with `do_sample` or with any parameter that only makes sense with it; otherwise the most
likely token is taken. Events are `data:` and one token each; the last one has the whole text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import MAX_STOP_STRINGS, Real, SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.answer_form import asked_form, compiled, text_of
from llm_serving.server.caller import caller_of
from llm_serving.server.choices import MAX_CHOICES
from llm_serving.server.deadline import before
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response, tgi_error_content, tgi_error_response
from llm_serving.server.generation import (
    MIN_LOGPROB,
    Generation,
    encode_text,
    raise_unless_whole,
    start_generation,
    token_pieces,
)
from llm_serving.server.knock import knock
from llm_serving.server.off_loop import large_json_response
from llm_serving.server.openai_requests import request_id_of
from llm_serving.server.parameters import note_ignored, read_fields
from llm_serving.server.sampling import sampling_params
from llm_serving.server.streaming import StreamResponse
from llm_serving.server.text_schemas import TGIParameters, TGIRequest
from llm_serving.server.whole_answers import complete_whole
from llm_serving.text.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS: Final = 100

_FIELDS: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "logprobs": "top_n_tokens"}
"""Parameter -> what it is called here."""
_NAMES: Final = {**_FIELDS, "prompt": "inputs"}
_TEMPERATURE: Final = Real(0.0, 100.0, above_low=True)

JsonObject = dict[str, Any]


async def generate_compatible(engine: AsyncEngine, http_request: Request) -> Response:
    """`POST /`: a stream, or a list with one answer."""
    return await _generate(engine, http_request, None)


async def generate(engine: AsyncEngine, http_request: Request) -> Response:
    return await _generate(engine, http_request, stream=False)


async def generate_stream(engine: AsyncEngine, http_request: Request) -> Response:
    return await _generate(engine, http_request, stream=True)


async def _generate(engine: AsyncEngine, http_request: Request, stream: bool | None) -> Response:
    request = await read_fields(engine, http_request, TGIRequest)
    parameters = request.parameters or TGIParameters()
    streams = bool(request.stream) if stream is None else stream
    if request.stream not in (None, streams):
        note_ignored(http_request, "stream")
    if parameters.top_n_tokens and not (streams or parameters.details):
        note_ignored(http_request, "top_n_tokens")
    caller = caller_of(engine.config, http_request, request, parameters)
    sampling = _sampling(parameters)
    form = asked_form(parameters, _FIELDS)
    truncates = parameters.truncate is not None
    entry = await knock(engine, caller, [request.inputs], sampling.max_tokens, names=_NAMES, truncates=truncates)
    prompt = await encode_text(engine, request.inputs, "inputs")
    if parameters.truncate is not None:
        if parameters.truncate < 1:
            raise RequestError("truncate", "must be an integer of at least 1", parameters.truncate)
        prompt = prompt[-parameters.truncate :]
    constraint = await before(caller.deadline, engine.clock, compiled(engine, form, caller.source))
    sampling = replace(sampling, constraint=text_of(constraint))
    request_id = request_id_of(http_request)
    generation = await start_generation(entry, [prompt], [sampling], request_id=request_id, constraint=constraint)
    answer = _Answer(engine.tokenizer, request.inputs, parameters, sampling)
    if streams:
        headers = {"x-request-id": request_id}
        return StreamResponse(generation, answer, lambda error: _event(tgi_error_content(error)), headers=headers)
    result = await complete_whole(http_request, generation, answer.whole(generation))
    headers = {"x-request-id": request_id} | generation.headers
    if parameters.details:
        return await large_json_response([result] if stream is None else result, headers)
    return json_response([result] if stream is None else result, headers=headers)


def _sampling(parameters: TGIParameters) -> SamplingParams:
    if parameters.temperature is not None:
        _TEMPERATURE.checked("temperature", parameters.temperature)
    max_new_tokens = DEFAULT_MAX_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    samples = (
        parameters.do_sample
        or parameters.temperature not in (None, 1.0)
        or parameters.top_k not in (None, 0)
        or parameters.top_p not in (None, 1.0)
    )
    if parameters.stop and parameters.stop_sequences and parameters.stop != parameters.stop_sequences:
        raise RequestError("stop_sequences", "is an older name of `stop`; give one of them")
    return sampling_params(
        parameters,
        _FIELDS | {"stop": "stop" if parameters.stop else "stop_sequences"},
        max_tokens=max_new_tokens,
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if samples else 0.0,
        include_stop_str_in_output=True,
        logprobs=parameters.top_n_tokens or 0,
    )


class _Answer:
    """Puts the pieces of a generation into the form of the protocol."""

    def __init__(self, tokenizer: Tokenizer, inputs: str, parameters: TGIParameters, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._sampling = sampling
        self._text = inputs if parameters.return_full_text else ""
        self._num_told = 0
        """Tokens that have become events."""

    async def whole(self, generation: Generation) -> JsonObject:
        tokens: list[JsonObject] = []
        top_tokens: list[list[JsonObject]] = []
        details: JsonObject = {}
        async for _, output in generation.outputs():
            raise_unless_whole(output)
            self._text += output.text
            tokens += [self._token(*piece) for piece in token_pieces(output)]
            top_tokens += self._top_tokens(output)
            if output.finished:
                details = self._details(output)
        answer: JsonObject = {"generated_text": self._text}
        if self._parameters.details:
            answer["details"] = details | {"prefill": [], "tokens": tokens, "best_of_sequences": None}
            if self._parameters.top_n_tokens:
                answer["details"]["top_tokens"] = top_tokens
        return answer

    def piece(self, index: int, output: RequestOutput) -> bytes:
        del index
        raise_unless_whole(output)
        self._text += output.text
        pieces = token_pieces(output)
        top_tokens = self._top_tokens(output)
        events = []
        for i, piece in enumerate(pieces):
            self._num_told += 1
            content: JsonObject = {"index": self._num_told, "token": self._token(*piece)}
            if self._parameters.top_n_tokens:
                content["top_tokens"] = top_tokens[i]
            last = output.finished and i == len(pieces) - 1
            content["generated_text"] = self._text if last else None
            content["details"] = self._details(output) if last and self._parameters.details else None
            events.append(_event(content))
        return b"".join(events)

    async def end(self) -> bytes:
        return b""

    def _token(self, token_id: int, logprob: float, text: str) -> JsonObject:
        """A token with the text that became certain by it.

        Clients put the texts of those together that are not special. So one that ends the answer is not where text
        comes with it that was held back until then.
        """
        special = token_id in self._tokenizer.special_token_ids and not text
        return {
            "id": token_id,
            "text": self._tokenizer.token_text(token_id) if special else text,
            "logprob": logprob,
            "special": special,
        }

    def _likely(self, token_id: int, logprob: float) -> JsonObject:
        return {
            "id": token_id,
            "text": self._tokenizer.token_text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "special": token_id in self._tokenizer.special_token_ids,
        }

    def _top_tokens(self, output: RequestOutput) -> list[list[JsonObject]]:
        return [
            [
                self._likely(token_id, logprob)
                for token_id, logprob in zip(token.top_token_ids, token.top_logprobs, strict=True)
            ]
            for token in output.logprobs
        ]

    def _details(self, output: RequestOutput) -> JsonObject:
        if output.finish_reason is not FinishReason.STOP:
            reason = "length"
        else:
            reason = "eos_token" if output.stop_reason is None else "stop_sequence"
        return {
            "finish_reason": reason,
            "generated_tokens": output.num_output_tokens,
            "seed": None if self._sampling.greedy else self._sampling.seed,
            "input_length": output.num_prompt_tokens,
        }


async def show_info(engine: AsyncEngine, http_request: Request) -> Response:
    """What the server serves, and its limits."""
    config = engine.config
    return json_response(
        {
            "model_id": config.model.model_name,
            "model_sha": None,
            "model_dtype": config.model.model_dtype,
            "model_device_type": config.device.device_target.lower(),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": config.model.decode_batch_size + config.scheduler.max_waiting_queue,
            "max_best_of": 1,
            "max_stop_sequences": MAX_STOP_STRINGS,
            "max_input_tokens": config.model.max_input_len,
            "max_total_tokens": engine.max_model_len,
            "max_client_batch_size": MAX_CHOICES,
            "router": "llm-serving",
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _event(content: JsonObject) -> bytes:
    return b"data:" + msgspec.json.encode(content) + b"\n\n"


def _generation_endpoint(path: str, handler: Any, summary: str) -> Endpoint:
    return Endpoint("POST", path, handler, summary, body=TGIRequest, error_response=tgi_error_response)


ENDPOINTS: Final = (
    _generation_endpoint("/", generate_compatible, "Continue a prompt (TGI), as a stream or as a list"),
    _generation_endpoint("/generate", generate, "Continue a prompt (TGI)"),
    _generation_endpoint("/generate_stream", generate_stream, "Stream a continuation (TGI)"),
    Endpoint("GET", "/info", show_info, "Describe the served model (TGI)", error_response=tgi_error_response),
)
