"""Texts as vectors: from the inputs of a request to what the model makes of each, and what is computed of that.

Every number is rounded once from the exact value, so no order in which a machine adds can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from starlette.requests import Request

from llm_serving.admission.validation import check_token_ids
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import Float32Array
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.caller import caller_of
from llm_serving.server.generation import INLINE_CHARS, Generation, check_length, raise_unless_whole, start_generation
from llm_serving.server.knock import knock
from llm_serving.server.off_loop import INLINE_ITEMS, off_loop
from llm_serving.server.openai_requests import Identity, check_model, identify
from llm_serving.server.prompt_items import Item
from llm_serving.server.vector_schemas import TokensUsage, VectorRequest
from llm_serving.server.whole_answers import complete_whole

MAX_INPUTS: Final = 2048
"""Texts of one request, as with OpenAI."""
_PROMPT: Final = SamplingParams(max_tokens=0)

Place = Callable[[int], str]
"""Index of a text -> its name in the request."""


class Vectors(NamedTuple):
    of_texts: list[Float32Array]
    """[hidden size] each, as the head of the model would read them."""
    usage: TokensUsage
    headers: dict[str, str]


async def read_vectors(
    engine: AsyncEngine,
    http_request: Request,
    request: VectorRequest,
    texts: Sequence[Item],
    place: Place,
    *,
    prefix: str,
    truncations: Sequence[int | None] | None = None,
    add_special_tokens: bool = True,
) -> tuple[Identity, Vectors]:
    """Computes the last hidden state of each text.

    Args:
        engine: Computes.
        http_request: It came with; when its client leaves, what has not been computed is aborted.
        request: Who asks, and how long texts may be.
        texts: Or token ids.
        place: Their names, for errors.
        prefix: Of the answer's id.
        truncations: Most tokens of each text; None: what the request says.
        add_special_tokens: Let the tokenizer put its special tokens around texts.

    Raises:
        LLMServingError: The model has no vectors, a text breaks a rule, or the engine refuses it.
    """
    check_model(engine, request.model)
    if engine.pooling is None:
        rule = "gives no vectors: it is no embedding model (model_config.pooling: last takes any model for one)"
        raise RequestError("model", rule)
    caller = caller_of(engine.config, http_request, request)
    identity = identify(engine, http_request, request, prefix)
    limits = truncations or [request.truncate_prompt_tokens] * len(texts)
    field = place(len(texts) - 1).partition("[")[0]
    truncates = any(limit is not None for limit in limits)
    entry = await knock(engine, caller, texts, 0, names={"prompt": field, "n": field}, truncates=truncates)
    prompts = await _encode(engine, texts, place, limits, add_special_tokens)
    num_tokens = sum(map(len, prompts))
    await off_loop(num_tokens > INLINE_ITEMS, lambda: _check_lengths(engine, prompts, place))
    generation = await start_generation(
        entry, prompts, [_PROMPT] * len(prompts), request_id=identity.request_id, wants_vectors=True
    )
    headers = identity.headers | generation.headers
    vectors = await complete_whole(http_request, generation, _collect(generation, len(prompts)))
    return identity, Vectors(vectors, TokensUsage(num_tokens, num_tokens), headers)


def normalised(vector: Float32Array) -> Float32Array:
    """A vector ([H]) divided by its length; zeros stay zeros."""
    length = math.sqrt(_product(vector, vector))
    return vector if length == 0.0 else (vector.astype(np.float64) / length).astype(np.float32)


def cosine(first: Float32Array, second: Float32Array) -> float:
    """Of the angle between two vectors ([H]), -1 to 1; 0 where one is zero."""
    lengths = math.sqrt(_product(first, first) * _product(second, second))
    return 0.0 if lengths == 0.0 else max(-1.0, min(1.0, _product(first, second) / lengths))


def _product(first: Float32Array, second: Float32Array) -> float:
    """Products of float32 are exact in float64, and so is their sum until it is rounded."""
    return math.fsum((first.astype(np.float64) * second.astype(np.float64)).tolist())


async def _collect(generation: Generation, count: int) -> list[Float32Array]:
    vectors: dict[int, Float32Array] = {}
    async for index, output in generation.outputs():
        raise_unless_whole(output)
        if output.vector is not None:
            vectors[index] = output.vector
    return [vectors[index] for index in range(count)]


async def _encode(
    engine: AsyncEngine, texts: Sequence[Item], place: Place, limits: Sequence[int | None], add_special_tokens: bool
) -> list[list[int]]:
    most = min(engine.config.model.max_input_len, engine.max_model_len)
    for index, (text, limit) in enumerate(zip(texts, limits, strict=True)):
        if limit is not None and limit != -1 and limit < 1:
            raise RequestError("truncate_prompt_tokens", "must be -1 or an integer of at least 1", limit)
        if isinstance(text, str):
            check_length(engine, text, place(index))

    def encode() -> list[list[int]]:
        encoder = engine.tokenizer.encode
        prompts = []
        for text, limit in zip(texts, limits, strict=True):
            ids = encoder(text, add_special_tokens) if isinstance(text, str) else text
            count = most if limit == -1 else limit
            if count is not None and len(ids) > count:
                ending = _ending(ids, encoder(text, False)) if isinstance(text, str) else []
                ending = ending[-count:]
                ids = [*ids[: count - len(ending)], *ending]
            prompts.append(ids)
        return prompts

    num_chars = sum(len(text) + INLINE_CHARS // 64 for text in texts if isinstance(text, str))
    return await off_loop(num_chars > INLINE_CHARS or len(texts) > INLINE_ITEMS, encode)


def _ending(ids: list[int], of_text: list[int]) -> list[int]:
    """What the tokenizer has put behind the tokens of a text: where vectors are read, so that it is never cut off."""
    num_around = len(ids) - len(of_text)
    before = next(
        (count for count in range(num_around + 1) if ids[count : count + len(of_text)] == of_text), num_around
    )
    return ids[before + len(of_text) :]


def _check_lengths(engine: AsyncEngine, prompts: Sequence[list[int]], place: Place) -> None:
    """Refuses texts that no server could take, by their own names: the engine knows one prompt at a time."""
    most = min(engine.config.model.max_input_len, engine.max_model_len)
    vocab_size = engine.model_spec.vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(place(index), "must hold at least one token", 0)
        if len(prompt) > most:
            rule = f"must be at most {most} tokens long; `truncate_prompt_tokens` cuts it"
            raise ContextLengthError(place(index), rule, len(prompt))
        check_token_ids(place(index), prompt, vocab_size)
