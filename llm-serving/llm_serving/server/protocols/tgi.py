"""The routes of text-generation-inference (TGI): POST /, /generate and /generate_stream, GET /info."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llm_serving import __version__
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import PromptLogprobs, RequestOutput
from llm_serving.core.sampling_params import MAX_STOP_STRINGS, Real, SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError, ModelNotFoundError, RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation import pipeline
from llm_serving.server.generation.logprobs import MIN_LOGPROB, check_prompt_logprobs_size, token_outputs
from llm_serving.server.generation.response import ResponseBuilder, respond
from llm_serving.server.generation.sampling import COUNT, MAX_CHOICES, MAX_N, Choices, sampling_params, with_choice_seed
from llm_serving.server.generation.structured_output import structured_output_of
from llm_serving.server.parsing.body import note_ignored, read_fields
from llm_serving.server.parsing.errors import tgi_error_content, tgi_error_response
from llm_serving.server.parsing.offload import json_response, large_json_response
from llm_serving.server.protocols.text_schemas import TGIParameters, TGIRequest
from llm_serving.text.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS: Final = 100

_FIELDS: Final = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "logprobs": "top_n_tokens"}
_NAMES: Final = {**_FIELDS, "prompt": "inputs"}
_TEMPERATURE: Final = Real(0.0, 100.0, above_low=True)

JsonObject = dict[str, Any]


async def _generate(engine: AsyncEngine, http_request: Request, *, stream: bool | None) -> Response:
    """Respond to a TGI request. If `stream` is None, the body's field decides, and an unstreamed response is a list."""
    body = await read_fields(engine, http_request, TGIRequest)
    parameters = body.parameters or TGIParameters()
    streams = bool(body.stream) if stream is None else stream
    if body.stream not in (None, streams):
        note_ignored(http_request, "stream")
    if parameters.top_n_tokens and not (streams or parameters.details or parameters.decoder_input_details):
        note_ignored(http_request, "top_n_tokens")
    if parameters.adapter_id is not None and parameters.adapter_id not in engine.adapters.by_name:
        raise ModelNotFoundError("adapter_id", "must be the name of a loaded adapter", parameters.adapter_id)
    request = _TGIRequest(engine, http_request, body, parameters, streams=streams)
    started = await pipeline.start_generation(request)
    prompt = started.prompts[0]
    builder = TGIBuilder(engine.tokenizer, body.inputs, prompt, parameters, request.sampling, as_list=stream is None)
    return await respond(http_request, started, builder, stream=streams)


class _TGIRequest(pipeline.ProtocolRequest):
    def __init__(
        self, engine: AsyncEngine, http_request: Request, body: TGIRequest, parameters: TGIParameters, *, streams: bool
    ) -> None:
        super().__init__(engine, http_request, body, parameters)
        self._inputs = body.inputs
        self._parameters = parameters
        self._streams = streams
        self.sampling = SamplingParams()

    async def prepare(self) -> pipeline.PrecheckInput:
        self.sampling = _sampling(self._parameters)
        count = self._checked_count()
        self.choices = Choices(count, count)
        self._output = structured_output_of(self._parameters, _FIELDS)
        truncates = self._parameters.truncate is not None
        return pipeline.PrecheckInput([self._inputs], self.sampling.max_tokens, _NAMES, count, truncates=truncates)

    def _checked_count(self) -> int:
        parameters = self._parameters
        if self._streams and parameters.decoder_input_details:
            raise RequestError("decoder_input_details", "is not supported in a stream", True)
        if parameters.best_of is None:
            return 1
        count = int(COUNT.checked("best_of", parameters.best_of))
        if count > 1 and self._streams:
            raise RequestError("best_of", "must be 1 in a stream", count)
        if count > 1 and self.sampling.greedy:
            raise RequestError("best_of", "must be 1 without sampling (`do_sample`)", count)
        return count

    async def encode(self) -> pipeline.EncodedRequest:
        prompt = await pipeline.encode_text(self.engine, self._inputs, "inputs")
        if (count := self._parameters.truncate) is not None:
            if count < 1:
                raise RequestError("truncate", "must be an integer of at least 1", count)
            prompt = prompt[-count:]
        check_prompt_logprobs_size([prompt], self.sampling, "decoder_input_details", 1)
        return pipeline.EncodedRequest([prompt], self.sampling, self._output)


def _sampling(parameters: TGIParameters) -> SamplingParams:
    if parameters.temperature is not None:
        _TEMPERATURE.checked("temperature", parameters.temperature)
    max_new_tokens = DEFAULT_MAX_NEW_TOKENS if parameters.max_new_tokens is None else parameters.max_new_tokens
    samples = (
        parameters.do_sample
        or parameters.temperature not in (None, 1.0)
        or parameters.top_k not in (None, 0)
        or parameters.top_p not in (None, 1.0)
        or parameters.typical_p not in (None, 1.0)
    )
    if parameters.stop and parameters.stop_sequences and parameters.stop != parameters.stop_sequences:
        raise RequestError("stop_sequences", "is an older name of `stop`; give only one of them")
    return sampling_params(
        parameters,
        _FIELDS | {"stop": "stop" if parameters.stop else "stop_sequences"},
        max_tokens=max_new_tokens,
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if samples else 0.0,
        include_stop_str_in_output=True,
        logprobs=parameters.top_n_tokens or 0,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
    )


@dataclass(slots=True)
class _Sequence:
    texts: list[str]
    tokens: list[JsonObject] = field(default_factory=list)
    top_tokens: list[list[JsonObject]] = field(default_factory=list)
    details: JsonObject = field(default_factory=dict)

    @property
    def mean_logprob(self) -> float:
        logprobs: list[float] = [token["logprob"] for token in self.tokens]
        return sum(logprobs) / max(len(logprobs), 1)


@dataclass(eq=False)
class TGIBuilder(ResponseBuilder):
    tokenizer: Tokenizer
    inputs: str
    prompt: Sequence[int]
    parameters: TGIParameters
    sampling: SamplingParams
    as_list: bool
    """Whether a response that is not streamed is a list."""
    _num_events: int = 0
    _sequences: dict[int, _Sequence] = field(default_factory=dict)
    _prompt_logprobs: PromptLogprobs | None = None

    def _add(self, index: int, output: RequestOutput) -> tuple[list[JsonObject], list[list[JsonObject]]]:
        if (sequence := self._sequences.get(index)) is None:
            sequence = self._sequences[index] = _Sequence([self.inputs if self.parameters.return_full_text else ""])
        sequence.texts.append(output.text)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if output.finished:
            sequence.details = self._finish_details(index, output)
        return [self._token(*token) for token in token_outputs(output)], self._likely_tokens(output)

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        tokens, top_tokens = self._add(index, output)
        sequence, events = self._sequences[index], []
        for i, token in enumerate(tokens):
            self._num_events += 1
            content: JsonObject = {"index": self._num_events, "token": token}
            if self.parameters.top_n_tokens:
                content["top_tokens"] = top_tokens[i]
            is_last = output.finished and i == len(tokens) - 1
            content["generated_text"] = "".join(sequence.texts) if is_last else None
            content["details"] = sequence.details if is_last and self.parameters.details else None
            events.append(_event(content))
        return b"".join(events)

    def error_chunk(self, error: LLMServingError) -> bytes:
        return _event(tgi_error_content(error))

    def fold(self, index: int, output: RequestOutput) -> None:
        tokens, top_tokens = self._add(index, output)
        self._sequences[index].tokens += tokens
        self._sequences[index].top_tokens += top_tokens

    async def response(self, headers: dict[str, str]) -> Response:
        in_order = [self._sequences[index] for index in sorted(self._sequences)]
        best, *others = sorted(in_order, key=lambda sequence: -sequence.mean_logprob)
        whole: JsonObject = {"generated_text": "".join(best.texts)}
        if not (self.parameters.details or self.parameters.decoder_input_details):
            return json_response([whole] if self.as_list else whole, headers=headers)
        prefill = self._prefill() if self.parameters.decoder_input_details else []
        sequences = [{"generated_text": "".join(each.texts), **self._whole_details(each, prefill)} for each in others]
        whole["details"] = self._whole_details(best, prefill) | {"best_of_sequences": sequences or None}
        return await large_json_response([whole] if self.as_list else whole, headers)

    def _whole_details(self, sequence: _Sequence, prefill: list[JsonObject]) -> JsonObject:
        details = sequence.details | {"prefill": prefill, "tokens": sequence.tokens}
        return details | {"top_tokens": sequence.top_tokens} if self.parameters.top_n_tokens else details

    def _prefill(self) -> list[JsonObject]:
        values = [] if self._prompt_logprobs is None else self._prompt_logprobs.logprobs.tolist()
        logprobs = [None, *(max(value, MIN_LOGPROB) for value in values)]
        return [
            {"id": token_id, "text": self.tokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(self.prompt, logprobs, strict=True)
        ]

    def _token(self, token_id: int, logprob: float, text: str) -> JsonObject:
        """Return a token as JSON. `text`: the characters that it completes. With a `text`, `special` is false."""
        special = token_id in self.tokenizer.special_token_ids and not text
        return {
            "id": token_id,
            "text": self.tokenizer.token_text(token_id) if special else text,
            "logprob": logprob,
            "special": special,
        }

    def _likely_tokens(self, output: RequestOutput) -> list[list[JsonObject]]:
        special, text_of = self.tokenizer.special_token_ids, self.tokenizer.token_text
        return [
            [
                self._token(token_id, max(logprob, MIN_LOGPROB), "" if token_id in special else text_of(token_id))
                for token_id, logprob in zip(token.top_token_ids, token.top_logprobs, strict=True)
            ]
            for token in output.logprobs
        ]

    def _finish_details(self, index: int, output: RequestOutput) -> JsonObject:
        if output.finish_reason is not FinishReason.STOP:
            reason = "length"
        else:
            reason = "eos_token" if output.stop_reason is None else "stop_sequence"
        return {
            "finish_reason": reason,
            "generated_tokens": output.num_output_tokens,
            "seed": None if self.sampling.greedy else with_choice_seed(self.sampling, index).seed,
            "input_length": output.num_prompt_tokens,
        }


async def show_info(engine: AsyncEngine, http_request: Request) -> Response:
    config = engine.config
    return json_response(
        {
            "model_id": config.model.model_name,
            "model_sha": None,
            "model_dtype": config.model.model_dtype,
            "model_device_type": config.device.device_target.lower(),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": config.model.decode_batch_size + config.scheduler.max_waiting_queue,
            "max_best_of": MAX_N,
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


def _generation_endpoint(path: str, stream: bool | None, summary: str) -> Endpoint:
    handler = partial(_generate, stream=stream)
    return Endpoint("POST", path, handler, summary, body=TGIRequest, error_response=tgi_error_response)


ENDPOINTS: Final = (
    _generation_endpoint("/", None, "Continue a prompt (TGI), as a stream or as a list"),
    _generation_endpoint("/generate", False, "Continue a prompt (TGI)"),
    _generation_endpoint("/generate_stream", True, "Stream a continuation (TGI)"),
    Endpoint("GET", "/info", show_info, "Describe the served model (TGI)", error_response=tgi_error_response),
)
