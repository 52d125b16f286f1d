"""Least predicted time to the first token, its own and that of others.

By what was measured of steps and is known of queues and caches. What is computed of a prompt delays those who are at
the replica, or come after them: it is worth little to an idle replica and much to a busy one, where a request that
sought but its own advantage would have prefixes computed again and again. Most of those who are there decode, and have
their first token: a delay of theirs counts less than one of the request itself. Of a prompt that no replica has a tenth
of, about as much is computed wherever it goes: a delay of others counts little then. Where all that is the same, the
one with fewer requests; where nothing has been measured yet, `prefix_affinity` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.engine.routing.base import Candidate, Predict, load_of
from llm_serving.engine.routing.prefix_affinity import LEAST_MATCH, PrefixAffinity

MAX_COMPARED: Final = 8
"""Replicas for which the time is predicted, as that takes longer than to count: of many, the half of these that have
most of the prompt, and otherwise those with the fewest requests."""


OTHERS_WEIGHT: Final = 1 / 3
"""What a delay of one of those who are there counts. As much as one's own, requests stay with a prefix until the queue
before it is seconds longer than others, and the slowest ones are slower; nothing, and prefixes are computed
everywhere, which makes all slower (docs/cluster.md)."""
OTHERS_WEIGHT_OF_NEW: Final = 1 / 10
"""The same of a prompt that has to be computed wherever it goes."""


class PredictedTTFT:
    needs_prefixes = True
    _at_first = PrefixAffinity()

    def choose(self, candidates: Sequence[Candidate], predict: Predict) -> Candidate:
        likely = _likely(candidates)
        predicted = [(predict(each), each) for each in likely]
        is_anywhere = any(each.num_cached_tokens >= LEAST_MATCH * each.num_prompt_tokens for each in candidates)
        others_weight = OTHERS_WEIGHT if is_anywhere else OTHERS_WEIGHT_OF_NEW
        told = [
            (seconds + others_weight * each.num_unfinished * each.work_s, load_of(each), each)
            for seconds, each in predicted
            if seconds is not None
        ]
        return min(told)[2] if told else self._at_first.choose(candidates, predict)

    def chosen(self, replica: int) -> None:
        del replica


def _likely(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    if len(candidates) <= MAX_COMPARED:
        return candidates
    by_load = sorted(candidates, key=load_of)
    having = [each for each in by_load if each.num_cached_tokens]
    having = sorted(having, key=lambda each: -each.num_cached_tokens)[: MAX_COMPARED // 2]
    return [*having, *(each for each in by_load if each not in having)][:MAX_COMPARED]
