"""Who was told to come again later: no recording has them, and they are part of the load all the same."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

MAX_REFUSED: Final = 20_000
"""Requests that are remembered, the newest."""


class Refused(NamedTuple):
    """Requests that belong together and were told to come again later."""

    time: float
    """On the engine's clock."""
    prompt_lens: tuple[int, ...]
    """Tokens, or as many as they have at least."""
    priority: int
    tenant: str


class RefusedLately:
    """Each time that somebody was, the newest; few who asked for much at once take no more memory than many."""

    def __init__(self) -> None:
        self._refused: deque[Refused] = deque()
        self._num_requests = 0

    def note(self, refused: Refused) -> None:
        self._refused.append(refused)
        self._num_requests += len(refused.prompt_lens)
        while self._num_requests > MAX_REFUSED:
            self._num_requests -= len(self._refused.popleft().prompt_lens)

    def since(self, time: float) -> list[Refused]:
        return [each for each in self._refused if each.time >= time]
