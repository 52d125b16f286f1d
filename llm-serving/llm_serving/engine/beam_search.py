"""Beam search as arithmetic over log-probabilities: which sequences go on, which have finished, when it ends."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import BeamSearchParams


class LikelyTokens(NamedTuple):
    """The most likely next tokens of one sequence, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


NO_TOKENS: Final = LikelyTokens((), ())


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """Generated tokens, as the newest one and what came before it; the empty one has neither."""

    before: Hypothesis | None = None
    token_id: int = -1
    logprob: float = 0.0
    likely: LikelyTokens = NO_TOKENS
    """What the token was chosen from."""
    length: int = 0
    cumulative_logprob: float = 0.0

    def followed_by(self, token_id: int, logprob: float, likely: LikelyTokens) -> Hypothesis:
        return Hypothesis(self, token_id, logprob, likely, self.length + 1, self.cumulative_logprob + logprob)

    def tokens(self) -> list[Hypothesis]:
        """One for each token, in order."""
        newest_first = []
        each = self
        while each.before is not None:
            newest_first.append(each)
            each = each.before
        return newest_first[::-1]


class FinishedBeam(NamedTuple):
    score: float
    hypothesis: Hypothesis
    finish_reason: FinishReason


class BeamSearch:
    """One prompt's search.

    At each step every live sequence is continued by its `2 * width` most likely tokens. Continuations by a stop id have
    finished; of the others the `width` likeliest go on. Among equals the earlier sequence comes first, then the more
    likely token, so that the same log-probabilities always give the same answer.

    The finished ones are ranked by `cumulative_logprob / length ** length_penalty`, where the length counts generated
    tokens, the stop id among them. At `max_tokens` whatever lives has finished too.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_token_ids: Collection[int]) -> None:
        self.live = [Hypothesis()]
        """Most likely first; empty when the search has ended."""
        self._params = params
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._finished: list[FinishedBeam] = []
        """The best `width`, best first."""

    @property
    def has_ended(self) -> bool:
        return not self.live

    def advance(self, choices: Sequence[LikelyTokens]) -> list[int]:
        """Continues every live sequence.

        Args:
            choices: For each of `live`, at least `2 * width` tokens, or all there are.

        Returns:
            For each of the new `live`, the index of the old one that it continues.
        """
        width = self._params.width
        continued: list[tuple[int, Hypothesis]] = []
        for index, (beam, likely) in enumerate(zip(self.live, choices, strict=True)):
            pairs = zip(likely.token_ids[: 2 * width], likely.logprobs, strict=False)
            continued += ((index, beam.followed_by(token_id, logprob, likely)) for token_id, logprob in pairs)
        continued.sort(key=lambda each: -each[1].cumulative_logprob)
        for _, hypothesis in continued:
            if hypothesis.token_id in self._stop_token_ids:
                self._finish(hypothesis, FinishReason.STOP)
        going_on = [each for each in continued if each[1].token_id not in self._stop_token_ids][:width]
        self.live = [hypothesis for _, hypothesis in going_on]
        if self.live and self.live[0].length >= self._max_tokens:
            for hypothesis in self.live:
                self._finish(hypothesis, FinishReason.LENGTH)
            self.live = []
        if self._cannot_improve():
            self.live = []
        return [index for index, _ in going_on][: len(self.live)]

    def best(self) -> list[FinishedBeam]:
        """The answers, best first."""
        return self._finished[: self._params.num_returned]

    def _finish(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        score = self._score(hypothesis.cumulative_logprob, hypothesis.length)
        insort(self._finished, FinishedBeam(score, hypothesis, reason), key=lambda each: -each.score)
        del self._finished[self._params.width :]

    def _cannot_improve(self) -> bool:
        """Whether no continuation of what lives would get among the finished ones."""
        if not self.live or len(self._finished) < self._params.width:
            return False
        return self._params.early_stopping or self._best_attainable() <= self._finished[-1].score

    def _best_attainable(self) -> float:
        """The highest score that a live sequence could finish with: all its further tokens certain.

        The score is monotonous in the length, so its maximum is at the shortest or the longest one.
        """
        most_likely = self.live[0]
        lengths = (most_likely.length + 1, self._max_tokens)
        return max(self._score(most_likely.cumulative_logprob, length) for length in lengths)

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._params.length_penalty)
