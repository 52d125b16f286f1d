"""Prompts as token ids: reading prompt fields, tokenization and truncation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.server.parsing.offload import INLINE_ITEMS, off_loop

INLINE_CHARS: Final = 4096
"""Maximum number of characters tokenized on the event loop. For so few, a thread would cost more than it saves."""

CALL_CHARS: Final = 64
"""Cost of one tokenizer call: the number of characters that are tokenized in the same time."""

PromptField = str | list[str | int | list[int]]
Prompt = str | list[int]


async def read_prompts(value: PromptField, field: str, max_count: int, noun: str) -> list[Prompt]:
    """Return the prompts of a field. Raise RequestError, which calls them `noun`, if there are none or too many."""
    if isinstance(value, str):
        return [value]
    return await off_loop(len(value) > INLINE_ITEMS, lambda: _split(value, field, max_count, noun))


def _split(value: list[str | int | list[int]], field: str, max_count: int, noun: str) -> list[Prompt]:
    ids = [item for item in value if isinstance(item, int)]
    if len(ids) == len(value) > 0:
        return [ids]
    prompts = [item for item in value if isinstance(item, str | list)]
    if ids or not prompts or len({type(item) for item in prompts}) > 1:
        raise RequestError(field, "must be a text, a list of texts, token ids or a list of lists of token ids")
    if len(prompts) > max_count:
        raise RequestError(field, f"must hold at most {max_count} {noun}", len(prompts))
    return prompts


async def encode_text(engine: AsyncEngine, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
    [token_ids] = await encode_prompts(engine, [text], field, add_special_tokens)
    return token_ids


async def encode_prompts(
    engine: AsyncEngine, prompts: Sequence[Prompt], field: str, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt. Raise ContextLengthError for a text that is certainly too long."""
    cost = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(engine, prompt, field)
            cost += len(prompt) + CALL_CHARS
    if cost > INLINE_CHARS:
        return await asyncio.to_thread(_encode_all, engine, prompts, add_special_tokens)
    return _encode_all(engine, prompts, add_special_tokens)


def _encode_all(engine: AsyncEngine, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[list[int]]:
    encode = engine.tokenizer.encode
    return [encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts]


def check_length(engine: AsyncEngine, text: str, field: str, least_chars: int = 0) -> None:
    """Raise ContextLengthError if a text has more characters than any prompt of the maximum length can have.

    A text of at most `least_chars` characters always passes.
    """
    max_chars = max(engine.config.model.max_input_len * engine.tokenizer.max_token_chars, least_chars)
    if len(text) > max_chars:
        rule = f"must be at most {engine.config.model.max_input_len} tokens long, which {max_chars} characters exceed"
        raise ContextLengthError(field, rule, len(text))


def truncate_prompt(engine: AsyncEngine, prompt: list[int], count: int | None, max_tokens: int) -> list[int]:
    """Return the last `count` token ids of a prompt; -1: as many as fit with `max_tokens` of output; None: all."""
    if count is None:
        return prompt
    if count == -1:
        count = max(1, min(engine.config.model.max_input_len, engine.max_model_len - max_tokens))
    elif count < 1:
        raise RequestError("truncate_prompt_tokens", "must be -1 or an integer of at least 1", count)
    return prompt[-count:]
