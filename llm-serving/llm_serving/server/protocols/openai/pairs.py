"""Pairs of a query and a document as the token ids that a reranker reads."""

from __future__ import annotations

import math
from typing import NamedTuple

from llm_serving.core.step import Float32Array
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.text.tokenizer.tokenizer import Tokenizer


class TextPair(NamedTuple):
    """A query and a document."""

    query: str
    document: str
    max_document_tokens: int | None = None
    """Maximum number of tokens of the document; None: no limit."""

    @property
    def text(self) -> str:
        return self.query + self.document


def encode_pair(engine: AsyncEngine, pair: TextPair, max_tokens: int | None) -> list[int]:
    """Return the token ids of a pair. With `max_tokens`, cut the pair to this number of tokens.

    An encoder reads both texts with the special tokens of its tokenizer. A decoder reads the text of a template: the
    chat template of the folder if it has a role `document`, otherwise `Pooling.pair_template`.

    Raise RequestError if the model's chat template rejects the pair, or if `max_tokens` is below the number of tokens
    that are never cut.
    """
    pooling, tokenizer = engine.pooling, engine.tokenizer
    assert pooling is not None
    if pair.max_document_tokens is not None:
        pair = pair._replace(document=_cut(tokenizer, pair.document, pair.max_document_tokens))
    template = None if not engine.model_spec.network.causal else pooling.pair_template
    by_chat_template = engine.model_spec.network.causal and _has_document_role(tokenizer.chat_template())
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
    """Return the score of a pair from the result of the model, [1]."""
    raw = float(vector[0])
    if not applies_sigmoid:
        return raw
    return 1 / (1 + math.exp(-raw)) if raw >= 0 else math.exp(raw) / (1 + math.exp(raw))


def _check_room(num_tokens: int, max_tokens: int | None) -> None:
    if max_tokens is not None and num_tokens > max_tokens:
        rule = f"must be at least {num_tokens}, the tokens of this pair that are never cut"
        raise RequestError("truncate_prompt_tokens", rule, max_tokens)


def _cut(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= max_tokens else tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)


def _has_document_role(template: str) -> bool:
    return '"document"' in template or "'document'" in template
