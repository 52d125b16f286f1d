"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import Final

from msgspec import Raw, json
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.step import Float32Array
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.off_loop import INLINE_ITEMS, large_json_response, off_loop
from llm_serving.server.parameters import read_fields
from llm_serving.server.prompt_items import prompt_items
from llm_serving.server.vector_schemas import Embedding, Embeddings, EmbeddingsRequest
from llm_serving.server.vectors import MAX_INPUTS, normalised, read_vectors

FORMATS: Final = ("float", "base64")
MAX_VALUES: Final = 2**22
"""Numbers of one answer; some 20 bytes of JSON each."""


async def create_embeddings(engine: AsyncEngine, http_request: Request) -> Response:
    """The vectors of one or several texts."""
    request = await read_fields(engine, http_request, EmbeddingsRequest)
    if request.encoding_format not in (None, *FORMATS):
        raise RequestError("encoding_format", f"must be {' or '.join(FORMATS)}", request.encoding_format)
    texts = await prompt_items(request.input, "input", MAX_INPUTS, "texts")
    hidden = engine.model_spec.network.hidden
    size = hidden if request.dimensions is None else request.dimensions
    if not 1 <= size <= hidden:
        raise RequestError("dimensions", f"must be an integer from 1 to {hidden}", size)
    if size * len(texts) > MAX_VALUES:
        raise RequestError("input", f"times the dimensions, {size}, must be at most {MAX_VALUES} numbers", len(texts))
    place = "input" if len(texts) == 1 else "input[{}]"
    identity, vectors = await read_vectors(
        engine,
        http_request,
        request,
        texts,
        place.format,
        prefix="embd",
        add_special_tokens=request.add_special_tokens is not False,
    )
    pooling = engine.pooling
    assert pooling is not None
    normalises = pooling.normalises if request.normalize is None else request.normalize
    write = partial(_written, size=size, normalises=normalises, as_base64=request.encoding_format == "base64")

    def written() -> list[Embedding]:
        return [Embedding(index=i, embedding=write(vector)) for i, vector in enumerate(vectors.of_texts)]

    answer = Embeddings(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        data=await off_loop(size * len(texts) > INLINE_ITEMS, written),
        usage=vectors.usage,
    )
    return await large_json_response(answer, vectors.headers)


def _written(vector: Float32Array, size: int, normalises: bool, as_base64: bool) -> Raw:
    vector = vector[:size]
    if normalises:
        vector = normalised(vector)
    return Raw(json.encode(base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()))


ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        "Texts as vectors",
        body=EmbeddingsRequest,
        answer=Embeddings,
    ),
)
