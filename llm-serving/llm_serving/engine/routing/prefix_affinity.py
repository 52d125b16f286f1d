"""Most of the prompt computed already, as long as the load is even; the rule of Ray Serve's prefix-aware router.

https://docs.ray.io/en/latest/serve/llm/prefix-aware-request-router.html
"""

from __future__ import annotations

from typing import Final

from llm_serving.engine.routing.base import Candidate, Candidates, Predict

LEAST_MATCH: Final = 0.1
"""Share of a prompt that must be there for it to count; Ray Serve's."""
MOST_UNEVEN: Final = 16
"""Requests that one replica may have more than another while prefixes are looked at. Ray Serve asks for a number and
has none of its own."""


class PrefixAffinity:
    needs_prefixes = True

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        least, most = next(candidates.by_load()), next(candidates.by_prefix(), None)
        is_even = candidates.most_loaded().num_unfinished - least.num_unfinished <= MOST_UNEVEN
        if most is not None and is_even and most.num_cached_tokens >= LEAST_MATCH * most.num_prompt_tokens:
            return most
        return least

    def chosen(self, replica: int) -> None:
        del replica
