"""The single path from a parsed request of any protocol to a running generation.

claim the idempotency key -> check fields (prepare) -> begin the receipt, a verifiable record of the response ->
admission pre-check -> tokenize (encode) -> compile the grammar -> submit to the engine
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast

from msgspec import structs
from starlette.requests import Request

from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.generation.generation import NO_RENAMES, Generation, run_until_client_leaves, submit
from llm_serving.server.generation.sampling import ONE_CHOICE, Choices
from llm_serving.server.generation.structured_output import StructuredOutput, compile_constraint
from llm_serving.server.idempotency.request import EVENT_HEADER, KEY_HEADER, IdempotentRequest, claim_request
from llm_serving.server.parsing.caller import HttpCaller, caller_of, within_deadline
from llm_serving.server.parsing.headers import ResponseIdentity, identify
from llm_serving.server.parsing.offload import INLINE_ITEMS, off_loop
from llm_serving.server.protocols.openai.schemas import CallerFields, GenerationRequest
from llm_serving.server.receipts import ReceiptDraftProtocol, ReceiptHook
from llm_serving.server.request_context import request_context_of

INLINE_CHARS: Final = 4096
"""Maximum number of characters tokenized on the event loop. For so few, a thread would cost more than it saves."""
CALL_CHARS: Final = 64
"""Number of characters whose tokenization takes as long as a call of the tokenizer."""
BYTES_PER_CHAR: Final = 4
MAX_SPECIAL_TOKENS: Final = 4
_RETRY_HEADERS: Final = frozenset((KEY_HEADER.encode(), EVENT_HEADER.encode()))

T = TypeVar("T")
PromptField = str | list[str | int | list[int]]
Prompt = str | list[int]


class PrecheckInput(NamedTuple):
    prompts: Sequence[Prompt]
    max_tokens: int
    field_names: Mapping[str, str] = NO_RENAMES
    """Field name in errors of the engine -> field name in the protocol."""
    num_choices: int = 1
    template_factor: int = 1
    """Maximum number of prompt bytes that the chat template produces for one byte of the text."""
    truncates: bool = False


class EncodedRequest(NamedTuple):
    prompts: list[list[int]]
    sampling: SamplingParams
    structured_output: StructuredOutput | None = None


class ProtocolRequest(ABC):
    """A request of one protocol. `bodies`: the parsed body, then nested objects that may have fields such as `user`."""

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
        if adapters := engine.adapters.by_name:
            names: list[Any] = [getattr(body, field, None) for body in bodies for field in ("adapter_id", "model")]
            names.append(http_request.path_params.get("name"))  # the name in the URL of an older route
            if (found := next((adapters[name] for name in names if name in adapters), None)) is not None:
                self.caller, self.adapter = structs.replace(self.caller, adapter=found.number), found
        self.choices: Choices = ONE_CHOICE
        self.num_prompts = 1

    @abstractmethod
    async def prepare(self) -> PrecheckInput:
        """Check all fields that need no tokenizer. The pipeline has set the seed of a request that can be retried."""

    @abstractmethod
    async def encode(self) -> EncodedRequest:
        """Tokenize the prompts and check their lengths. The pipeline cancels the call at the request's deadline."""

    def translate_error(self, error: RequestError) -> RequestError:
        return error


class StartedGeneration(NamedTuple):
    generation: Generation
    identity: ResponseIdentity
    idempotent: IdempotentRequest | None
    """None if the request cannot be retried by its key, resumed or coalesced."""
    prompts: Sequence[list[int]]
    receipt: ReceiptDraftProtocol | None


async def start_generation(request: ProtocolRequest) -> StartedGeneration:
    """Wait while the model is paused or asleep. Then check, tokenize, admit and submit the request."""
    engine, http_request, body = request.engine, request.http_request, request.body
    serving = engine.config.serving
    may_be_shared = serving.coalesce_identical_requests or serving.resume_streams
    try:
        if (gate := engine.lifecycle.gate) is not None:
            waiting = within_deadline(request.caller.deadline, engine.clock, gate.enter())
            await run_until_client_leaves(http_request.receive, waiting)
        may_be_retried = may_be_shared or not _RETRY_HEADERS.isdisjoint(request_context_of(http_request).headers)
        if not (may_be_retried and request.route and isinstance(body, GenerationRequest)):
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
        identity = identity._replace(model=request.adapter.name)
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
    if receipt is not None:
        receipt.begin(encoded.prompts, sampling, request.choices)
    generation = await submit(
        engine,
        caller,
        encoded.prompts,
        sampling,
        request_id=identity.request_id,
        constraint=constraint,
        wants_vectors=request.wants_vectors,
        choices=request.choices,
        field_names=check.field_names,
        idempotent=idempotent,
    )
    return StartedGeneration(generation, identity, idempotent, encoded.prompts, receipt)


def precheck(engine: AsyncEngine, caller: HttpCaller, request: PrecheckInput) -> None:
    """Refuse a request before tokenization if admission control would refuse even the fewest tokens its prompts can
    have. Raise CapacityError, UnavailableError if no WorkAgent is ready, or RequestError if it can never be admitted.
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


async def read_prompts(value: PromptField, field: str, max_count: int, noun: str) -> list[Prompt]:
    """Return the prompts in the value of a field. Raise RequestError if the field has no prompts, prompts of different
    types, or more than `max_count`. `noun` is the word for prompts in the error message.
    """
    if isinstance(value, str):
        return [value]
    return await off_loop(len(value) > INLINE_ITEMS, lambda: _split(value, field, max_count, noun))


def _split(value: list[str | int | list[int]], field: str, max_count: int, noun: str) -> list[Prompt]:
    kinds = set(map(type, value))
    if len(kinds) != 1:
        raise RequestError(field, "must be a text, a list of texts, token ids or a list of lists of token ids")
    if kinds == {int}:
        return [cast(list[int], value.copy())]
    if len(value) > max_count:
        raise RequestError(field, f"must hold at most {max_count} {noun}", len(value))
    return cast(list[Prompt], value.copy())


async def encode_text(engine: AsyncEngine, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
    [token_ids] = await encode_prompts(engine, [text], field, add_special_tokens)
    return token_ids


async def encode_prompts(
    engine: AsyncEngine, prompts: Sequence[Prompt], field: str, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt. Raise ContextLengthError for a text that `check_length` finds too long."""
    cost = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(engine, prompt, field)
            cost += len(prompt) + CALL_CHARS
    return await tokenized(cost > INLINE_CHARS, partial(_encode_all, engine, prompts, add_special_tokens), field)


async def tokenized(is_long: bool, work: Callable[[], T], field: str) -> T:
    """Return the result of `work`, which calls the tokenizer. Errors about `prompt` name `field` instead."""
    try:
        return await off_loop(is_long, work)
    except RequestError as error:
        raise error.renamed_by({"prompt": field}) from None


def _encode_all(engine: AsyncEngine, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[list[int]]:
    encode = engine.tokenizer.encode
    return [encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts]


def check_length(engine: AsyncEngine, text: str, field: str, least_chars: int = 0) -> None:
    """Raise ContextLengthError if a text has too many characters for `max_input_len` tokens, and over `least_chars`."""
    max_chars = max(engine.config.model.max_input_len * engine.tokenizer.max_token_chars, least_chars)
    if len(text) > max_chars:
        rule = f"must be at most {engine.config.model.max_input_len} tokens long, which {max_chars} characters exceed"
        raise ContextLengthError(field, rule, len(text))


def truncate_prompt(engine: AsyncEngine, prompt: list[int], count: int | None, max_tokens: int) -> list[int]:
    """Return the last `count` token ids of a prompt. If `count` is -1, return as many as leave room for `max_tokens`
    output tokens. If it is None, return all. Raise RequestError for any other `count` below 1.
    """
    if count is None:
        return prompt
    if count == -1:
        count = max(1, min(engine.config.model.max_input_len, engine.max_model_len - max_tokens))
    elif count < 1:
        raise RequestError("truncate_prompt_tokens", "must be -1 or an integer of at least 1", count)
    return prompt[-count:]
