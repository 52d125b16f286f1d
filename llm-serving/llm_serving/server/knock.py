"""At the door before anything is made of a text: whoever will be refused anyhow costs no template and no tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from llm_serving.admission.appointments import Visitor
from llm_serving.engine.async_engine import NOBODY, AsyncEngine
from llm_serving.errors import renaming
from llm_serving.server.caller import HttpCaller
from llm_serving.server.off_loop import INLINE_BYTES, INLINE_ITEMS, off_loop

BYTES_PER_CHAR: Final = 4
BYTES_PER_ID: Final = INLINE_BYTES // INLINE_ITEMS
SPECIAL_TOKENS: Final = 4
"""Beside those of the text, at most; there may be one in front, one behind, and what opens a text."""
OUR_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
_encode: Final = msgspec.msgpack.Encoder().encode


class Entry(NamedTuple):
    """What goes with a request from the door to its generation."""

    engine: AsyncEngine
    caller: HttpCaller
    names: Mapping[str, str] = OUR_NAMES
    """What its protocol calls fields that errors of the engine name; others are called as here."""
    visitor: Visitor = NOBODY
    """By which the door knows the request when it comes again."""


async def knock(
    engine: AsyncEngine,
    caller: HttpCaller,
    prompts: Sequence[str | list[int]],
    max_tokens: int,
    *,
    names: Mapping[str, str] = OUR_NAMES,
    num_each: int = 1,
    frame: int = 1,
    truncates: bool = False,
    known: bool = False,
) -> Entry:
    """Refuses requests that will be refused whatever their texts come to in tokens.

    Only where their length leaves no doubt that they fit at all: nobody is told to come back who can never be served.

    Args:
        engine: Decides.
        caller: Who asks.
        prompts: Texts, or token ids.
        max_tokens: Of each answer.
        names: What its protocol calls fields that errors of the engine name.
        num_each: Answers to each prompt.
        frame: Times its length that a text may get by what is put around it.
        truncates: Whether the prompts are cut to whatever fits.
        known: Whether it was let in before, so that its answer may be there.

    Returns:
        To start its generation with. The door knows the same request of the same client by it when it comes again,
        whatever random seed it was given.

    Raises:
        RequestError: They would not come in even if nothing waited.
        CapacityError: They may not come in now.
        UnavailableError: No WorkAgent is ready.
    """
    size = sum(len(prompt) * (1 if isinstance(prompt, str) else BYTES_PER_ID) for prompt in prompts)
    visitor = await off_loop(size > INLINE_BYTES, lambda: _visitor(caller, prompts, max_tokens))
    entry = Entry(engine, caller, names, visitor)
    max_prompt, max_total = engine.config.model.max_input_len, engine.max_model_len
    least_lens = []
    for prompt in prompts:
        least, most = _bounds(engine, prompt, frame)
        if known or (not truncates and (most > max_prompt or most + max_tokens >= max_total)):
            return entry
        least_lens.append(1 if truncates else least)
    with renaming(names):
        engine.knock(least_lens * num_each, caller, visitor)
    return entry


def _bounds(engine: AsyncEngine, prompt: str | list[int], frame: int) -> tuple[int, int]:
    """How many tokens it has at least and at most."""
    if not isinstance(prompt, str):
        return len(prompt), len(prompt)
    num_bytes = len(prompt) if prompt.isascii() else BYTES_PER_CHAR * len(prompt)
    return max(1, len(prompt) // engine.tokenizer.max_token_chars), frame * num_bytes + SPECIAL_TOKENS


def _visitor(caller: HttpCaller, prompts: Sequence[Any], max_tokens: int) -> Visitor:
    who = (caller.tenant, caller.cache_salt, caller.idempotency_key, caller.priority)
    try:
        content = _encode((who, prompts, max_tokens))
    except OverflowError:  # integers that are no token ids, as will be found out
        content = repr((who, prompts, max_tokens)).encode()
    return Visitor(caller.source, hashlib.blake2b(content, digest_size=16).digest(), caller.says_again)
