"""One after the other."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.engine.routing.base import Candidate, Predict


class RoundRobin:
    needs_prefixes = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate], predict: Predict) -> Candidate:
        del predict
        return min(candidates, key=lambda each: (each.replica <= self._last, each.replica))

    def chosen(self, replica: int) -> None:
        self._last = replica
