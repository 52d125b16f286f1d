"""Routes /v1/score (vLLM), /rerank, /v1/rerank, /v2/rerank: reranker scores, or cosine similarities of embeddings."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.offload import large_json_response, off_loop
from llm_serving.server.protocols.openai.embeddings import (
    MAX_INPUTS,
    TextInput,
    TextPair,
    TextVectors,
    compute_vectors,
    cosine,
    score_of,
)
from llm_serving.server.protocols.openai.vector_schemas import (
    PairsRequest,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    TextDocument,
)

_INLINE_PAIRS: Final = 2
_NAMES: Final = (("text_1", "text_2"), ("queries", "documents"))

ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add("POST", "/v1/score", "Compute the similarity of texts", body=ScoreRequest, answer=ScoreList)
async def create_scores(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, ScoreRequest)
    sides = _sides(body)
    (first_name, first), (second_name, second) = sides
    if len(first) not in (1, len(second)):
        rule = f"must hold one text, or as many as `{second_name}`, {len(second)}"
        raise RequestError(first_name, rule, len(first))
    _check_count(second_name, len(second))

    limit = body.truncate_prompt_tokens
    if _is_reranker(engine):
        pairs = [TextPair(first[i % len(first)], each) for i, each in enumerate(second)]
        inputs = [TextInput(f"{second_name}[{i}]", pair, limit) for i, pair in enumerate(pairs)]
    else:
        inputs = [TextInput(f"{name}[{i}]", text, limit) for name, texts in sides for i, text in enumerate(texts)]
    computed = await compute_vectors(engine, http_request, body, inputs, prefix="score")
    scores = await _scores(engine, body, computed, len(first))
    data = [Score(index=index, score=score) for index, score in enumerate(scores)]
    return await computed.response(ScoreList, data=data)


@ENDPOINTS.add(
    "POST",
    ("/rerank", "/v1/rerank", "/v2/rerank"),
    "Rank documents by similarity to a query",
    body=RerankRequest,
    answer=Ranking,
)
async def create_ranking(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, RerankRequest)
    _check_count("documents", len(body.documents))
    if body.top_n is not None and body.top_n < 0:
        raise RequestError("top_n", "must be an integer of at least 0", body.top_n)
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < 1:
        raise RequestError("max_tokens_per_doc", "must be an integer of at least 1", body.max_tokens_per_doc)
    texts = [each.text if isinstance(each, TextDocument) else each for each in body.documents]
    default = body.truncate_prompt_tokens
    of_document = default if body.max_tokens_per_doc is None else body.max_tokens_per_doc
    if _is_reranker(engine):
        pairs = [TextPair(body.query, text, body.max_tokens_per_doc) for text in texts]
        inputs = [TextInput(f"documents[{i}]", pair, default) for i, pair in enumerate(pairs)]
    else:
        documents = [TextInput(f"documents[{i}]", text, of_document) for i, text in enumerate(texts)]
        inputs = [TextInput("query", body.query, default), *documents]
    computed = await compute_vectors(engine, http_request, body, inputs, prefix="rerank")
    scores = await _scores(engine, body, computed, 1)
    identity = computed.identity
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    shown = body.return_documents is not False
    results = [
        RankedDocument(
            index=index, document=TextDocument(texts[index]) if shown else UNSET, relevance_score=scores[index]
        )
        for index in order[: body.top_n or None]
    ]
    response = Ranking(id=identity.id, model=identity.model, results=results, usage=computed.usage)
    return await large_json_response(response, computed.headers)


def _sides(body: ScoreRequest) -> list[tuple[str, list[str]]]:
    given = [names for names in _NAMES if any(getattr(body, name) is not None for name in names)]
    if len(given) != 1:
        raise RequestError("text_1", "and `text_2` must be given, or `queries` and `documents`, and not both")
    sides = []
    for name in given[0]:
        value = getattr(body, name)
        if value is None:
            raise RequestError(name, "is required")
        sides.append((name, [value] if isinstance(value, str) else value))
    return sides


def _check_count(name: str, count: int) -> None:
    if not 1 <= count < MAX_INPUTS:
        raise RequestError(name, f"must hold 1 to {MAX_INPUTS - 1} texts", count)


def _is_reranker(engine: AsyncEngine) -> bool:
    return engine.pooling is not None and engine.pooling.scores


async def _scores(engine: AsyncEngine, body: PairsRequest, computed: TextVectors, num_first: int) -> list[float]:
    """Return a reranker's score of each pair. For an embedding model, return the cosine similarity of each text of a
    second list to the text at the same index of a first list, or to the only text of the first list. `computed` has the
    `num_first` texts of the first list, then those of the second.
    """
    if engine.pooling is not None and engine.pooling.scores:
        sigmoid = engine.pooling.applies_sigmoid if body.use_activation is None else body.use_activation
        return [score_of(vector, applies_sigmoid=sigmoid) for vector in computed.vectors]

    def compute() -> list[float]:
        first, second = computed.vectors[:num_first], computed.vectors[num_first:]
        return [cosine(first[index % num_first], each) for index, each in enumerate(second)]

    return await off_loop(len(computed.vectors) > _INLINE_PAIRS, compute)
