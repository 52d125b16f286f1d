"""One after the other."""

from __future__ import annotations

from llm_serving.engine.routing.base import Candidate, Candidates, Predict


class RoundRobin:
    needs_prefixes = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return candidates.after(self._last)

    def chosen(self, replica: int) -> None:
        self._last = replica
