"""Shortest job first, by predicted length: the least mean wait."""

from __future__ import annotations

from typing import Final

from llm_serving.core.request import Request

MEMORY: Final = 16
"""Ended requests of a tenant after which an earlier one counts 1/e."""
MAX_TENANTS: Final = 10_000
PROMPT_TOKENS_A_STEP: Final = 64
"""Prompt tokens that delay others as much as one step of decoding does; prompts are computed many at a time."""


class Shortest:
    """Predicts that a request is as long as those of its tenant and class were, and never longer than it may be.

    A client that names a small `max_tokens` is believed, since it is held to it.
    """

    shares_fairly = False

    def __init__(self) -> None:
        self._mean_lengths: dict[tuple[str, str], float] = {}
        """Output tokens, by class and tenant; those that were heard of last are kept."""

    def place(self, request: Request) -> float:
        most = request.sampling.max_tokens
        mean = self._mean_lengths.get((request.request_class.name, request.tenant), float(most))
        return min(mean, most) + request.num_prompt_tokens / PROMPT_TOKENS_A_STEP

    def ended(self, request: Request) -> None:
        length = len(request.output_token_ids)
        if not length:
            return
        key = (request.request_class.name, request.tenant)
        mean = self._mean_lengths.pop(key, float(length))
        self._mean_lengths[key] = mean + (length - mean) / MEMORY
        if len(self._mean_lengths) > MAX_TENANTS:
            del self._mean_lengths[next(iter(self._mean_lengths))]
