"""The one path from a parsed request of any protocol to a running generation.

    claim the idempotency key -> prepare -> begin the receipt -> admission pre-check -> encode -> compile -> submit

Each protocol implements `ProtocolRequest`. Idempotent retries, resumed streams and request coalescing (`accepted`) and
receipts (`begin_receipt`) hook in here and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

from starlette.requests import Request

from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.generation.choices import ONE_CHOICE, Choices
from llm_serving.server.generation.generation import EngineInput, Generation, submit
from llm_serving.server.generation.precheck import PrecheckInput, precheck, within_deadline
from llm_serving.server.generation.structured_output import StructuredOutput, compile_constraint
from llm_serving.server.idempotency.lookup import ClaimedRequest, arrival
from llm_serving.server.idempotency.request import IdempotentRequest, SharingRules
from llm_serving.server.parsing.caller import HttpCaller, caller_of
from llm_serving.server.parsing.identity import ResponseIdentity, identify
from llm_serving.server.protocols.openai.schemas import CallerFields, GenerationRequest
from llm_serving.server.receipts import ReceiptDraftProtocol, begin_receipt
from llm_serving.text.structured_output import TokenConstraint

_NOT_REPEATABLE: Final = IdempotentRequest(SharingRules(joins_identical=False, grace_s=0.0), seeded=False)
"""The turn of a request that can be neither retried by its key nor resumed nor shared."""


class EncodedRequest(NamedTuple):
    """A request as token ids, before its structured output has been compiled."""

    prompts: list[list[int]]
    sampling: SamplingParams
    """Sampling of the first choice of every prompt."""
    structured_output: StructuredOutput | None = None


class ProtocolRequest(ABC):
    """One request in the terms of its protocol: the steps of the pipeline in which protocols differ.

    Args:
        engine: Generates.
        http_request: The request as received.
        bodies: The body, and parts of it that may hold the fields of the caller too.
    """

    id_prefix = ""
    """Put before the request id to form the id of the response."""
    route: ClassVar[str] = ""
    """Of a protocol whose requests can be retried, resumed and shared: its path. Others have none."""
    wants_vectors: ClassVar[bool] = False
    """Whether the engine is to return the vectors of the prompts."""

    def __init__(self, engine: AsyncEngine, http_request: Request, *bodies: CallerFields) -> None:
        self.engine = engine
        self.http_request = http_request
        self.body = bodies[0]
        self.caller: HttpCaller = caller_of(engine.config, http_request, *bodies)
        self.choices: Choices = ONE_CHOICE
        self.num_prompts = 1

    @abstractmethod
    async def prepare(self) -> PrecheckInput:
        """Check everything that needs no tokenizer. By now the body has the seed of the request that it repeats."""

    @abstractmethod
    async def encode(self) -> EncodedRequest:
        """Tokenize the prompts and check what depends on their lengths; cancelled when the deadline passes."""

    def translate_error(self, error: RequestError) -> RequestError:
        """Return an error of the pipeline by the protocol's own field names."""
        return error


class StartedGeneration(NamedTuple):
    """A running generation and what its response needs to know of the request."""

    generation: Generation
    identity: ResponseIdentity
    turn: IdempotentRequest
    prompts: Sequence[list[int]]
    """Token ids."""
    receipt: ReceiptDraftProtocol | None


async def start_generation(request: ProtocolRequest) -> StartedGeneration:
    """Take a request through all steps of the pipeline.

    Raises:
        LLMServingError: The request breaks a rule, or the engine refuses it.
    """
    engine, caller = request.engine, request.caller
    try:
        async with _identified(request) as (identity, turn):
            check = await request.prepare()
            receipt = await _receipt(request, identity)
            await precheck(engine, caller, check, known=turn.known)
            inputs = await within_deadline(caller.deadline, engine.clock, _engine_input(request))
            generation = await submit(
                engine,
                caller,
                inputs,
                request_id=identity.request_id,
                choices=request.choices,
                field_names=check.field_names,
                turn=turn,
                receipt=receipt,
            )
    except RequestError as error:
        raise request.translate_error(error) from None
    return StartedGeneration(generation, identity, turn, inputs.prompts, receipt)


@asynccontextmanager
async def _identified(request: ProtocolRequest) -> AsyncIterator[ClaimedRequest]:
    """Yield the identity of the response; no other request gets the same Idempotency-Key until the context ends."""
    engine, http_request, body, prefix = request.engine, request.http_request, request.body, request.id_prefix
    if not (request.route and isinstance(body, GenerationRequest)):
        yield ClaimedRequest(identify(engine, http_request, getattr(body, "request_id", None), prefix), _NOT_REPEATABLE)
        return
    num_streams = request.choices.n * request.num_prompts
    async with arrival(
        engine, http_request, body, request.caller, route=request.route, prefix=prefix, num_streams=num_streams
    ) as arrived:
        yield arrived


async def _receipt(request: ProtocolRequest, identity: ResponseIdentity) -> ReceiptDraftProtocol | None:
    if not isinstance(request.body, GenerationRequest):
        return None
    return await begin_receipt(request.engine, request.http_request, request.body, identity.id, identity.created)


async def _engine_input(request: ProtocolRequest) -> EngineInput:
    encoded = await request.encode()
    sampling, output = encoded.sampling, encoded.structured_output
    constraint: TokenConstraint | None = None
    if output is not None:
        constraint = await compile_constraint(request.engine, output, request.caller.source)
        sampling = replace(sampling, constraint=constraint.grammar.text)
    return EngineInput(encoded.prompts, sampling, constraint, request.wants_vectors)
