"""The single path from a parsed request of any protocol to a running generation.

claim the idempotency key -> prepare -> begin the receipt -> admission pre-check -> encode -> compile -> submit
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

from starlette.requests import Request

from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.generation.choices import ONE_CHOICE, Choices
from llm_serving.server.generation.generation import (
    NO_RENAMES,
    EngineInput,
    Generation,
    run_until_client_leaves,
    submit,
)
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.generation.structured_output import StructuredOutput, compile_constraint
from llm_serving.server.idempotency.lookup import EVENT_HEADER, KEY_HEADER, claim_request
from llm_serving.server.idempotency.request import IdempotentRequest
from llm_serving.server.parsing.adapters import adapter_of
from llm_serving.server.parsing.caller import HttpCaller, caller_of, within_deadline
from llm_serving.server.parsing.headers import ResponseIdentity, identify
from llm_serving.server.protocols.openai.schemas import CallerFields, GenerationRequest
from llm_serving.server.receipts import ReceiptDraftProtocol, ReceiptHook

BYTES_PER_CHAR: Final = 4
MAX_SPECIAL_TOKENS: Final = 4
"""Maximum number of special tokens that a tokenizer adds to a text."""


class PrecheckInput(NamedTuple):
    """A request with valid parameters, before its prompts are tokenized."""

    prompts: Sequence[Prompt]
    max_tokens: int
    """Number of output tokens for which each prompt must leave room."""
    field_names: Mapping[str, str] = NO_RENAMES
    """Field in errors of the engine -> the protocol's name."""
    num_choices: int = 1
    template_factor: int = 1
    """Maximum number of prompt bytes that the chat template produces for one byte of the text."""
    truncates: bool = False


class EncodedRequest(NamedTuple):
    """A request as token ids, before its structured output is compiled."""

    prompts: list[list[int]]
    sampling: SamplingParams
    structured_output: StructuredOutput | None = None


class ProtocolRequest(ABC):
    """A request of one protocol, which implements the protocol's own steps of the pipeline.

    `bodies`: the request body, then nested objects that may also have fields of `CallerFields`.
    """

    id_prefix = ""
    route: ClassVar[str] = ""
    """Path of the route if its requests can be retried, resumed and coalesced, else empty."""
    wants_vectors: ClassVar[bool] = False

    def __init__(self, engine: AsyncEngine, http_request: Request, *bodies: CallerFields) -> None:
        self.engine = engine
        self.http_request = http_request
        self.body = bodies[0]
        self.caller: HttpCaller = caller_of(engine.config, http_request, *bodies)
        self.adapter: Adapter | None = None
        """The adapter that answers; None: the base model answers."""
        if (adapters := engine.adapters.by_name) and (found := adapter_of(adapters, http_request, bodies)) is not None:
            self.caller, self.adapter = replace(self.caller, adapter=found.number), found
        self.choices: Choices = ONE_CHOICE
        self.num_prompts = 1

    @abstractmethod
    async def prepare(self) -> PrecheckInput:
        """Check all fields that need no tokenizer. If the request is a retry, its body already contains the seed."""

    @abstractmethod
    async def encode(self) -> EncodedRequest:
        """Tokenize the prompts and check their lengths. The pipeline cancels this at the deadline."""

    def translate_error(self, error: RequestError) -> RequestError:
        return error


class StartedGeneration(NamedTuple):
    """A running generation, and the data of the request that its response needs."""

    generation: Generation
    identity: ResponseIdentity
    idempotent: IdempotentRequest | None
    """Handles retries of the request; None: it cannot be retried by its key, resumed or coalesced."""
    prompts: Sequence[list[int]]
    receipt: ReceiptDraftProtocol | None


async def start_generation(request: ProtocolRequest) -> StartedGeneration:
    """Run all steps of the pipeline.

    Raises:
        LLMServingError: The request is invalid, or the engine refuses it.
        ClientGoneError: The client disconnects while the model pauses or sleeps.
    """
    engine, http_request, body = request.engine, request.http_request, request.body
    serving, headers = engine.config.serving, http_request.headers
    may_be_shared = serving.coalesce_identical_requests or serving.resume_streams
    try:
        if (gate := engine.lifecycle.gate) is not None:
            waiting = within_deadline(request.caller.deadline, engine.clock, gate.enter())
            await run_until_client_leaves(http_request.receive, waiting)
        if not (may_be_shared or KEY_HEADER in headers or EVENT_HEADER in headers) or not (
            request.route and isinstance(body, GenerationRequest)
        ):
            identity = identify(engine, http_request, getattr(body, "request_id", None), request.id_prefix)
            return await _start(request, identity, None)
        async with claim_request(
            engine,
            http_request,
            body,
            request.caller,
            route=request.route,
            prefix=request.id_prefix,
            num_streams=request.choices.n * request.num_prompts,
        ) as (identity, idempotent):
            return await _start(request, identity, idempotent)
    except RequestError as error:
        raise request.translate_error(error) from None


async def _start(
    request: ProtocolRequest, identity: ResponseIdentity, idempotent: IdempotentRequest | None
) -> StartedGeneration:
    engine, caller, body = request.engine, request.caller, request.body
    if request.adapter is not None:
        identity = replace(identity, model=request.adapter.name)
    check = await request.prepare()
    receipt: ReceiptDraftProtocol | None = None
    if isinstance(body, GenerationRequest) and body.receipt:
        hook: ReceiptHook = request.http_request.app.receipts
        receipt = await hook.start_receipt(engine, identity.id, identity.created, request.adapter)
    if idempotent is None or not idempotent.known:
        precheck(engine, caller, check)
    encoded = await within_deadline(caller.deadline, engine.clock, request.encode())
    sampling, constraint = encoded.sampling, None
    if (output := encoded.structured_output) is not None:
        work = compile_constraint(engine, output, caller.source)
        constraint = await within_deadline(caller.deadline, engine.clock, work)
        sampling = replace(sampling, constraint=constraint.grammar.text)
    generation = await submit(
        engine,
        caller,
        EngineInput(encoded.prompts, sampling, constraint, request.wants_vectors),
        request_id=identity.request_id,
        choices=request.choices,
        field_names=check.field_names,
        idempotent=idempotent,
        receipt=receipt,
    )
    return StartedGeneration(generation, identity, idempotent, encoded.prompts, receipt)


def precheck(engine: AsyncEngine, caller: HttpCaller, request: PrecheckInput) -> None:
    """Refuse a request early if admission control would refuse it for any number of prompt tokens.

    Raises:
        CapacityError: It cannot be admitted now.
        UnavailableError: No WorkAgent is ready.
        RequestError: It can never be admitted.
    """
    max_prompt, max_total = engine.config.model.max_input_len, engine.max_model_len
    min_lens = []
    for prompt in request.prompts:
        low = high = len(prompt)
        if isinstance(prompt, str):
            num_bytes = len(prompt) if prompt.isascii() else BYTES_PER_CHAR * len(prompt)
            low = max(1, len(prompt) // engine.tokenizer.max_token_chars)
            high = request.template_factor * num_bytes + MAX_SPECIAL_TOKENS
        if not request.truncates and (high > max_prompt or high + request.max_tokens >= max_total):
            return
        min_lens.append(1 if request.truncates else low)
    try:
        engine.precheck_capacity(min_lens * request.num_choices, caller)
    except RequestError as error:
        raise error.renamed_by(request.field_names) from None
