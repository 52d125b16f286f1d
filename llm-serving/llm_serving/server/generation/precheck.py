"""The admission pre-check: refuse a request before its text is rendered and tokenized, and within its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from llm_serving.core.timings import Clock
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import TimedOutError, renaming
from llm_serving.server.generation.prompts import Prompt
from llm_serving.server.parsing.caller import HttpCaller

BYTES_PER_CHAR: Final = 4
MAX_SPECIAL_TOKENS: Final = 4
"""Most tokens that a tokenizer adds to those of a text, before and behind it."""
NO_RENAMES: Final[Mapping[str, str]] = MappingProxyType({})

T = TypeVar("T")


class PrecheckInput(NamedTuple):
    """What the pre-check reads of a request whose parameters have been validated."""

    prompts: Sequence[Prompt]
    max_tokens: int
    """Tokens that each choice may generate, at least."""
    field_names: Mapping[str, str] = NO_RENAMES
    """Field in errors of the engine -> the protocol's name for it."""
    num_choices: int = 1
    """Sequences generated for each prompt."""
    template_factor: int = 1
    """Most times its own length that a text may have once the chat template has been applied."""
    truncates: bool = False
    """Whether the prompts will be cut to whatever fits."""


async def precheck(engine: AsyncEngine, caller: HttpCaller, request: PrecheckInput, *, known: bool = False) -> None:
    """Refuse a request that admission would refuse whatever the number of its tokens turns out to be.

    Ask admission only where the lengths leave no doubt that the prompts fit the model, because a client that can never
    be served must not be told to retry.

    Args:
        engine: Decides.
        caller: The client.
        request: Prompts and limits.
        known: Whether this request was admitted before, so that its response may be stored already.

    Raises:
        RequestError: The request would be refused even if no request waited.
        CapacityError: The request cannot be admitted now.
        UnavailableError: No WorkAgent is ready.
    """
    prompts, max_tokens = request.prompts, request.max_tokens
    max_prompt, max_total = engine.config.model.max_input_len, engine.max_model_len
    min_lens = []
    for prompt in prompts:
        low, high = _token_bounds(engine, prompt, request.template_factor)
        if known or (not request.truncates and (high > max_prompt or high + max_tokens >= max_total)):
            return
        min_lens.append(1 if request.truncates else low)
    with renaming(request.field_names):
        engine.precheck_capacity(min_lens * request.num_choices, caller)


def _token_bounds(engine: AsyncEngine, prompt: Prompt, template_factor: int) -> tuple[int, int]:
    """Return the least and the largest number of tokens that a prompt may have."""
    if not isinstance(prompt, str):
        return len(prompt), len(prompt)
    num_bytes = len(prompt) if prompt.isascii() else BYTES_PER_CHAR * len(prompt)
    least = max(1, len(prompt) // engine.tokenizer.max_token_chars)
    return least, template_factor * num_bytes + MAX_SPECIAL_TOKENS


async def within_deadline(deadline: float | None, clock: Clock, work: Awaitable[T]) -> T:
    """Return the result of work that precedes the engine, which enforces the deadline from then on.

    Args:
        deadline: Time on the clock; None: there is none.
        clock: Seconds.
        work: Cancelled when the deadline passes.

    Raises:
        TimedOutError: The deadline has passed.
    """
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOutError("the deadline of the request has passed") from None
