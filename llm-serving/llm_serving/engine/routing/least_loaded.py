"""Fewest unfinished requests."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.engine.routing.base import Candidate, Predict, load_of


class LeastLoaded:
    needs_prefixes = False

    def choose(self, candidates: Sequence[Candidate], predict: Predict) -> Candidate:
        del predict
        return min(candidates, key=load_of)

    def chosen(self, replica: int) -> None:
        del replica
