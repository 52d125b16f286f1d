"""What a draft model is asked for, between two steps: how it would go on with what has been said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

WINDOW: Final = 256
"""Most tokens of a request that a draft model sees. When there are more, the older half is forgotten at once, so that
what it has computed of the others is good for the next 128."""
MAX_CONTINUATIONS: Final = 16
"""Most requests it goes on with at a time."""
MAX_COUNT: Final = 64
"""Most tokens by which it goes on."""
MAX_PROPOSED_TOKENS: Final = 1024
"""Most tokens that a draft model computes at once; whoever's text does not fit any more is not gone on with then."""


class Continuation(NamedTuple):
    """A request to go on with, and how its tokens are chosen."""

    key: int
    """Of the request; what was computed for the same key before is used again as far as the tokens are the same."""
    start: int
    """Index in the request of the first of `token_ids`."""
    token_ids: list[int]
    """Its newest tokens, at most `WINDOW`."""
    num_wanted: int
    """By how many tokens to go on, at most `MAX_COUNT`."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Continues(Protocol):
    """Goes on with texts; what it says only decides how many tokens a step brings."""

    def propose(self, continuations: Sequence[Continuation]) -> list[list[int]]:
        """For each what may follow, at most `num_wanted` tokens."""


def blocks_of_continuation(block_size: int) -> int:
    """Blocks that a draft model's cache has for each of `MAX_CONTINUATIONS`."""
    return -(-(WINDOW + MAX_COUNT) // block_size)


def window_start(num_tokens: int) -> int:
    """Index of the first of so many tokens that a draft model sees."""
    half = WINDOW // 2
    return 0 if num_tokens <= WINDOW else ((num_tokens - 1) // half - 1) * half
