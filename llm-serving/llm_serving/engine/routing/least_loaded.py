"""Fewest unfinished requests."""

from __future__ import annotations

from llm_serving.engine.routing.base import Candidate, Candidates, Predict


class LeastLoaded:
    needs_prefixes = False

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return next(candidates.by_load())

    def chosen(self, replica: int) -> None:
        del replica
