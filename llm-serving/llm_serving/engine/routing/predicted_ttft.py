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
from itertools import islice
from typing import Final

from llm_serving.engine.routing.base import Candidate, Candidates, Predict, load_of
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

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        having = list(islice(candidates.by_prefix(), MAX_COMPARED // 2))
        predicted = [(predict(each), each) for each in _likely(candidates, having)]
        is_anywhere = bool(having) and having[0].num_cached_tokens >= LEAST_MATCH * having[0].num_prompt_tokens
        others_weight = OTHERS_WEIGHT if is_anywhere else OTHERS_WEIGHT_OF_NEW
        told = [
            (seconds + others_weight * each.num_unfinished * each.work_s, load_of(each), each)
            for seconds, each in predicted
            if seconds is not None
        ]
        return min(told)[2] if told else self._at_first.choose(candidates, predict)

    def chosen(self, replica: int) -> None:
        del replica


def _likely(candidates: Candidates, having: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those `having` most of the prompt among them."""
    by_load = list(islice(candidates.by_load(), MAX_COMPARED + 1))
    if len(by_load) <= MAX_COMPARED:
        return by_load
    replicas = [each.replica for each in having]
    return [*having, *(each for each in by_load if each.replica not in replicas)][:MAX_COMPARED]
