"""At the door before anything is made of a text: whoever will be refused anyhow costs no template and no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import renaming
from llm_serving.server.caller import HttpCaller
from llm_serving.server.off_loop import INLINE_BYTES, INLINE_ITEMS

BYTES_PER_CHAR: Final = 4
BYTES_PER_ID: Final = INLINE_BYTES // INLINE_ITEMS
SPECIAL_TOKENS: Final = 4
"""Beside those of the text, at most; there may be one in front, one behind, and what opens a text."""
OUR_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class Entry(NamedTuple):
    """What goes with a request from the door to its generation."""

    engine: AsyncEngine
    caller: HttpCaller
    names: Mapping[str, str] = OUR_NAMES
    """What its protocol calls fields that errors of the engine name; others are called as here."""


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
        To start its generation with.

    Raises:
        RequestError: They would not come in even if nothing waited.
        CapacityError: They may not come in now.
        UnavailableError: No WorkAgent is ready.
    """
    entry = Entry(engine, caller, names)
    max_prompt, max_total = engine.config.model.max_input_len, engine.max_model_len
    least_lens = []
    for prompt in prompts:
        least, most = _bounds(engine, prompt, frame)
        if known or (not truncates and (most > max_prompt or most + max_tokens >= max_total)):
            return entry
        least_lens.append(1 if truncates else least)
    with renaming(names):
        engine.precheck_capacity(least_lens * num_each, caller)
    return entry


def _bounds(engine: AsyncEngine, prompt: str | list[int], frame: int) -> tuple[int, int]:
    """How many tokens it has at least and at most."""
    if not isinstance(prompt, str):
        return len(prompt), len(prompt)
    num_bytes = len(prompt) if prompt.isascii() else BYTES_PER_CHAR * len(prompt)
    return max(1, len(prompt) // engine.tokenizer.max_token_chars), frame * num_bytes + SPECIAL_TOKENS
