"""How near texts are to each other: POST /v1/score (vLLM), and /rerank, /v1/rerank and /v2/rerank (Jina, Cohere).

A score is the cosine of the angle between the vectors of two texts.
"""

from __future__ import annotations

from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.off_loop import large_json_response, off_loop
from llm_serving.server.parameters import read_fields
from llm_serving.server.vector_schemas import (
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
    TextDocument,
)
from llm_serving.server.vectors import MAX_INPUTS, Vectors, cosine, read_vectors

_INLINE_PAIRS: Final = 2
"""Scores that are computed on the event loop."""
_NAMES: Final = (("text_1", "text_2"), ("queries", "documents"))


async def create_scores(engine: AsyncEngine, http_request: Request) -> Response:
    """The scores of pairs of texts."""
    request = await read_fields(engine, http_request, ScoreRequest)
    (first_name, first), (second_name, second) = _sides(request)
    if len(first) not in (1, len(second)):
        rule = f"must hold one text, or as many as `{second_name}`, {len(second)}"
        raise RequestError(first_name, rule, len(first))
    _check_count(second_name, len(second))

    def place(index: int) -> str:
        name, at = (first_name, index) if index < len(first) else (second_name, index - len(first))
        return f"{name}[{at}]"

    identity, vectors = await read_vectors(engine, http_request, request, [*first, *second], place, prefix="score")
    scores = await _scores(vectors, len(first))
    answer = Scores(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        data=[Score(index=index, score=score) for index, score in enumerate(scores)],
        usage=vectors.usage,
    )
    return await large_json_response(answer, vectors.headers)


async def create_ranking(engine: AsyncEngine, http_request: Request) -> Response:
    """Documents by their scores with a query."""
    request = await read_fields(engine, http_request, RerankRequest)
    _check_count("documents", len(request.documents))
    if request.top_n is not None and request.top_n < 0:
        raise RequestError("top_n", "must be an integer of at least 0", request.top_n)
    if request.max_tokens_per_doc is not None and request.max_tokens_per_doc < 1:
        raise RequestError("max_tokens_per_doc", "must be an integer of at least 1", request.max_tokens_per_doc)
    texts = [each.text if isinstance(each, TextDocument) else each for each in request.documents]
    of_all = request.truncate_prompt_tokens
    of_document = of_all if request.max_tokens_per_doc is None else request.max_tokens_per_doc
    identity, vectors = await read_vectors(
        engine,
        http_request,
        request,
        [request.query, *texts],
        lambda index: f"documents[{index - 1}]" if index else "query",
        prefix="rerank",
        truncations=[of_all, *[of_document] * len(texts)],
    )
    scores = await _scores(vectors, 1)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    shown = request.return_documents is not False
    results = [
        RankedDocument(
            index=index, document=TextDocument(texts[index]) if shown else UNSET, relevance_score=scores[index]
        )
        for index in order[: request.top_n or None]
    ]
    answer = Ranking(id=identity.id, model=identity.model, results=results, usage=vectors.usage)
    return await large_json_response(answer, vectors.headers)


def _sides(request: ScoreRequest) -> list[tuple[str, list[str]]]:
    """Names and texts of both sides."""
    given = [names for names in _NAMES if any(getattr(request, name) is not None for name in names)]
    if len(given) != 1:
        raise RequestError("text_1", "and `text_2` must be given, or `queries` and `documents`, and not both")
    sides = []
    for name in given[0]:
        value = getattr(request, name)
        if value is None:
            raise RequestError(name, "is required")
        sides.append((name, [value] if isinstance(value, str) else value))
    return sides


def _check_count(name: str, count: int) -> None:
    if not 1 <= count < MAX_INPUTS:
        raise RequestError(name, f"must hold 1 to {MAX_INPUTS - 1} texts", count)


async def _scores(vectors: Vectors, num_first: int) -> list[float]:
    """Of each text behind the first ones with the only one of them, or with that at its place."""

    def compute() -> list[float]:
        first, second = vectors.of_texts[:num_first], vectors.of_texts[num_first:]
        return [cosine(first[index % num_first], each) for index, each in enumerate(second)]

    return await off_loop(len(vectors.of_texts) > _INLINE_PAIRS, compute)


def _ranking(path: str) -> Endpoint:
    return Endpoint("POST", path, create_ranking, "Documents by their scores", body=RerankRequest, answer=Ranking)


ENDPOINTS: Final = (
    Endpoint("POST", "/v1/score", create_scores, "How near texts are", body=ScoreRequest, answer=Scores),
    *(_ranking(path) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
)
