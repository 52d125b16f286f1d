"""Bodies of the routes that answer with vectors, or with what comes of them."""

from __future__ import annotations

from msgspec import UNSET, Raw, Struct, UnsetType

from llm_serving.server.off_loop import Long
from llm_serving.server.schemas import CallerFields


class VectorRequest(CallerFields, kw_only=True):
    """What the routes have in common."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens from the beginning of each text, and what the tokenizer puts behind it; -1: as many as
    fit."""
    request_id: str | None = None


class EmbeddingsRequest(VectorRequest, kw_only=True):
    input: str | list[str | int | list[int]]
    """A text, several texts, token ids, or several lists of token ids."""
    encoding_format: str | None = None
    """`float`, or `base64`: float32, little-endian. Not given: float."""
    dimensions: int | None = None
    """Keep so many numbers from the beginning of each vector, which is then brought to length 1 again."""
    normalize: bool | None = None
    """Whether vectors are brought to length 1. Not given: as the model's folder says, otherwise true."""
    add_special_tokens: bool | None = None
    """Let the tokenizer put its special tokens around the text. Not given: true."""


class ScoreRequest(VectorRequest, kw_only=True):
    """Texts by one of the two pairs of names: one text and several, or as many of each."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class TextDocument(Struct):
    text: str


class RerankRequest(VectorRequest, kw_only=True):
    query: str
    documents: list[str | TextDocument]
    top_n: int | None = None
    """Tell this many of the best; 0 or not given: all."""
    return_documents: bool | None = None
    """Repeat the texts in the answer. Not given: true."""
    max_tokens_per_doc: int | None = None
    """Keep this many tokens from the beginning of each document."""


class TokensUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: Raw
    """Numbers, or base64."""


class Embeddings(Long, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: TokensUsage


class Score(Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class Scores(Long, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: TokensUsage


class RankedDocument(Struct, kw_only=True):
    index: int
    """Of the request's documents."""
    document: TextDocument | UnsetType = UNSET
    relevance_score: float


class Ranking(Long, kw_only=True):
    id: str
    model: str
    results: list[RankedDocument]
    """Best first; of equals the earlier one."""
    usage: TokensUsage
