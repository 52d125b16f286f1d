"""POST /v1/embeddings. Computes vectors of texts, and of pairs of a query and a document, also for other routes."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Raw, json
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.admission.validation import check_token_ids
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import Float32Array
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation import pipeline
from llm_serving.server.generation.generation import Generation, raise_unless_complete
from llm_serving.server.generation.response import complete_whole
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.headers import ResponseIdentity
from llm_serving.server.parsing.offload import INLINE_ITEMS, large_json_response, off_loop
from llm_serving.server.protocols.openai.vector_schemas import (
    EmbeddingItem,
    Embeddings,
    EmbeddingsRequest,
    ListOfResults,
    TokensUsage,
    VectorRequest,
)
from llm_serving.text.tokenizer.tokenizer import Tokenizer

MAX_INPUTS: Final = 2048
"""OpenAI's limit of texts in one request."""
COUNTED_CHARS: Final = 2**18
"""Maximum characters of a text that is tokenized, which takes a second, even if it seems too long for the model. The
request may truncate it, or an encoder may replace a long unknown word by one token.
"""
_DOCUMENT_ROLE: Final = re.compile(r"\"document\"|'document'")
_PROMPT_ONLY: Final = SamplingParams(max_tokens=0)
FORMATS: Final = ("float", "base64")
MAX_VALUES: Final = 2**22
"""Maximum number of values in a response; each takes about 20 bytes of JSON."""

ENDPOINTS: Final = Endpoints()


class TextPair(NamedTuple):
    query: str
    document: str
    max_document_tokens: int | None = None
    """None if there is no limit."""


class TextInput(NamedTuple):
    field: str
    """Name of the request field that holds the text, for error messages."""
    content: pipeline.Prompt | TextPair
    max_tokens: int | None
    """None if there is no limit, -1 for as many as the model's context holds."""

    @property
    def text(self) -> pipeline.Prompt:
        return self.content.query + self.content.document if isinstance(self.content, TextPair) else self.content


class TextVectors(NamedTuple):
    identity: ResponseIdentity
    vectors: list[Float32Array]
    """[hidden size] each: the hidden state that is the input of the LM head."""
    usage: TokensUsage
    headers: dict[str, str]

    async def response(self, kind: type[ListOfResults], **fields: Any) -> Response:
        identity = self.identity
        whole = kind(id=identity.id, created=identity.created, model=identity.model, usage=self.usage, **fields)
        return await large_json_response(whole, self.headers)


async def compute_vectors(
    engine: AsyncEngine,
    http_request: Request,
    body: VectorRequest,
    inputs: Sequence[TextInput],
    *,
    prefix: str,
    add_special_tokens: bool = True,
) -> TextVectors:
    """Embed each text, or score each pair. The response id begins with `prefix`. Raise LLMServingError if the model has
    no pooling or a text is refused.
    """
    if engine.pooling is None:
        rule = "must produce embeddings: serve an embedding model, or set `model_config.pooling: last`"
        raise RequestError("model", rule)
    request = _TextsRequest(engine, http_request, body)
    request.id_prefix, request.inputs, request.add_special_tokens = prefix, inputs, add_special_tokens
    started = await pipeline.start_generation(request)
    generation, num_tokens = started.generation, sum(map(len, started.prompts))
    headers = started.identity.headers | generation.headers
    vectors = await complete_whole(http_request, generation, _collect(generation, len(inputs)))
    return TextVectors(started.identity, vectors, TokensUsage(num_tokens, num_tokens), headers)


class _TextsRequest(pipeline.ProtocolRequest):
    wants_vectors = True

    inputs: Sequence[TextInput]
    add_special_tokens: bool

    async def prepare(self) -> pipeline.PrecheckInput:
        field = self.inputs[-1].field.partition("[")[0]
        truncates = any(each.max_tokens is not None for each in self.inputs)
        texts = [each.text for each in self.inputs]
        return pipeline.PrecheckInput(texts, 0, {"prompt": field, "n": field}, truncates=truncates)

    async def encode(self) -> pipeline.EncodedRequest:
        engine, inputs = self.engine, self.inputs
        prompts = await _encode(engine, inputs, self.add_special_tokens)
        num_tokens, spec = sum(map(len, prompts)), engine.model_spec
        num_ids = spec.network.num_input_ids if isinstance(inputs[0].content, TextPair) else spec.vocab_size
        await off_loop(num_tokens > INLINE_ITEMS, lambda: _check_lengths(engine, prompts, inputs, num_ids))
        return pipeline.EncodedRequest(prompts, _PROMPT_ONLY)


def normalised(vector: Float32Array) -> Float32Array:
    """Return a vector [H] divided by its length. Return a zero vector unchanged."""
    length = math.sqrt(_product(vector, vector))
    return vector if length == 0.0 else (vector.astype(np.float64) / length).astype(np.float32)


def cosine(first: Float32Array, second: Float32Array) -> float:
    """Return the cosine similarity of two vectors [H], from -1 to 1. Return 0 if a vector is zero."""
    lengths = math.sqrt(_product(first, first) * _product(second, second))
    return 0.0 if lengths == 0.0 else max(-1.0, min(1.0, _product(first, second) / lengths))


def _product(first: Float32Array, second: Float32Array) -> float:
    """Return the dot product, rounded once: float64 holds products of float32 exactly, and `fsum` adds exactly."""
    return math.fsum((first.astype(np.float64) * second.astype(np.float64)).tolist())


async def _collect(generation: Generation, count: int) -> list[Float32Array]:
    vectors: dict[int, Float32Array] = {}
    async for index, output in generation.outputs():
        raise_unless_complete(output)
        if output.vector is not None:
            vectors[index] = output.vector
    return [vectors[index] for index in range(count)]


async def _encode(engine: AsyncEngine, inputs: Sequence[TextInput], add_special_tokens: bool) -> list[list[int]]:
    most = min(engine.config.model.max_input_len, engine.max_model_len)
    cost = 0
    for each in inputs:
        if each.max_tokens is not None and each.max_tokens != -1 and each.max_tokens < 1:
            raise RequestError("truncate_prompt_tokens", "must be -1 or an integer of at least 1", each.max_tokens)
        if isinstance(written := each.text, str):
            pipeline.check_length(engine, written, each.field, COUNTED_CHARS)
            cost += len(written) + pipeline.CALL_CHARS

    def encode() -> list[list[int]]:
        encoder = engine.tokenizer.encode
        prompts = []
        for _, text, limit in inputs:
            count = most if limit == -1 else limit
            if isinstance(text, TextPair):
                prompts.append(encode_pair(engine, text, count))
                continue
            ids = encoder(text, add_special_tokens) if isinstance(text, str) else text
            if count is not None and len(ids) > count:
                ending = _ending(ids, encoder(text, False)) if isinstance(text, str) else []
                ending = ending[-count:]
                ids = [*ids[: count - len(ending)], *ending]
            prompts.append(ids)
        return prompts

    is_long = cost > pipeline.INLINE_CHARS or len(inputs) > INLINE_ITEMS
    return await pipeline.tokenized(is_long, encode, inputs[-1].field.partition("[")[0])


def _ending(ids: list[int], of_text: list[int]) -> list[int]:
    """Return the special tokens in `ids` after `of_text`. Truncation keeps them, as many models pool the last token."""
    num_around = len(ids) - len(of_text)
    before = next(
        (count for count in range(num_around + 1) if ids[count : count + len(of_text)] == of_text), num_around
    )
    return ids[before + len(of_text) :]


def _check_lengths(
    engine: AsyncEngine, prompts: Sequence[list[int]], inputs: Sequence[TextInput], num_ids: int
) -> None:
    """Raise RequestError, which names the field, if a text is empty or too long, or a token id is `num_ids` or more."""
    most = min(engine.config.model.max_input_len, engine.max_model_len)
    for prompt, (field, _, _) in zip(prompts, inputs, strict=True):
        if not prompt:
            raise RequestError(field, "must hold at least one token", 0)
        if len(prompt) > most:
            rule = f"must be at most {most} tokens long; `truncate_prompt_tokens` cuts it"
            raise ContextLengthError(field, rule, len(prompt))
        check_token_ids(field, prompt, num_ids)


@ENDPOINTS.add("POST", "/v1/embeddings", "Compute the embeddings of texts", body=EmbeddingsRequest, answer=Embeddings)
async def create_embeddings(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, EmbeddingsRequest)
    if body.encoding_format not in (None, *FORMATS):
        raise RequestError("encoding_format", f"must be {' or '.join(FORMATS)}", body.encoding_format)
    texts = await pipeline.read_prompts(body.input, "input", MAX_INPUTS, "texts")
    if engine.pooling is not None and engine.pooling.scores:
        raise RequestError("model", "is a reranker, which has no embeddings: use /v1/score or /rerank")
    hidden = engine.model_spec.network.hidden
    size = hidden if body.dimensions is None else body.dimensions
    if not 1 <= size <= hidden:
        raise RequestError("dimensions", f"must be an integer from 1 to {hidden}", size)
    if size * len(texts) > MAX_VALUES:
        rule = f"must hold at most {MAX_VALUES // size} texts if an embedding has {size} dimensions"
        raise RequestError("input", rule, len(texts))
    field = "input" if len(texts) == 1 else "input[{}]"
    inputs = [TextInput(field.format(i), text, body.truncate_prompt_tokens) for i, text in enumerate(texts)]
    adds_special = body.add_special_tokens is not False
    computed = await compute_vectors(engine, http_request, body, inputs, prefix="embd", add_special_tokens=adds_special)
    pooling = engine.pooling
    assert pooling is not None
    normalises = pooling.normalises if body.normalize is None else body.normalize
    write = partial(_encode_vector, size=size, normalises=normalises, as_base64=body.encoding_format == "base64")

    def encode_all() -> list[EmbeddingItem]:
        return [EmbeddingItem(index=i, embedding=write(vector)) for i, vector in enumerate(computed.vectors)]

    return await computed.response(Embeddings, data=await off_loop(size * len(texts) > INLINE_ITEMS, encode_all))


def _encode_vector(vector: Float32Array, size: int, normalises: bool, as_base64: bool) -> Raw:
    vector = vector[:size]
    if normalises:
        vector = normalised(vector)
    return Raw(json.encode(base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()))


def encode_pair(engine: AsyncEngine, pair: TextPair, max_tokens: int | None) -> list[int]:
    """Return the token ids of a pair, cut to `max_tokens`. An encoder model reads both texts with the special tokens of
    its tokenizer. A decoder model reads a text that a template renders from them: its chat template if that mentions a
    role `document`, else `Pooling.pair_template`. Raise RequestError if the chat template rejects the pair, or if
    `max_tokens` is below the number of tokens that are never cut, such as those of the template.
    """
    pooling, tokenizer = engine.pooling, engine.tokenizer
    assert pooling is not None
    if pair.max_document_tokens is not None:
        pair = pair._replace(document=_cut(tokenizer, pair.document, pair.max_document_tokens))
    template = None if not engine.model_spec.network.causal else pooling.pair_template
    by_chat_template = engine.model_spec.network.causal and bool(_DOCUMENT_ROLE.search(tokenizer.chat_template()))
    if template is None and not by_chat_template:
        ids, types = tokenizer.encode_pair(pair.query, pair.document, max_tokens)
        _check_room(len(ids), max_tokens)
        network = engine.model_spec.network
        num_types = network.num_input_ids // network.vocab
        return [id_ + min(type_, num_types - 1) * network.vocab for id_, type_ in zip(ids, types, strict=True)]

    def encode(document: str) -> list[int]:
        if by_chat_template:
            roles = {"query": pair.query, "document": document}
            text = tokenizer.apply_chat_template([{"role": role, "content": each} for role, each in roles.items()])
        else:
            assert template is not None
            written = pair.query.startswith(template.partition("{")[0])  # the client has applied the template
            text = pair.query + document if written else template.format(query=pair.query, document=document)
        return tokenizer.encode(text, add_special_tokens=False)

    ids = encode(pair.document)
    if max_tokens is not None and len(ids) > max_tokens:
        num_left = len(tokenizer.encode(pair.document, add_special_tokens=False)) - (len(ids) - max_tokens)
        _check_room(max_tokens - num_left, max_tokens)
        ids = encode(_cut(tokenizer, pair.document, num_left))
    return ids


def score_of(vector: Float32Array, *, applies_sigmoid: bool) -> float:
    raw = float(vector[0])
    if not applies_sigmoid:
        return raw
    return 1 / (1 + math.exp(-raw)) if raw >= 0 else math.exp(raw) / (1 + math.exp(raw))


def _check_room(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        rule = f"must be at least {num_tokens}, the number of tokens of this pair that are never cut"
        raise RequestError("truncate_prompt_tokens", rule, max_tokens)


def _cut(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= max_tokens else tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)
