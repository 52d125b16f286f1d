"""Bodies and responses of the routes that return vectors or scores."""

from __future__ import annotations

from msgspec import UNSET, Raw, Struct, UnsetType

from llm_serving.server.parsing.offload import Long
from llm_serving.server.protocols.openai.schemas import CallerFields


class VectorRequest(CallerFields, kw_only=True):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens of each text. Special tokens at its end count and are kept. -1 means as many as fit."""
    request_id: str | None = None


class EmbeddingsRequest(VectorRequest, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    """`float` (the default), or `base64`, which encodes little-endian float32 values."""
    dimensions: int | None = None
    normalize: bool | None = None
    """Default: as the model's folder specifies, else true."""
    add_special_tokens: bool | None = None


class PairsRequest(VectorRequest, kw_only=True):
    use_activation: bool | None = None
    """Whether the score of a reranker is the sigmoid of its result. Default: as the model's folder specifies."""


class ScoreRequest(PairsRequest, kw_only=True):
    """Two lists of texts: `text_1` and `text_2`, or `queries` and `documents`. If the first list has a single text, it
    is compared with each text of the second list. Otherwise, texts with the same index are compared.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class TextDocument(Struct):
    text: str


class RerankRequest(PairsRequest, kw_only=True):
    query: str
    documents: list[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


class TokensUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingItem(Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: Raw


class ListOfResults(Long, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    usage: TokensUsage


class Embeddings(ListOfResults):
    data: list[EmbeddingItem]


class Score(Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(ListOfResults):
    data: list[Score]


class RankedDocument(Struct, kw_only=True):
    index: int
    document: TextDocument | UnsetType = UNSET
    relevance_score: float


class Ranking(Long, kw_only=True):
    id: str
    model: str
    results: list[RankedDocument]
    """In descending order of score; among equal scores, in the order of the request."""
    usage: TokensUsage
