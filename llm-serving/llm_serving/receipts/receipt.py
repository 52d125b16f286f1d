"""What a receipt holds."""

from __future__ import annotations

from typing import Final

import msgspec

from llm_serving.core.fingerprint import ComputedBy
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams

VERSION: Final = 2
READABLE: Final = (1, VERSION)
"""Versions that can be read. 1 had every key of the sections that compute, also those that change no byte."""
MAX_TOKENS: Final = 2**18
"""Of all prompts and answers of a receipt."""


class ReceiptChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One answer to a prompt."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    text: str
    """SHA-256 of the text that the tokens came to, in UTF-8; before it is split into what was thought, said and called.
    """
    logprobs: str | None
    """SHA-256 over the log-probabilities that were told, see `answer_digest`; None: none were."""


class Receipt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All that the bytes of an answer follow from, and the answer as token ids.

    Who asked, how urgently, when and with which `cache_salt` is not part of it: nothing of that changes an answer.
    """

    version: int
    id: str
    """Of the answer."""
    created: int
    """Seconds since 1970."""
    model: str
    """As it is served."""
    server: str
    """Version of the server."""
    weights: str
    """SHA-256 over config.json and the files of weights, see `contents`."""
    tokenizer: str
    """SHA-256 over the tokenizer's files."""
    computed_by: ComputedBy
    configuration: dict[str, str | int | bool | None]
    """"section.key" -> value, of every key that can change a byte, see `configuration`."""
    max_model_len: int
    """Most tokens that the model was loaded for: some models place tokens by it."""
    end_token_ids: list[int]
    """By which the model ends a text."""
    n: int
    best_of: int
    beam_search: BeamSearchParams | None
    sampling: SamplingParams
    """Of the first choice, as it was honoured: with the defaults of model and server, and the seed that was drawn. The
    seed is a text, as JSON's numbers are too short for it in many languages."""
    prompts: list[list[int]]
    prompt_logprobs: list[str | None]
    """For each prompt, SHA-256 over the log-probabilities of its tokens; None: none were told."""
    choices: list[ReceiptChoice]
    """`n` for each prompt, in their order."""
